"""The parts of the training suite, one function each; what a part finds, later ones use."""

import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measure import Report

SUITE = "train"
CAP_GIB = 6.5
STEP_AIM_S, PEER_AIM, LIMIT_AIM, HIDDEN_AIM = 0.44, 2.0, 0.9, 0.8
FOUR_RATIO_AIM, FOUR_LIMIT_AIM = 1.1, 0.92
NUM_PINNED, EVERY = 6, 4  # by hand: shards that stay; of the others, each fourth is stepped on the device


@dataclass
class Found:
    """What was measured so far."""

    rates: Any = None
    resident_s: float | None = None
    peer_s: float | None = None
    one_s: float | None = None


def overlap(report: Report, found: Found) -> None:
    """With copies at 0.8 of compute, how much of their time does not show; on the simulated device."""
    import torch

    torch.set_num_threads(1)
    alone, bytes_up, bytes_down = _simulated(None)
    copying = 0.8 * alone
    taken, _, _ = _simulated((bytes_up + bytes_down) / copying)
    hidden = 1 - max(0.0, taken - alone) / copying
    report.add(
        SUITE, "copy time hidden, copies at 0.8 of compute, CPU", hidden, "share",
        aim=f">= {HIDDEN_AIM}", reached=hidden >= HIDDEN_AIM,
    )  # fmt: skip


def _simulated(bytes_per_s: float | None) -> tuple[float, int, int]:
    """Median step and its bytes on the simulated device."""
    import torch
    from torch import nn

    import loadmaster.train as lt
    from loadmaster.train.cpu_device import CpuDevice

    trial = lt.Trial(
        name="overlap",
        build=lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))),
        loss=nn.functional.mse_loss,
        data=lambda: [(torch.randn(1024, 256), torch.zeros(1024, 256))] * 12,
        optim=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
    device = CpuDevice(cap_bytes=1 << 30, copy_bytes_per_s=bytes_per_s)
    runner = lt.open_runner(trial, device=device, placement=["host"] * 12, num_slots=4, depth=3)
    done = list(runner.steps(device, 12))
    runner.close()
    device.close()
    return statistics.median(each.seconds for each in done[2:]), done[-1].bytes_up, done[-1].bytes_down


def calibrated(report: Report, found: Found) -> None:
    """Rates of the machine, the host's with duplex copies and the fused optimizer at once."""
    from loadmaster.train.rates import calibrate
    from loadmaster.train.runner import default_threads

    found.rates = calibrate(num_threads=default_threads())
    for name, what in (
        ("up_bytes_per_s", "bus each way, both at once"),
        ("host_bytes_per_s", "host memory, copies and optimizer at once"),
        ("host_params_per_s", "optimizer on the host beside copies"),
        ("flops_per_s", "a transformer layer, recomputed"),
        ("spread", "spread of the optimizer's rate"),
    ):
        report.add(SUITE, what, getattr(found.rates, name), "" if name == "spread" else name[-7:])


def resident(report: Report, found: Found) -> None:
    """The same model whole on the GPU: what its compute takes."""
    numbers = _apart("resident")
    found.resident_s = numbers["step_s"]
    report.add(SUITE, "1.64 B, 8 x 1024, whole on the device: step", found.resident_s, "s")
    report.add(SUITE, "... reserved", numbers["peak_gib"], "GiB")


def peer(report: Report, found: Found) -> None:
    """FSDP2 with CPU offload and the fused CPU optimizer."""
    numbers = _apart("offloaded")
    found.peer_s = numbers["step_s"]
    report.add(SUITE, "FSDP2, CPU offload, fused AdamW: step", found.peer_s, "s")
    report.add(SUITE, "... reserved", numbers["peak_gib"], "GiB")


def _apart(kind: str) -> dict[str, float]:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.offload_peer", kind, "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{kind} gave nothing: {done.stderr[-1500:]}")
    found: dict[str, float] = json.loads(lines[-1])[kind]
    return found


def one_trial(report: Report, found: Found) -> None:
    """The 1.64 B model under the cap: as planned, and as placed by hand."""
    import loadmaster.train as lt
    from loadmaster.train.cuda_device import CudaDevice

    device = CudaDevice(cap_bytes=int(CAP_GIB * 2**30))
    try:
        runner = lt.open_runner(_gpt("gpt", 1e-5), device=device, rates=_rates(found))
        found.one_s = _one(report, found, runner, device)
        runner.close()
        del runner
        gc.collect()
        placement: list[Any] = [_by_hand(number, 50) for number in range(50)]
        runner = lt.open_runner(_gpt("gpt", 1e-5), device=device, placement=placement, num_slots=4, depth=3)
        times, _ = _timed(runner, device, 10)
        by_hand_s = statistics.median(times[3:])
        found.one_s = min(found.one_s, by_hand_s)  # what four at once must beat
        report.add(SUITE, "... placed by hand (6 pinned, each 4th on the device)", by_hand_s, "s")
        runner.close()
    finally:
        device.close()
        gc.collect()


def _one(report: Report, found: Found, runner: Any, device: Any) -> float:
    import torch

    torch.cuda.reset_peak_memory_stats()
    plan = runner.plan
    times, last = _timed(runner, device, 14)
    step_s = statistics.median(times[4:])
    least = _limit(found, plan)
    count = plan.placement.count
    kinds = f"{count('pinned')} pinned, {count('host')} host, {count('device')} device"
    _aim(report, f"1.64 B under 6.5 GiB ({kinds}): step", step_s, "s", at_most=STEP_AIM_S)
    reserved = torch.cuda.max_memory_reserved() / 2**30
    _aim(report, "... reserved on the device", reserved, "GiB", at_most=CAP_GIB)
    report.add(SUITE, "... peak as planned", plan.peak_bytes / 2**30, "GiB")
    report.add(SUITE, "... allocated at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    report.add(SUITE, "... step as predicted", least.predicted_s, "s")
    report.add(SUITE, f"... limit (bound by {least.bound_by})", least.seconds, "s")
    _aim(report, "... share of the limit", least.seconds / step_s, "share", at_least=LIMIT_AIM)
    if found.resident_s is not None:
        rates = _rates(found)
        copying = last.bytes_up / rates.up_bytes_per_s + last.bytes_down / rates.down_bytes_per_s
        shown = max(0.0, step_s - found.resident_s)
        report.add(SUITE, "... copy time hidden", max(0.0, 1 - shown / copying), "share")
    if found.peer_s is not None:
        _aim(report, "... times as fast as FSDP2", found.peer_s / step_s, "x", at_least=PEER_AIM)
    return step_s


def four_trials(report: Report, found: Found) -> None:
    """Four trials in turn under the same cap, against one after another and against the limit."""
    import itertools

    import torch

    import loadmaster.train as lt
    from loadmaster.train.cuda_device import CudaDevice
    from loadmaster.train.updater import HostUpdater

    device = CudaDevice(cap_bytes=int(CAP_GIB * 2**30), trace=True)
    updater, sequence = HostUpdater(), itertools.count()
    runners = []
    try:
        for number in range(4):
            runners.append(
                lt.open_runner(
                    _gpt(f"gpt{number}", 1e-5 * (number + 1)),
                    device=device,
                    rates=_rates(found),
                    share=4,
                    updater=updater,
                    sequence=sequence,
                )
            )
            gc.collect()
        torch.cuda.reset_peak_memory_stats()
        times, traces, began = [], [], time.perf_counter()
        for _, done in lt.interleave(runners, device, 8):
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
            traces.append({label.split()[0] for _, label, _, _ in done.spans})
        _four(report, found, runners[0].plan, times[12:], traces[12:])
        reserved = torch.cuda.max_memory_reserved() / 2**30
        _aim(report, "... reserved on the device", reserved, "GiB", at_most=CAP_GIB)
    finally:
        for runner in runners:
            runner.close()
        device.close()


def _four(report: Report, found: Found, plan: Any, times: list[float], traces: list[set[str]]) -> None:
    step_s = statistics.fmean(times)
    least = _limit(found, plan)
    share = least.seconds / step_s
    ratio = None if found.one_s is None else found.one_s / step_s
    good = share >= FOUR_LIMIT_AIM or (ratio is not None and ratio >= FOUR_RATIO_AIM)
    either = f">= {FOUR_LIMIT_AIM} or {FOUR_RATIO_AIM}x"
    report.add(SUITE, "four trials in turn under 6.5 GiB: mean step of one", step_s, "s")
    report.add(SUITE, f"... limit (bound by {least.bound_by})", least.seconds, "s")
    report.add(SUITE, "... share of the limit", share, "share", aim=either, reached=good)
    if ratio is not None:
        report.add(SUITE, "... tokens/s of one after another", ratio, "x", aim=either, reached=good)
    _aim(report, "... fewest trials in a step's trace", min(map(len, traces)), "trials", at_least=2)


def _gpt(name: str, rate: float) -> Any:
    import torch

    import loadmaster.train as lt
    from benchmarks.gpt import gpt, gpt_loss, tokens

    return lt.Trial(
        name=name, build=gpt, loss=gpt_loss, data=tokens(40), precision="bf16",
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=rate, fused=True),
    )  # fmt: skip


def _timed(runner: Any, device: Any, num_steps: int) -> tuple[list[float], Any]:
    times, last, began = [], None, time.perf_counter()
    for done in runner.steps(device, num_steps):
        last = done
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    return times, last


def _rates(found: Found) -> Any:
    from loadmaster.train.rates import TYPICAL_GPU

    return TYPICAL_GPU if found.rates is None else found.rates


def _limit(found: Found, plan: Any) -> Any:
    """The limit of a plan; compute is what the resident model takes here, where that was measured."""
    from loadmaster.train.limits import limit

    rates = _rates(found)
    if found.resident_s is None:
        return limit(plan.work, rates)
    return limit(replace(plan.work, flops=found.resident_s * rates.flops_per_s), rates)


def _aim(
    report: Report, name: str, value: float, unit: str, *, at_most: float = 0.0, at_least: float = 0.0
) -> None:
    aim, reached = (f">= {at_least}", value >= at_least) if at_least else (f"<= {at_most}", value <= at_most)
    report.add(SUITE, name, value, unit, aim=aim, reached=reached)


def _by_hand(number: int, count: int) -> str:
    if number < NUM_PINNED:
        return "pinned"
    streamed = number - NUM_PINNED + 1
    return "device" if streamed % EVERY == EVERY - 1 and number < count - 1 else "host"

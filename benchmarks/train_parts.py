"""The parts of the training suite, one function each; what a part finds, later ones use.

Each runs in a process of its own: `python -m benchmarks.train_part NAME` (see there).
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Report
from benchmarks.spans import covered, length, union
from benchmarks.train_case import (
    FULL,
    SMOKE,
    TINY,
    Case,
    by_hand,
    closed,
    device_of,
    host_gib,
    memory,
    timed,
    trial_of,
)

SUITE = "train"
STEP_AIM_S, PEER_AIM, LIMIT_AIM = 0.44, 2.0, 0.9
FOUR_RATIO_AIM, FOUR_LIMIT_AIM = 1.1, 0.92
HOST_AIM_GIB = 110.0
_TRACED_STEPS = 4


@dataclass
class Found:
    """What was measured so far; travels between processes as JSON."""

    rates: dict[str, Any] | None = None
    resident_s: float | None = None
    peer_s: float | None = None
    one_s: float | None = None


def calibrated(report: Report, found: Found) -> None:
    """Rates of the machine, the host's with duplex copies and the fused optimizer at once."""
    from loadmaster.shards.plan.rates import calibrate
    from loadmaster.train.execute.runner import default_threads

    rates = calibrate(num_threads=default_threads())
    found.rates = asdict(rates)
    for name, what, unit in (
        ("up_bytes_per_s", "bus up, both ways at once", "B/s"),
        ("down_bytes_per_s", "bus down, both ways at once", "B/s"),
        ("host_bytes_per_s", "host memory, copies and optimizer at once", "B/s"),
        ("host_params_per_s", "optimizer on the host beside copies", "1/s"),
        ("flops_per_s", "a transformer layer, recomputed", "FLOP/s"),
        ("spread", "spread of the optimizer's rate", ""),
    ):
        report.add(SUITE, what, getattr(rates, name), unit)
    for ways, each in (rates.beside or {}).items():
        beside = f"beside the optimizer, copies {ways or 'none'}"
        report.add(SUITE, f"{beside}: its rate", each.params_per_s, "1/s")
        for way in ways.split():
            report.add(SUITE, f"{beside}: bus {way}", getattr(each, f"{way}_bytes_per_s"), "B/s")


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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{kind} gave nothing: {done.stderr[-1500:]}")
    found: dict[str, float] = json.loads(lines[-1])[kind]
    return found


def smoke(report: Report, found: Found) -> None:
    """Everything small, over the same code: mistakes show in seconds."""
    import torch

    from benchmarks import train_lora
    from loadmaster.shards.device.cpu_device import CpuDevice
    from loadmaster.shards.device.cuda_device import CudaDevice

    there = torch.cuda.is_available()
    case = SMOKE if there else TINY
    mine = Found(rates=found.rates)
    one_trial(report, mine, case)
    four_trials(report, mine, case)
    cap_bytes = 1 << 29 if there else 1 << 24
    device = CudaDevice(cap_bytes=cap_bytes, trace=True) if there else CpuDevice(cap_bytes=cap_bytes)
    try:
        numbers = train_lora.compared(train_lora.TINY, device, 3)
    finally:
        device.close()
    report.add(SUITE, "smoke: three small adapter trials at once: faster", numbers["ratio"], "x")


def one_trial(report: Report, found: Found, case: Case = FULL) -> None:
    """The model under the cap: as planned, and as placed by hand."""
    import loadmaster.train as lt

    device = device_of(case)
    try:
        runner = lt.open_runner(trial_of(case, "gpt", 1e-5), device=device, rates=_rates(found, case))
        try:
            found.one_s = _one(report, found, runner, device, case)
        finally:
            closed(runner)
            del runner
    finally:
        device.close()
    if os.environ.get("TRAIN_BY_HAND") == "0":
        return
    device = device_of(case)
    try:
        runner = lt.open_runner(
            trial_of(case, "gpt", 1e-5), device=device, placement=by_hand(case), num_slots=4, depth=3
        )
        try:
            device.tracing = False
            times, _ = timed(runner, device, max(case.num_steps - 4, case.num_warm + 1))
        finally:
            closed(runner)
        hand_s = statistics.median(times[case.num_warm - 1 :])
        report.add(
            SUITE, f"... placed by hand ({case.num_pinned} pinned, each 4th on the device)", hand_s, "s"
        )
        found.one_s = min(found.one_s, hand_s)  # what four at once must beat
    finally:
        device.close()


def _one(report: Report, found: Found, runner: Any, device: Any, case: Case) -> float:
    began = time.perf_counter()
    device.tracing = False  # events take time to record and to read
    times, _ = timed(runner, device, case.num_steps)
    step_s = statistics.median(times[case.num_warm :])
    device.tracing = True
    _, told = timed(runner, device, _TRACED_STEPS)
    told = told[1:]
    plan = runner.plan  # the one that was run: a rehearsal may have changed it
    least = _limit(found, plan, case)
    full = case is FULL
    count = plan.placement.count
    kinds = f"{count('pinned')} pinned, {count('host')} host, {count('device')} device"
    name = "1.64 B under 6.5 GiB" if full else "smoke: one trial"
    _aim(report, f"{name} ({kinds}): step", step_s, "s", at_most=STEP_AIM_S if full else 60.0)
    seen = memory(device)
    _aim(report, "... reserved on the device", seen["reserved"], "GiB", at_most=case.cap_gib)
    report.add(SUITE, "... peak as planned", plan.peak_bytes / 2**30, "GiB")
    report.add(SUITE, "... allocated at most", seen["allocated"], "GiB")
    report.add(SUITE, "... times the allocator gave memory back", seen["retries"], "")
    report.add(SUITE, "... plans after the first", len(runner.notes), "")
    report.add(SUITE, "... blocks profiled without memory", runner.state.facts.peaks is not None, "bool")
    report.add(SUITE, "... first step, with pinning and rehearsal", times[0], "s")
    report.add(SUITE, "... step as predicted", plan.step_s, "s")
    report.add(SUITE, f"... limit (bound by {least.bound_by})", least.seconds, "s")
    for term, seconds in least.terms.items():
        report.add(SUITE, f"... limit of {term}", seconds, "s")
    share = least.seconds / step_s
    _aim(report, "... share of the limit", share, "share", at_least=LIMIT_AIM if full else 1e-9)
    beside = _limit(found, plan, case, at_once=True)
    report.add(
        SUITE, f"... limit at the rates of all at once (bound by {beside.bound_by})", beside.seconds, "s"
    )
    share = beside.seconds / step_s
    name = "... share of the limit at the rates of all at once"
    _aim(report, name, share, "share", at_least=LIMIT_AIM if full else 1e-9)
    _hidden(report, told)
    _write_spans("one", told)
    if found.peer_s is not None and full:
        _aim(report, "... times as fast as FSDP2", found.peer_s / step_s, "x", at_least=PEER_AIM)
    report.add(SUITE, "... host memory at most", host_gib().get("VmHWM", 0.0), "GiB")
    report.add(SUITE, "... seconds of all steps", time.perf_counter() - began, "s")
    return step_s


def _write_spans(name: str, told: list[Any]) -> None:
    """The spans of some steps, a line each, where TRAIN_SPANS names a folder: to see what waits for what."""
    folder = os.environ.get("TRAIN_SPANS")
    if folder:
        with (Path(folder) / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(done.spans) + "\n" for done in told)


def _hidden(report: Report, told: list[Any]) -> None:
    """By the events of the streams: the share of copying during which units run, and of the step they run."""
    spans = [span for done in told for span in done.spans]
    units = [(first, last) for kind, _, first, last in spans if kind == "compute"]
    copies = [(first, last) for kind, _, first, last in spans if kind in ("up", "down")]
    host = [(first, last) for kind, _, first, last in spans if kind == "host"]
    whole = max(last for *_, last in spans) - min(first for _, _, first, _ in spans)
    report.add(SUITE, "... copy time hidden behind compute", covered(copies, units), "share")
    for name, which in (("compute", units), ("copies", copies), ("host updates", host)):
        report.add(SUITE, f"... busy: {name}", length(union(which)) / whole, "share")


def four_trials(report: Report, found: Found, case: Case = FULL) -> None:
    """Four trials in turn under the same cap, against one after another and against the limit."""
    import loadmaster.train as lt
    from loadmaster.shards.device.update_thread import HostUpdater

    device = device_of(case)
    updater, sequence = HostUpdater(), itertools.count()
    runners: list[Any] = []
    try:
        began = time.perf_counter()
        for number in range(4):
            trial = trial_of(case, f"gpt{number}", 1e-5 * (number + 1))
            given = {"rates": _rates(found, case), "share": 4, "updater": updater, "sequence": sequence}
            runners.append(lt.open_runner(trial, device=device, **given))
            _room_for(runners[0], left=3 - number)
        report.add(SUITE, "four trials (built)", time.perf_counter() - began, "s")
        planned = sum(host.slab.numel() for runner in runners for host in runner.state.pieces) / 2**30
        report.add(SUITE, "... host memory as planned", planned, "GiB")
        times, traces, began = [], [], time.perf_counter()
        for _, done in lt.interleave(runners, device, case.num_rounds):
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
            traces.append({label.split()[0] for _, label, _, _ in done.spans})
            _write_spans("four", [done])
        skipped = 4 * max(1, case.num_warm - 1)
        _four(report, found, runners[0].plan, times[skipped:], traces[skipped:], case)
        _aim(report, "... reserved on the device", memory(device)["reserved"], "GiB", at_most=case.cap_gib)
        report.add(SUITE, "... times the allocator gave memory back", memory(device)["retries"], "")
        report.add(SUITE, "... plans after the first", sum(len(runner.notes) for runner in runners), "")
        peak = host_gib().get("VmHWM", 0.0)
        _aim(report, "... host memory at most", peak, "GiB", at_most=HOST_AIM_GIB)
    finally:
        for runner in runners:
            closed(runner)
        device.close()


def _room_for(runner: Any, *, left: int) -> None:
    """Say it before the machine does: as many more like this one must fit."""
    needed = left * 1.02 * sum(host.slab.numel() for host in runner.state.pieces) / 2**30
    free = host_gib().get("available", 1e9)
    if needed + 2.0 > free and needed > 1.0:
        raise RuntimeError(f"{left} more trials need {needed:.1f} GiB of host memory, {free:.1f} GiB is free")


def _four(
    report: Report, found: Found, plan: Any, times: list[float], traces: list[set[str]], case: Case
) -> None:
    step_s = statistics.fmean(times)
    least = _limit(found, plan, case)
    share = least.seconds / step_s
    ratio = None if found.one_s is None else found.one_s / step_s
    good = share >= FOUR_LIMIT_AIM or (ratio is not None and ratio >= FOUR_RATIO_AIM)
    either = f">= {FOUR_LIMIT_AIM} or {FOUR_RATIO_AIM}x" if case is FULL else ""
    reached = good if case is FULL else None
    count = plan.placement.count
    kinds = f"{count('pinned')} pinned, {count('host')} host, {count('device')} device"
    report.add(SUITE, f"four trials in turn ({kinds}): mean step of one", step_s, "s")
    report.add(SUITE, "... median step of one", statistics.median(times), "s")
    report.add(SUITE, f"... limit (bound by {least.bound_by})", least.seconds, "s")
    report.add(SUITE, "... share of the limit, four", share, "share", aim=either, reached=reached)
    if ratio is not None:
        report.add(SUITE, "... tokens/s of one after another", ratio, "x", aim=either, reached=reached)
    _aim(report, "... fewest trials in a step's trace", min(map(len, traces)), "trials", at_least=2)


def _rates(found: Found, case: Case) -> Any:
    from loadmaster.shards.plan.rates import TYPICAL_GPU, OverlapRates, Rates

    rates = TYPICAL_GPU
    if found.rates is not None:
        beside = {ways: OverlapRates(**each) for ways, each in found.rates["beside"].items()}
        rates = Rates(**{**found.rates, "beside": beside})
    if found.resident_s is None or case is not FULL:
        return rates
    return replace(rates, compute_s=found.resident_s)


def _limit(found: Found, plan: Any, case: Case, *, at_once: bool = False) -> Any:
    """The limit of a plan; compute is what the resident model takes here, where that was measured.

    No step beats it: bus and optimizer count with what each does without the other. `at_once` takes what they
    do while copies both ways and the optimizer run together.
    """
    from loadmaster.shards.plan.step_limits import find_step_limit

    rates = _rates(found, case)
    if at_once and rates.beside is not None:
        all_of_it = rates.beside["up down"]
        rates = replace(
            rates,
            up_bytes_per_s=all_of_it.up_bytes_per_s,
            down_bytes_per_s=all_of_it.down_bytes_per_s,
            beside=None,
        )
    return find_step_limit(plan.work, rates)


def _aim(
    report: Report, name: str, value: float, unit: str, *, at_most: float = 0.0, at_least: float = 0.0
) -> None:
    aim, reached = (f">= {at_least}", value >= at_least) if at_least else (f"<= {at_most}", value <= at_most)
    report.add(SUITE, name, value, unit, aim=aim, reached=reached)

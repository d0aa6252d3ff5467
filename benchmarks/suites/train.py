"""Shard-parallel training: how near to the limit, how much of the copying hidden, how far ahead of the peer.

The GPU figures need CUDA and a host with some 40 GB; the peer (FSDP2 with CPU offload and fused AdamW, the
same model and loss) runs in a process of its own. The CPU figure stretches every copy of the simulated
device.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.measure import Report

SUITE = "train"
CAP_GIB = 6.5
STEP_AIM_S, PEER_AIM, LIMIT_AIM, HIDDEN_AIM = 0.44, 2.0, 0.9, 0.8
NUM_PINNED, EVERY = 6, 4  # shards that stay on the device; of the others, each fourth is stepped there


def run(report: Report) -> None:
    """All figures this machine can give."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    _overlap(report)
    if not torch.cuda.is_available():
        print(f"{SUITE:10} no CUDA device: the GPU figures are left out")
        return
    peer = _peer("offloaded")
    resident = _peer("resident")
    _one_trial(report, peer, resident)


def _overlap(report: Report) -> None:
    """With copies at 0.8 of compute, how much of their time does not show."""
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


def _peer(kind: str) -> dict[str, float]:
    """The peer in a process of its own; {} where it cannot run."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.offload_peer", kind, "8"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])[kind] if lines else {}


def _one_trial(report: Report, peer: dict[str, float], resident: dict[str, float]) -> None:
    """The 1.64 B model under the cap."""
    import torch

    import loadmaster.train as lt
    from benchmarks.gpt import gpt, gpt_loss, tokens
    from loadmaster.train.cuda_device import CudaDevice
    from loadmaster.train.limits import Work, limit
    from loadmaster.train.rates import calibrate
    from loadmaster.train.runner import default_threads

    rates = calibrate(num_threads=default_threads())
    for name in ("up_bytes_per_s", "host_bytes_per_s", "host_params_per_s", "flops_per_s"):
        report.add(SUITE, f"{name}, copies both ways and optimizer at once", getattr(rates, name), "1/s")
    trial = lt.Trial(
        name="gpt", build=gpt, loss=gpt_loss, data=tokens(40), precision="bf16",
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, fused=True),
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    device = CudaDevice(cap_bytes=int(CAP_GIB * 2**30))
    placement: list[Any] = [_where(number, 50) for number in range(50)]
    runner = lt.open_runner(trial, device=device, placement=placement, num_slots=4, depth=3)
    times, last = [], None
    began = time.perf_counter()
    for done in runner.steps(device, 14):
        last = done
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    step_s = statistics.median(times[4:])
    stepped = sum(
        host.master[p].numel()
        for host in runner.state.pieces
        if placement[host.piece.index] == "host"
        for p in range(len(host.master))
    )
    assert last is not None
    host_bytes = 30 * stepped + last.bytes_up + last.bytes_down
    compute_s = resident.get("step_s", 0.0)
    work = Work(
        flops=compute_s * rates.flops_per_s,  # the same model resident: what its compute takes here
        up_bytes=last.bytes_up, down_bytes=last.bytes_down, host_stepped=stepped, host_bytes=host_bytes,
    )  # fmt: skip
    least = limit(work, rates)
    reserved = torch.cuda.max_memory_reserved() / 2**30
    report.add(
        SUITE,
        "1.64 B, 8 x 1024, cap 6.5 GiB: step",
        step_s,
        "s",
        aim=f"<= {STEP_AIM_S}",
        reached=step_s <= STEP_AIM_S,
    )
    report.add(
        SUITE, "... reserved on the device", reserved, "GiB", aim=f"<= {CAP_GIB}", reached=reserved <= CAP_GIB
    )
    report.add(SUITE, f"... limit (bound by {least.bound_by})", least.seconds, "s")
    share = least.seconds / step_s
    report.add(
        SUITE, "... share of the limit", share, "share", aim=f">= {LIMIT_AIM}", reached=share >= LIMIT_AIM
    )
    copying = last.bytes_up / rates.up_bytes_per_s + last.bytes_down / rates.down_bytes_per_s
    if resident:
        report.add(SUITE, "... same model resident", compute_s, "s")
        report.add(SUITE, "... copy time hidden", 1 - max(0.0, step_s - compute_s) / copying, "share")
    if peer:
        ratio = peer["step_s"] / step_s
        report.add(SUITE, "... FSDP2 CPU offload, fused AdamW", peer["step_s"], "s")
        report.add(
            SUITE, "... faster than FSDP2", ratio, "x", aim=f">= {PEER_AIM}", reached=ratio >= PEER_AIM
        )
    runner.close()
    device.close()


def _where(number: int, count: int) -> str:
    if number < NUM_PINNED:
        return "pinned"
    streamed = number - NUM_PINNED + 1
    return "device" if streamed % EVERY == EVERY - 1 and number < count - 1 else "host"

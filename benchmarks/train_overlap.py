"""With copies stretched to 0.8 of compute, how much of their time does not show; on the simulated device.

Units and copies take the time they are given and sleep for it, so that neither takes processor time the other
would lack and the figure is the executor's, not the machine's. Two runs of the same trial take turns, step by
step, one with copies as slow as that and one without; the figure is the median over pairs.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import Report

SUITE, HIDDEN_AIM, COPIES = "train", 0.8, 0.8
NUM_SHARDS, WIDTH, UNIT_S, NUM_STEPS, NUM_WARM = 12, 64, 0.01, 12, 2


def measure(report: Report) -> None:
    """The share that is hidden."""
    hidden = hidden_share()
    report.add(
        SUITE, "copy time hidden, copies at 0.8 of compute, CPU", hidden, "share",
        aim=f">= {HIDDEN_AIM}", reached=hidden >= HIDDEN_AIM,
    )  # fmt: skip


def hidden_share() -> float:
    """1 - (what a step takes longer) / (what its copies take)."""
    import torch

    torch.set_num_threads(1)
    quick = _Run(None)
    first = [next(quick.steps) for _ in range(NUM_WARM + 4)][NUM_WARM:]
    alone_s = statistics.median(done.seconds for done in first)
    moved = first[-1].bytes_up + first[-1].bytes_down
    slow = _Run(moved / (COPIES * alone_s))
    for _ in range(NUM_WARM):
        next(slow.steps)
    pairs = [(next(quick.steps).seconds, next(slow.steps).seconds) for _ in range(NUM_STEPS)]
    for run in (quick, slow):
        run.close()
    longer_s = statistics.median(slowly - quickly for quickly, slowly in pairs)
    return 1 - max(0.0, longer_s) / (COPIES * alone_s)


class _Run:
    def __init__(self, bytes_per_s: float | None) -> None:
        import torch
        from torch import nn

        import loadmaster.train as lt
        from loadmaster.shards.device.cpu_device import CpuDevice

        class Sleep(torch.autograd.Function):
            """Compute that takes its time: backward twice as long as forward."""

            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                time.sleep(UNIT_S)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
                time.sleep(2 * UNIT_S)
                return slope.clone()

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(Sleep.apply(x))

        rows = torch.randn(8, WIDTH)
        trial = lt.Trial(
            name="overlap",
            build=lambda: nn.Sequential(*(Block() for _ in range(NUM_SHARDS))),
            loss=nn.functional.mse_loss,
            data=lambda: [(rows, torch.zeros_like(rows))] * 64,
            optim=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        )
        self.device = CpuDevice(cap_bytes=1 << 30, copy_bytes_per_s=bytes_per_s)
        placement: list[Any] = ["pinned"] * 2 + ["host"] * (
            NUM_SHARDS - 2
        )  # as plans have it: the first stay
        self.runner = lt.open_runner(
            trial, device=self.device, placement=placement, num_slots=5, depth=3, num_threads=1
        )
        self.steps: Iterator[Any] = self.runner.steps(self.device, 64)

    def close(self) -> None:
        self.runner.close()
        self.device.close()

"""How long a step takes on the CPU of this machine: small models are trained for a moment, once a process.

A step of a small model is mostly Python and calls of the framework, which no rate of arithmetic knows of:

    step_s = per_step_s + ops x per_op_s + (shards - 1) x per_shard_s + FLOPs / flops_per_s

Only predicted times come from here. Plans are chosen at fixed rates: the same study has the same plan,
and with it the same bits, in every call.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import nn

from loadmaster.modules import randomness
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.spec.trial import Trial

_NUM_WARM, _NUM_STEPS = 3, 9
_WIDTH, _NUM_BLOCKS = 8, 8
_CAP_BYTES = 1 << 22
_MATRIX = 384


@dataclass(frozen=True, slots=True)
class MachinePace:
    """Seconds of what a step is made of, on this machine's CPU."""

    per_step_s: float
    per_op_s: float  # forward and backward of one op, and its part of the update
    per_shard_s: float
    flops_per_s: float

    def predict_step_s(self, *, num_ops: float, num_shards: int, flops: float) -> float:
        """The time of a step."""
        fixed_s = self.per_step_s + num_ops * self.per_op_s + (num_shards - 1) * self.per_shard_s
        return fixed_s + flops / self.flops_per_s


def measure_machine_pace() -> MachinePace:
    """The pace at the number of threads that torch has now."""
    return _measure_pace(torch.get_num_threads())


@cache
def _measure_pace(_num_threads: int) -> MachinePace:
    with randomness.preserve_generators(torch.device("cpu")):
        one, ops_of_one = _time_steps(1, [0])
        many, ops_of_many = _time_steps(_NUM_BLOCKS, [0])
        parted, _ = _time_steps(_NUM_BLOCKS, range(_NUM_BLOCKS))
        per_op_s = max(0.0, many - one) / (ops_of_many - ops_of_one)
        return MachinePace(
            per_step_s=max(0.0, one - ops_of_one * per_op_s),
            per_op_s=per_op_s,
            per_shard_s=max(0.0, parted - many) / (_NUM_BLOCKS - 1),
            flops_per_s=_measure_flops_per_s(),
        )


def _time_steps(num_blocks: int, cuts: Any) -> tuple[float, int]:
    """The usual time of a step of a model of so many layers, and its ops."""
    from loadmaster.train.execute.runner import open_runner

    rows = torch.ones(2, _WIDTH)
    trial = Trial(
        name="pace",
        build=lambda: nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_blocks))),
        loss=lambda out, _: out.mean(),
        data=lambda: [(rows, rows)] * (_NUM_WARM + _NUM_STEPS),
        optim=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        verify=False,
    )
    device = CpuDevice(cap_bytes=_CAP_BYTES)
    try:
        cuts = list(cuts)
        runner = open_runner(trial, device=device, cuts=cuts, placement=["pinned"] * len(cuts))
        taken = [done.seconds for done in runner.steps(device, _NUM_WARM + _NUM_STEPS)]
        num_ops = sum(runner.state.facts.num_ops)
        runner.close()
    finally:
        device.close()
    return median(taken[_NUM_WARM:]), num_ops


def _measure_flops_per_s() -> float:
    left, right = torch.ones(_MATRIX, _MATRIX), torch.ones(_MATRIX, _MATRIX)
    taken = [_time_once(lambda: torch.mm(left, right)) for _ in range(6)]
    return 2 * _MATRIX**3 / median(taken[1:])


def _time_once(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

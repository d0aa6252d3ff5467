"""How long a step takes on the CPU of this machine: small models are trained for a moment, once a process.

A step of a small model is mostly Python and calls of the framework, which no rate of arithmetic knows of:

    step_s = per_step_s + ops x per_op_s + (shards - 1) x per_shard_s + FLOPs / flops_per_s

Where a plain step of the trial itself was timed (`timed_step`), what stands around it is the rest:

    step_s = plain + beside_step_s + units x per_unit_s + loads x per_load_s, or + calls x per_call_s

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
from loadmaster.shards.plan.layout import Placement
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
    beside_step_s: float = 0.0  # what a step takes beside that of a plain loop
    per_unit_s: float = 0.0  # a forward or backward pass of a shard in a chain
    per_load_s: float = 0.0  # one whose weights come from the host
    per_call_s: float = 0.0  # the same of a model that runs its own forward

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
        one, ops_of_one = _time_steps(1, "pinned", [0])
        many, ops_of_many = _time_steps(_NUM_BLOCKS, "pinned", [0])
        parted, _ = _time_steps(_NUM_BLOCKS, "pinned")
        streamed, _ = _time_steps(_NUM_BLOCKS, "host")
        called, _ = _time_steps(_NUM_BLOCKS, "host", by_call=True)
        plain_of_one, plain_of_many = _time_plain_steps(1), _time_plain_steps(_NUM_BLOCKS)
        per_op_s = max(0.0, many - one) / (ops_of_many - ops_of_one)
        beside_s, num_units = max(0.0, one - plain_of_one), 2 * _NUM_BLOCKS - 1
        return MachinePace(
            per_step_s=max(0.0, one - ops_of_one * per_op_s),
            per_op_s=per_op_s,
            per_shard_s=max(0.0, parted - many) / (_NUM_BLOCKS - 1),
            flops_per_s=_measure_flops_per_s(),
            beside_step_s=beside_s,
            per_unit_s=max(0.0, parted - many) / (num_units - 1),
            per_load_s=max(0.0, streamed - parted) / num_units,
            per_call_s=max(0.0, called - plain_of_many - beside_s) / (2 * _NUM_BLOCKS),
        )


class _Called(nn.Module):
    """A forward of its own around the same layers."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_blocks))

    def forward(self, rows: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of what they give, which is the loss."""
        for layer in self.layers:
            rows = layer(rows)
        return rows.mean()


def _make_blocks(num_blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_blocks)))


def _time_steps(
    num_blocks: int, placement: Placement, cuts: list[int] | None = None, *, by_call: bool = False
) -> tuple[float, int]:
    """The usual time of a step of a model of so many layers, and its ops."""
    from loadmaster.train.execute.runner import open_runner

    rows = torch.ones(2, _WIDTH)
    trial = Trial(
        name="pace",
        build=lambda: _Called(num_blocks) if by_call else _make_blocks(num_blocks),
        loss=None if by_call else lambda out, _: out.mean(),
        data=lambda: [(rows, rows)] * (_NUM_WARM + _NUM_STEPS),
        optim=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        verify=False,
    )
    device = CpuDevice(cap_bytes=_CAP_BYTES)
    try:
        runner = open_runner(
            trial, device=device, cuts=cuts, placement=[placement] * (len(cuts) if cuts else num_blocks)
        )
        taken = [done.seconds for done in runner.steps(device, _NUM_WARM + _NUM_STEPS)]
        num_ops = sum(runner.state.facts.num_ops)
        runner.close()
    finally:
        device.close()
    return median(taken[_NUM_WARM:]), num_ops


def _time_plain_steps(num_blocks: int) -> float:
    """The same in a plain loop."""
    rows, model = torch.ones(2, _WIDTH), _make_blocks(num_blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()

    taken = [_time_once(step) for _ in range(_NUM_WARM + _NUM_STEPS)]
    return median(taken[_NUM_WARM:])


def _measure_flops_per_s() -> float:
    left, right = torch.ones(_MATRIX, _MATRIX), torch.ones(_MATRIX, _MATRIX)
    taken = [_time_once(lambda: torch.mm(left, right)) for _ in range(6)]
    return 2 * _MATRIX**3 / median(taken[1:])


def _time_once(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

"""How long a step takes on the CPU of this machine: small models are trained for a moment, once a process.

A step of a small model is mostly Python and calls of the framework, which no rate of arithmetic knows of:

    step_s = per_step_s + ops x per_op_s + (shards - 1) x per_shard_s + FLOPs / flops_per_s

Where a plain step of the trial itself was timed (`timed_step`), what stands around it is the rest:

    step_s = plain + beside_step_s + units x per_unit_s + loads x per_load_s
    or     + calls x per_call_s + ops x per_called_op_s, and ops that run again x per_again_op_s

Only predicted times come from here. Plans are chosen at fixed rates: the same study has the same plan,
and with it the same bits, in every call.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
_WIDTH, _NUM_BLOCKS, _DEPTH = 8, 8, 16
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
    per_called_op_s: float = 0.0  # of an op in such a call: what it saves is looked at
    per_again_op_s: float = 0.0  # of one that runs again, beside that it runs

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
        called, ops_of_called = _time_steps(_NUM_BLOCKS, "host", by_call=True)
        deep, ops_of_deep = _time_steps(_NUM_BLOCKS, "host", by_call=True, depth=_DEPTH)
        again, _ = _time_steps(_NUM_BLOCKS, "host", by_call=True, depth=_DEPTH, again=True)
        plain_of_deep, forward_of_deep = _time_plain_steps(_NUM_BLOCKS, _DEPTH), _time_forward(_NUM_BLOCKS)
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
            per_called_op_s=max(0.0, deep - plain_of_deep - called + plain_of_many)
            / (ops_of_deep - ops_of_called),
            per_again_op_s=max(0.0, again - deep - forward_of_deep) / ops_of_deep,
        )


class _Called(nn.Module):
    """A forward of its own around the same layers."""

    def __init__(self, num_blocks: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_make_layer(depth) for _ in range(num_blocks))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean of what they give, which is the loss."""
        for layer in self.layers:
            rows = layer(rows)
        return rows.mean()


def _make_layer(depth: int) -> nn.Module:
    """One linear layer, or one with about as many ops and views as a layer of a transformer has."""
    if depth == 1:
        return nn.Linear(_WIDTH, _WIDTH)
    kinds = (
        lambda: nn.Linear(_WIDTH, _WIDTH),
        nn.GELU,
        lambda: nn.Unflatten(1, (2, _WIDTH // 2)),
        nn.Flatten,
    )
    return nn.Sequential(*(kinds[at % len(kinds)]() for at in range(depth)))


def _make_blocks(num_blocks: int, depth: int = 1) -> nn.Module:
    return nn.Sequential(*(_make_layer(depth) for _ in range(num_blocks)))


def _time_steps(
    num_blocks: int,
    placement: Placement,
    cuts: list[int] | None = None,
    *,
    by_call: bool = False,
    depth: int = 1,
    again: bool = False,
) -> tuple[float, int]:
    """The least time of a step of such a model, and its ops; `again`: its calls run twice.

    The least, because others may use the machine, too.
    """
    from loadmaster.train.execute.runner import open_runner

    rows, num_steps = torch.ones(2, _WIDTH), _NUM_WARM + _NUM_STEPS
    trial = Trial(
        name="pace",
        build=lambda: _Called(num_blocks, depth) if by_call else _make_blocks(num_blocks),
        loss=None if by_call else lambda out, _: out.mean(),
        data=lambda: [{"rows": rows} if by_call else (rows, rows)] * num_steps,
        optim=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        verify=False,
    )
    device = CpuDevice(cap_bytes=_CAP_BYTES)
    try:
        runner = open_runner(
            trial, device=device, cuts=cuts, placement=[placement] * (len(cuts) if cuts else num_blocks)
        )
        if again:
            runner.config = replace(runner.config, recompute=(True,) * num_blocks)
        taken = [done.seconds for done in runner.steps(device, num_steps)]
        num_ops = sum(runner.state.facts.num_ops)
        runner.close()
    finally:
        device.close()
    return min(taken[_NUM_WARM:]), num_ops


def _time_plain_steps(num_blocks: int, depth: int = 1) -> float:
    """The same in a plain loop."""
    rows, model = torch.ones(2, _WIDTH), _make_blocks(num_blocks, depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()

    taken = [_time_once(step) for _ in range(_NUM_WARM + _NUM_STEPS)]
    return min(taken[_NUM_WARM:])


def _time_forward(num_blocks: int) -> float:
    """A forward of the deep layers with a graph, which is what runs again."""
    rows, model = torch.ones(2, _WIDTH, requires_grad=True), _make_blocks(num_blocks, _DEPTH)
    return min(_time_once(lambda: model(rows)) for _ in range(_NUM_WARM + _NUM_STEPS))


def _measure_flops_per_s() -> float:
    left, right = torch.ones(_MATRIX, _MATRIX), torch.ones(_MATRIX, _MATRIX)
    taken = [_time_once(lambda: torch.mm(left, right)) for _ in range(6)]
    return 2 * _MATRIX**3 / median(taken[1:])


def _time_once(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

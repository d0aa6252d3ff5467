"""A plain step of a trial's own model, timed on this CPU, and what a step by shards then takes.

Rates of arithmetic do not know what softmax, a scan or a thousand small ops take; a run of the model does. It
runs on copies of its weights and leaves no trace. Where it would take long, or more memory than is there to
spare, nothing is run.

    compute   forward, loss and backward as timed, and forward again for shards that run twice
    updates   the trial's optimizer on its own gradients, as timed
    copies    the bytes of the plan at the rate of this machine's memory, beside compute where the forecast
              lets them
    Python    of a step, a unit and a call, from models that were trained for a moment (`machine_pace`)
"""

import time
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map

from loadmaster.modules import python_state, randomness
from loadmaster.shards.device.host_bytes import free_host_bytes
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.model.call_profile import bind_everywhere
from loadmaster.shards.model.optimizer_state import StepMember, adapt_hyper_to_host, copy_hyper, step_members
from loadmaster.shards.model.profile import preserve_attributes
from loadmaster.shards.plan.rates import SIMULATED
from loadmaster.shards.plan.shard_plan import ShardPlan
from loadmaster.shards.plan.sizes import Sizes
from loadmaster.shards.plan.step_forecast import forecast_step_s
from loadmaster.shards.plan.unit_order import count_forwards
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, compute_loss
from loadmaster.train.execute.machine_pace import MachinePace

_OF_FREE = 0.25  # of the host's free memory
_MOST_FLOPS = 2e11  # of a plain step: a few seconds of one core
_LONGEST_S = 2.0  # of all runs together, once there are two
_MOST_RUNS = 5
_NARROW = 0.02
_COPIED_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Seconds of one micro-batch, and of the updates of all parameters."""

    forward_s: float
    backward_s: float
    update_s: float  # as the trial's optimizer is
    host_update_s: float  # by the fused kernel, where it is left open


def time_plain_step(built: BuiltModel) -> PlainStep | None:
    """What a plain step takes here; None where it is not run, or does not run."""
    if built.batch is None or built.device.type != "cpu" or not _is_small(built):
        return None
    try:
        return _time_plain_step(built)
    except Exception:  # the model's own: it is raised where it is trained, or said by who planned it
        return None
    finally:
        for parameter in built.chain.parameters:
            parameter.grad = None


def predict_step_s(
    built: BuiltModel, plan: ShardPlan, sizes: Sizes, plain: PlainStep, pace: MachinePace
) -> float:
    """Seconds of a step by shards."""
    flops, layout, passes = built.facts.flops, plan.layout, built.trial.accumulate
    whole = sum(flops) or 1.0
    if built.chain.by_call:
        twice = {s for s in set(layout.calls or ()) if layout.recompute and layout.recompute[s]}
        again = sum(flops[s] for s in twice) / whole
    else:
        last = layout.cuts[-1][0]
        again = sum(flops[:last]) / whole * count_forwards(built.trial, built.facts) / passes
    compute_s = passes * (plain.forward_s * (1 + again) + plain.backward_s)
    numel = [sum(sizes.numel[n] for n in p.parameters if sizes.trained[n]) for p in layout.pieces]
    total = sum(numel) or 1
    here = sum(n for n, where in zip(numel, plan.placement, strict=True) if where != "host") / total
    compute_s += here * plain.update_s
    bytes_per_s = _measure_copies()
    rates = replace(
        SIMULATED,
        compute_s=compute_s,
        up_bytes_per_s=bytes_per_s,
        down_bytes_per_s=bytes_per_s,
        host_bytes_per_s=float("inf"),
        host_params_per_s=total / max(plain.host_update_s, 1e-9),
    )
    taken = forecast_step_s(built, plan, sizes, rates)
    return max(taken, compute_s) + pace.beside_step_s + passes * _seconds_around(built, plan, pace)


def _seconds_around(built: BuiltModel, plan: ShardPlan, pace: MachinePace) -> float:
    """What Python does around the units or calls of one micro-batch."""
    layout, ops = plan.layout, built.facts.num_ops
    streamed = [p for p, where in zip(layout.pieces, plan.placement, strict=True) if where != "pinned"]
    if not built.chain.by_call:
        loads = sum(2 * len(piece.shards) - 1 for piece in streamed)
        return pace.per_unit_s * (2 * layout.num_shards - 1) + pace.per_load_s * loads
    if not streamed:  # nothing stands around the calls
        return 0.0
    calls = layout.calls or ()
    twice = sum(ops[s] for s in set(calls) if layout.recompute and layout.recompute[s])
    seen_s = pace.per_called_op_s * sum(ops[s] for s in set(calls))
    return 2 * len(calls) * pace.per_call_s + seen_s + pace.per_again_op_s * twice


def _is_small(built: BuiltModel) -> bool:
    facts = built.facts
    weights = sum(parameter.nbytes for parameter in built.chain.parameters)
    needed = 5 * weights + 2 * sum(facts.saved_bytes) + 4 * max(facts.output_bytes, default=0)
    return 3 * sum(facts.flops) <= _MOST_FLOPS and needed <= _OF_FREE * free_host_bytes()


def _time_plain_step(built: BuiltModel) -> PlainStep:
    trial, chain, where = built.trial, built.chain, torch.device("cpu")
    dtype = COMPUTE_DTYPE[trial.precision]
    with randomness.preserve_generators(where):
        weights = [_copy_weight(parameter) for parameter in chain.parameters]
    buffers = [buffer.clone() for buffer in chain.buffers]
    rows: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    with (
        randomness.preserve_generators(where),
        python_state.preserve_state(list(chain.model.modules())),
        preserve_attributes(chain.model),
        bind_everywhere(chain, weights, buffers),
    ):
        while len(rows) < 2 or (len(rows) < _MOST_RUNS and time.perf_counter() - began < _LONGEST_S):
            inputs, targets = (tree_map(_copy, each) for each in built.batch)
            for weight in weights:
                weight.grad = None
            first = time.perf_counter()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = compute_loss(trial, chain.call_model(inputs), targets)
            middle = time.perf_counter()
            loss.backward()
            last = time.perf_counter()
            rows.append((middle - first, last - middle, last - first))
            del loss
    forward_s, backward_s, _ = min(rows[1:], key=lambda row: row[2])  # others may use the machine, too
    return PlainStep(forward_s, backward_s, *_time_updates(built, weights))


def _time_updates(built: BuiltModel, weights: list[torch.Tensor]) -> tuple[float, float]:
    """Of all parameters that have a gradient: as the optimizer is, and as it is on the host."""
    hyper = copy_hyper(built.optimizer)
    found = []
    for options in (hyper, adapt_hyper_to_host(hyper)):
        members = [
            StepMember(group, weight.detach(), weight.grad, {})
            for group, weight in zip(built.probe.group_of, weights, strict=True)
            if group >= 0 and weight.grad is not None
        ]
        step_members(built.optimizer, members, options)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            step_members(built.optimizer, members, options)
            times.append(time.perf_counter() - began)
        found.append(min(times))
    return found[0], found[1]


def _copy_weight(parameter: torch.Tensor) -> torch.Tensor:
    """Its own numbers; small random ones where it was built without memory."""
    if parameter.numel() > 1 and not any(parameter.stride()):
        made = torch.randn(parameter.shape, dtype=torch.float32).mul_(_NARROW).to(parameter.dtype)
    else:
        made = parameter.detach().clone()
    return made.requires_grad_(parameter.requires_grad)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@cache
def _measure_copies() -> float:
    """Bytes a second of a copy within this machine's memory."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return _COPIED_BYTES / median(times[1:])

"""Gaps: what Python and autograd take between ops of a CPU, beyond what the ops take on their own. [torch]

A small model of ordinary modules is trained for a few steps; what a step takes, less the measured times of
its ops, is shared out over its ops: forward and backward, both again in mixed precision (where each op also
decides what to cast), and the updates with the clearing of gradients. What calling an optimizer takes,
however few its weights, is shared out over the updates of a step. Kept like any other measurement, under keys
of their own. For a GPU see `issue_reference`: there ops do not wait for what lies between them.

What it takes to copy a tensor to another part of the same CPU is timed along with them (`copies`).

A larger model of the same modules is trained for a few steps to see what a whole step takes beside the sum of
its ops and gaps (`whole_step`).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.busy_machine import BUSY, CALM, BusyWatch
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.keys import COPIES, GAPS, WHOLE_STEP, collect_keys
from loadmaster.cost.timed.reference_models import WIDTH, make_model, small_input
from loadmaster.cost.timed.stopwatch import time_optimizer_call, torch_version
from loadmaster.cost.timed.timing import lower_quartile, read_clocks, time_call, work_seconds_since
from loadmaster.graph.capture import capture

FORWARD, BACKWARD, CALL, MIXED_FORWARD, UPDATE, MIXED_BACKWARD = GAPS
_MIXED = torch.bfloat16
_DEPTH, _STEPS = 8, 20
_LARGE, _LARGE_DEPTH, _LARGE_ROWS = 768, 3, (1, 64)
_WARM_UP_STEPS = 4
_MOST_S = 3.0


def capture_references() -> tuple[Graph, Graph]:
    """The small model's step, and its step in mixed precision."""
    model, given = make_model(WIDTH, _DEPTH), (small_input(),)
    mixed = capture(model, given, optimizer=None, autocast=_MIXED, name="gaps in mixed precision")
    return capture(model, given, name="gaps"), mixed


def capture_trained_reference() -> Graph:
    """The larger model's training step."""
    with torch.device("meta"):
        model, given = make_model(_LARGE, _LARGE_DEPTH), torch.zeros(*_LARGE_ROWS, _LARGE)
    return capture(model, (given,), optimizer="adamw", name="whole step")


def measure_gaps(
    graphs: tuple[Graph, Graph], rows: Mapping[str, CostRow], torch_name: str, chip: str, watch: BusyWatch
) -> list[CostRow]:
    """What is lost per op on the CPU, given the measured rows of the references' keys, and per step."""
    device = torch.device(torch_name)
    plain, mixed = graphs
    passes, mixed_passes = _time_host(device, None), _time_host(device, _MIXED)
    call_s = time_optimizer_call(device)
    found = {
        FORWARD: _gap_per_op(passes.forward_s, Phase.FORWARD, plain, rows),
        BACKWARD: _gap_per_op(passes.backward_s, Phase.BACKWARD, plain, rows),
        CALL: call_s,
        MIXED_FORWARD: _gap_per_op(mixed_passes.forward_s, Phase.FORWARD, mixed, rows),
        MIXED_BACKWARD: _gap_per_op(mixed_passes.backward_s, Phase.BACKWARD, mixed, rows),
        UPDATE: _gap_per_op(passes.update_s - call_s, Phase.UPDATE, plain, rows),
    }
    found |= {key: time_call(_make_copy(size), device).seconds for key, size in COPIES.items()}
    moment, date = _moment_of(watch, rows.values()), today()
    return [
        CostRow(key, chip, torch_version(), date, seconds, 0.0, _STEPS, moment=moment)
        for key, seconds in found.items()
    ]


def measure_whole_step(
    graph: Graph, rows: Mapping[str, CostRow], chip: str, watch: BusyWatch
) -> list[CostRow]:
    """The larger model's step on the CPU as a whole, and by its ops; no rows where one is missing."""
    keys, by_ops_s, spread = collect_keys(graph), 0.0, 0.0
    between = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.UPDATE: UPDATE}
    for op in np.flatnonzero(keys.measurable).tolist():
        row, gap = rows.get(keys.text[keys.of_op[op]]), rows.get(between.get(Phase(graph.phase[op]), ""))
        if row is None:
            return []
        by_ops_s += (row.seconds or 0.0) + ((gap.seconds or 0.0) if gap is not None else 0.0)
        spread += (row.seconds or 0.0) * row.spread
    by_ops_s += (rows[CALL].seconds or 0.0) if CALL in rows else 0.0
    low, _, high = statistics.quantiles(_time_steps(), n=4, method="inclusive")
    moment, version, date = _moment_of(watch, rows.values()), torch_version(), today()
    whole, by_ops = WHOLE_STEP
    return [
        CostRow(whole, chip, version, date, low, (high - low) / 2 / low, _STEPS, moment=moment),
        CostRow(by_ops, chip, version, date, by_ops_s, spread / by_ops_s, _STEPS, moment=moment),
    ]


def _time_steps() -> list[float]:
    """Seconds of training steps of the larger model on the CPU, the first ones left out."""
    with torch.enable_grad():
        model = make_model(_LARGE, _LARGE_DEPTH)
        optimizer = torch.optim.AdamW(model.parameters())
        given, seconds = torch.zeros(*_LARGE_ROWS, _LARGE), []
        end = time.perf_counter() + _MOST_S
        for step in range(_WARM_UP_STEPS + _STEPS):
            if step > _WARM_UP_STEPS + 4 and time.perf_counter() > end:
                break
            started = read_clocks()
            loss: Any = model(given).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(work_seconds_since(started))
    return seconds[_WARM_UP_STEPS:]


def _moment_of(watch: BusyWatch, rows: Iterable[CostRow]) -> str:
    """Calm where it is now and was for all rows that this rests on."""
    watch.wait_to_tell()
    return BUSY if watch.is_busy_now() or any(row.moment != CALM for row in rows) else CALM


def _make_copy(num_bytes: int) -> Callable[[], Any]:
    """A copy in new memory, with as many calls as a placed model makes for one."""
    tensor = torch.zeros(num_bytes // 4)

    def copy() -> torch.Tensor:
        with torch.no_grad():
            source = tensor.detach()
            return torch.empty(tuple(source.shape), dtype=source.dtype, device=source.device).copy_(source)

    return copy


def _gap_per_op(total_s: float, phase: Phase, graph: Graph, rows: Mapping[str, CostRow]) -> float:
    keys = collect_keys(graph)
    ops = np.flatnonzero((graph.phase == phase) & keys.measurable)
    own_s = 0.0
    for op in ops.tolist():
        row = rows.get(keys.text[keys.of_op[op]])
        if row is not None and row.seconds is not None:
            own_s += row.seconds
    return max(0.0, (total_s - own_s) / max(1, len(ops)))


class _HostSeconds(NamedTuple):
    """What the host takes for the passes of a step."""

    forward_s: float
    backward_s: float
    update_s: float


def _time_host(device: torch.device, mixed: torch.dtype | None) -> _HostSeconds:
    """The host's seconds for a step of the small model."""
    model = make_model(WIDTH, _DEPTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    given = small_input(device)
    seen = []
    end = time.perf_counter() + _MOST_S
    for step in range(_WARM_UP_STEPS + _STEPS):
        if step > _WARM_UP_STEPS + 2 and time.perf_counter() > end:
            break
        started = read_clocks()
        optimizer.zero_grad()
        clear_s, started = work_seconds_since(started), read_clocks()
        with torch.autocast(device.type, dtype=mixed) if mixed is not None else nullcontext():
            loss: Any = model(given).mean()
        forward_s, started = work_seconds_since(started), read_clocks()
        loss.backward()
        backward_s, started = work_seconds_since(started), read_clocks()
        optimizer.step()
        if step >= _WARM_UP_STEPS:
            seen.append(_HostSeconds(forward_s, backward_s, clear_s + work_seconds_since(started)))
    return _HostSeconds(*(lower_quartile(list(each)) for each in zip(*seen, strict=True)))

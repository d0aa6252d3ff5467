"""Issue reference: the host's time for whole passes of a step on a GPU, beside the sum of their ops. [torch]

The model is of usual modules, so small that the GPU waits for the host throughout, and timed as loops run:
after waiting for the GPU, with the next step's work not yet there. It is deep enough that what a pass takes
once (autograd's thread wakes up) counts for little, as it does in models that are worth planning. The host
must not be made to wait otherwise than loops do: after 50 ms it was slower by a half. Its times spread
widely from one moment to the next, so the median of many steps counts.
"""

import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.busy_machine import BUSY, CALM, BusyWatch
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.issue import BACKWARD, FORWARD, MIXED_BACKWARD, MIXED_FORWARD, UPDATE
from loadmaster.cost.keys import ISSUE_CALL, ISSUE_PASSES, collect_keys, issue_keys
from loadmaster.cost.timed.reference_models import WIDTH, make_model, small_input
from loadmaster.cost.timed.stopwatch import time_optimizer_call, torch_version
from loadmaster.graph.capture import capture

DEPTH = 24
_WARM_UP_STEPS, _STEPS = 5, 24  # in each precision
_MOST_S = 2.0  # likewise
_MIXED = torch.bfloat16


def capture_issue_references(depth: int = DEPTH) -> tuple[Graph, Graph]:
    """The step of the deep model, and its step in mixed precision."""
    with torch.device("meta"):
        model, given = make_model(WIDTH, depth), (small_input(),)
    mixed = capture(
        model, given, optimizer=None, autocast=_MIXED, target="cuda", name="issue in mixed precision"
    )
    return capture(model, given, optimizer="adamw", target="cuda", name="issue"), mixed


def measure_issue(
    graphs: tuple[Graph, Graph],
    rows: Mapping[str, CostRow],
    torch_name: str,
    chip: str,
    watch: BusyWatch,
    depth: int = DEPTH,
) -> list[CostRow]:
    """Every pass as a whole and by its ops, and the call; a pass with a missing op is left out."""
    device = torch.device(torch_name)
    plain, mixed = graphs
    call_s = time_optimizer_call(device)
    passes = time_passes(device, depth)
    passes[UPDATE] = [max(0.0, seconds - call_s) for seconds in passes[UPDATE]]
    watch.wait_to_tell()
    moment, date, version = BUSY if watch.is_busy_now() else CALM, today(), torch_version()
    found = [CostRow(ISSUE_CALL, chip, version, date, call_s, 0.0, _STEPS, moment=moment)]
    of = {FORWARD: Phase.FORWARD, BACKWARD: Phase.BACKWARD, UPDATE: Phase.UPDATE}
    of |= {MIXED_FORWARD: Phase.FORWARD, MIXED_BACKWARD: Phase.BACKWARD}
    for name, seconds in passes.items():
        by_ops_s = _sum_issues(mixed if name.startswith("mixed") else plain, of[name], rows)
        if by_ops_s is None:
            continue
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        whole, by_ops = issue_keys(name)
        spread = (high - low) / 2 / middle if middle > 0 else 0.0
        found.append(CostRow(whole, chip, version, date, middle, spread, len(seconds), moment=moment))
        found.append(CostRow(by_ops, chip, version, date, by_ops_s, 0.0, len(seconds), moment=moment))
    return found


def time_passes(device: torch.device, depth: int = DEPTH) -> dict[str, list[float]]:
    """The host's seconds of every pass of steps of the deep model, one precision after the other.

    Steps of the two in turns were tried: passes of float32 then take longer than in any loop.
    """
    model = make_model(WIDTH, depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    given = small_input(device)
    found: dict[str, list[float]] = {name: [] for name in ISSUE_PASSES}
    for mixed in (False, True):
        end = time.perf_counter() + _MOST_S
        for step in range(_WARM_UP_STEPS + _STEPS):
            if step > _WARM_UP_STEPS + 4 and time.perf_counter() > end:
                break
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            clear_s, forward_s, backward_s, update_s = _time_step(model, optimizer, given, mixed)
            if step < _WARM_UP_STEPS:
                continue
            found[MIXED_FORWARD if mixed else FORWARD].append(forward_s)
            found[MIXED_BACKWARD if mixed else BACKWARD].append(backward_s)
            if not mixed:
                found[UPDATE].append(clear_s + update_s)
    return found


def _time_step(model: Any, optimizer: Any, given: torch.Tensor, mixed: bool) -> list[float]:
    """Seconds to clear, for the forward and the backward pass, and to update."""
    with torch.enable_grad():
        clocks = [time.perf_counter()]
        optimizer.zero_grad()
        clocks.append(time.perf_counter())
        with torch.autocast(given.device.type, dtype=_MIXED) if mixed else nullcontext():
            loss: Any = model(given).mean()
        clocks.append(time.perf_counter())
        loss.backward()
        clocks.append(time.perf_counter())
        optimizer.step()
        clocks.append(time.perf_counter())
    seconds: list[float] = np.diff(clocks).tolist()
    return seconds


def _sum_issues(graph: Graph, phase: Phase, rows: Mapping[str, CostRow]) -> float | None:
    """The ops of a pass, issued one by one; None where one was not measured."""
    keys, total_s = collect_keys(graph), 0.0
    for op in np.flatnonzero((graph.phase == phase) & keys.measurable).tolist():
        row = rows.get(keys.text[keys.of_op[op]])
        if row is None or row.seconds is None:
            return None
        total_s += row.issue_s
    return total_s if total_s > 0 else None

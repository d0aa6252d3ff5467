"""Gaps: what Python and autograd take between ops, beyond what the ops take on their own. [torch]

A small model of ordinary modules is trained for a few steps; what a step takes, less the measured times of
its ops, is shared out over its ops: forward, forward in mixed precision (where each op also decides what to
cast), backward, and the updates with the clearing of gradients. On a GPU it is the host's time to issue that
is compared. What calling an optimizer takes, however few its weights, is shared out over the updates of a
step. Kept like any other measurement, under keys of their own.
"""

import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.keys import GAPS, collect_keys
from loadmaster.cost.stopwatch import time_optimizer_call, torch_version
from loadmaster.cost.timing import lower_quartile, read_clocks, work_seconds_since
from loadmaster.graph.capture import capture

FORWARD, BACKWARD, CALL, MIXED_FORWARD, UPDATE = GAPS
_MIXED = torch.bfloat16
_WIDTH, _HEADS, _DEPTH, _ROWS, _STEPS = 16, 2, 8, (2, 8), 20
_WARM_UP_STEPS = 4
_MOST_S = 3.0
_WAIT_CYCLES = 100_000_000  # some 50 ms, while the host issues


class _Block(nn.Module):
    """A layer as people write them: modules, views, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.mix = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention by hand, then a product."""
        batch, rows, width = x.shape
        parts = self.mix(self.norm(x)).view(batch, rows, _HEADS, 3, width // _HEADS)
        query, key, value = parts.permute(3, 0, 2, 1, 4).unbind(0)
        scores = torch.softmax(query @ key.transpose(-2, -1), dim=-1)
        seen = (scores @ value).transpose(1, 2).reshape(batch, rows, width)
        made: torch.Tensor = x + self.act(self.out(seen))
        return made


def capture_references() -> tuple[Graph, Graph]:
    """The small model's step, and its step in mixed precision."""
    model = nn.Sequential(*(_Block() for _ in range(_DEPTH)))
    given = (torch.zeros(*_ROWS, _WIDTH),)
    mixed = capture(model, given, optimizer=None, autocast=_MIXED, name="gaps in mixed precision")
    return capture(model, given, name="gaps"), mixed


def measure_gaps(
    graphs: tuple[Graph, Graph], rows: Mapping[str, CostRow], torch_name: str, chip: str
) -> list[CostRow]:
    """What is lost per op, given the measured rows of the references' keys, and per step."""
    device = torch.device(torch_name)
    plain, mixed = graphs
    passes, mixed_passes = _time_host(device, None), _time_host(device, _MIXED)
    call_s = time_optimizer_call(device)
    found = {
        FORWARD: _gap_per_op(passes.forward_s, Phase.FORWARD, plain, rows),
        BACKWARD: _gap_per_op(passes.backward_s, Phase.BACKWARD, plain, rows),
        CALL: call_s,
        MIXED_FORWARD: _gap_per_op(mixed_passes.forward_s, Phase.FORWARD, mixed, rows),
        UPDATE: _gap_per_op(passes.update_s - call_s, Phase.UPDATE, plain, rows),
    }
    version, date = torch_version(), today()
    return [CostRow(key, chip, version, date, seconds, 0.0, _STEPS) for key, seconds in found.items()]


def _gap_per_op(total_s: float, phase: Phase, graph: Graph, rows: Mapping[str, CostRow]) -> float:
    keys = collect_keys(graph)
    ops = np.flatnonzero((graph.phase == phase) & keys.measurable)
    own_s = 0.0
    for op in ops.tolist():
        row = rows.get(keys.text[keys.of_op[op]])
        if row is not None and row.seconds is not None:
            own_s += row.issue_s or row.seconds
    return max(0.0, (total_s - own_s) / max(1, len(ops)))


class _HostSeconds(NamedTuple):
    """What the host takes for the passes of a step."""

    forward_s: float
    backward_s: float
    update_s: float


def _time_host(device: torch.device, mixed: torch.dtype | None) -> _HostSeconds:
    """The host's seconds for a step of the small model."""
    model = nn.Sequential(*(_Block() for _ in range(_DEPTH))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    given = torch.zeros(*_ROWS, _WIDTH, device=device)
    seen = []
    end = time.perf_counter() + _MOST_S
    for step in range(_WARM_UP_STEPS + _STEPS):
        if step > _WARM_UP_STEPS + 2 and time.perf_counter() > end:
            break
        _keep_busy(device)
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
    usual = lower_quartile if device.type == "cuda" else statistics.median
    return _HostSeconds(*(usual(list(each)) for each in zip(*seen, strict=True)))


def _keep_busy(device: torch.device) -> None:
    """The GPU waits, so that nothing the host does has to wait for it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(_WAIT_CYCLES)

"""Gaps: what Python and autograd take between ops, beyond what the ops take on their own. [torch]

A small model of ordinary modules is trained for a few steps; what a step takes, less the measured times of
its ops, is shared out over its ops, forward and backward apart. On a GPU it is the host's time to issue that
is compared. What calling an optimizer takes, however few its weights, is shared out over the updates of a
step. Kept like any other measurement, under keys of their own.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.keys import GAPS, Keys, collect_keys
from loadmaster.cost.stopwatch import time_optimizer_call, torch_version
from loadmaster.cost.timing import lower_quartile, read_clocks, work_seconds_since
from loadmaster.graph.capture import capture

FORWARD, BACKWARD, UPDATE = GAPS
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


def capture_reference() -> Graph:
    """The small model's step."""
    model = nn.Sequential(*(_Block() for _ in range(_DEPTH)))
    return capture(model, (torch.zeros(*_ROWS, _WIDTH),), optimizer=None, name="gaps")


def measure_gaps(
    graph: Graph, rows: Mapping[str, CostRow], torch_name: str, chip: str
) -> tuple[CostRow, CostRow, CostRow]:
    """What is lost per op, given the measured rows of the reference's keys, and per step."""
    device, keys = torch.device(torch_name), collect_keys(graph)
    both = _time_host(device)
    version, date = torch_version(), today()
    return (
        CostRow(
            FORWARD, chip, version, date, _gap_per_op(both[0], Phase.FORWARD, graph, keys, rows), 0.0, _STEPS
        ),
        CostRow(
            BACKWARD,
            chip,
            version,
            date,
            _gap_per_op(both[1], Phase.BACKWARD, graph, keys, rows),
            0.0,
            _STEPS,
        ),
        CostRow(UPDATE, chip, version, date, time_optimizer_call(device), 0.0, _STEPS),
    )


def _gap_per_op(total_s: float, phase: Phase, graph: Graph, keys: Keys, rows: Mapping[str, CostRow]) -> float:
    ops = np.flatnonzero((graph.phase == phase) & keys.measurable)
    own_s = 0.0
    for op in ops.tolist():
        row = rows.get(keys.text[keys.of_op[op]])
        if row is not None and row.seconds is not None:
            own_s += row.issue_s or row.seconds
    return max(0.0, (total_s - own_s) / max(1, len(ops)))


def _time_host(device: torch.device) -> tuple[float, float]:
    """The host's seconds for the forward and the backward pass of the small model."""
    model = nn.Sequential(*(_Block() for _ in range(_DEPTH))).to(device)
    given = torch.zeros(*_ROWS, _WIDTH, device=device)
    forward, backward = [], []
    end = time.perf_counter() + _MOST_S
    for step in range(_WARM_UP_STEPS + _STEPS):
        if step > _WARM_UP_STEPS + 2 and time.perf_counter() > end:
            break
        model.zero_grad()
        _keep_busy(device)
        started = read_clocks()
        loss: Any = model(given).mean()
        forward_s, middle = work_seconds_since(started), read_clocks()
        loss.backward()
        if step >= _WARM_UP_STEPS:
            forward.append(forward_s)
            backward.append(work_seconds_since(middle))
    usual = lower_quartile if device.type == "cuda" else statistics.median
    return usual(forward), usual(backward)


def _keep_busy(device: torch.device) -> None:
    """The GPU waits, so that nothing the host does has to wait for it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(_WAIT_CYCLES)

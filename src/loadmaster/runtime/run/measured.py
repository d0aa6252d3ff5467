"""Measured: what a clock saw of a step, as a Timeline of the plan's own ops, and as seconds of each op.

An op of the forward pass has its name. One of the backward pass is found by the op whose gradient it computes
and by its kind, in order; likewise the ops of the loss. An update has its weight's name. What is found
nowhere (a sum that autograd makes between ops) is in no span.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import NO_MIRROR, Graph, Phase
from loadmaster.core.plan import Plan
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.keys import collect_keys
from loadmaster.graph.whole_modules import LOSS
from loadmaster.runtime.graph_engine.op_clock import MeasuredSpan

_WHOLE = 0.999  # an update that was timed on its own
_UPDATE = ".update"


@dataclass(slots=True)
class Spans:
    """Spans in the making."""

    kind: list[int] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    item: list[int] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    issue_s: list[float] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)  # timed on its own

    def add(self, kind: SpanKind, resource: int, item: int, seen: MeasuredSpan, alone: bool = True) -> None:
        """One more."""
        self.kind.append(kind)
        self.resource.append(resource)
        self.item.append(item)
        self.start_s.append(seen.start_s)
        self.end_s.append(seen.end_s)
        self.issue_s.append(seen.issue_s)
        self.alone.append(alone)


def match_spans(seen: Iterable[MeasuredSpan], graph: Graph, plan: Plan, num_devices: int) -> Spans:
    """What was seen, each under the op or tensor of the graph that it is."""
    op_at = {name: op for op, name in enumerate(graph.op_name)}
    tensor_at: dict[int, int] = {}
    for tensor, op in enumerate(graph.tensor_op.tolist()):
        tensor_at.setdefault(op, tensor)
    waiting = _index_waiting_ops(graph)
    spans, shared = Spans(), defaultdict[tuple[float, float], float](float)
    for one in seen:
        if one.what == "transfer":
            op = op_at.get(one.name)
            if op in tensor_at and one.source != one.device:
                spans.add(
                    SpanKind.TRANSFER, one.source * num_devices + one.device, tensor_at[int(op or 0)], one
                )
        elif one.what == "update":
            op = op_at.get(one.name + _UPDATE)
            if op is not None:
                _add_update_span(spans, one, op, int(plan.device[op]), shared)
        else:
            op = _match_op(one, op_at, waiting)
            if op is not None:
                at = one.device if one.device >= 0 else int(plan.device[op])
                spans.add(SpanKind.COMPUTE, at, op, one)
    return spans


def _add_update_span(
    spans: Spans, one: MeasuredSpan, op: int, device: int, shared: dict[tuple[float, float], float]
) -> None:
    """Weights that one op updates together have its time one after the other, by their bytes."""
    if one.share >= _WHOLE:
        spans.add(SpanKind.COMPUTE, device, op, one)
        return
    key = (one.start_s, one.end_s)
    begin = one.start_s + shared[key] * (one.end_s - one.start_s)
    shared[key] += one.share
    end = one.start_s + min(1.0, shared[key]) * (one.end_s - one.start_s)
    part = MeasuredSpan(one.what, one.name, one.kind, device, -1, begin, max(begin, end))
    spans.add(SpanKind.COMPUTE, device, op, part, alone=False)


def _index_waiting_ops(graph: Graph) -> dict[tuple[str, str, str], deque[int]]:
    """Ops that are found by their mirror and kind, in order."""
    found: dict[tuple[str, str, str], deque[int]] = defaultdict(deque)
    for op, (kind, phase) in enumerate(zip(graph.op_kind, graph.phase.tolist(), strict=True)):
        mirror = int(graph.mirror[op])
        if phase == Phase.BACKWARD and mirror != NO_MIRROR:
            of_loss = graph.module[mirror] == LOSS
            found["backward", LOSS if of_loss else graph.op_name[mirror], kind].append(op)
        elif phase == Phase.FORWARD and graph.module[op] == LOSS:
            found["forward", LOSS, kind].append(op)
    return found


def _match_op(
    one: MeasuredSpan, op_at: dict[str, int], waiting: dict[tuple[str, str, str], deque[int]]
) -> int | None:
    if one.what == "forward" and not one.kind:
        return op_at.get(one.name)
    left = waiting.get((one.what, one.name, one.kind))
    return left.popleft() if left else None


def build_timeline(spans: Spans, cluster: Cluster, peak_bytes: list[int]) -> Timeline:
    """The measured timeline, from 0 s on."""
    start = np.array(spans.start_s)
    first = float(start.min()) if len(start) else 0.0
    return Timeline(
        origin=TimelineOrigin.MEASURED,
        device_name=cluster.device_name,
        kind=np.array(spans.kind, dtype=np.int8),
        resource=np.array(spans.resource, dtype=np.int32),
        item=np.array(spans.item, dtype=np.int32),
        microbatch=np.zeros(len(start), dtype=np.int32),
        start_s=start - first,
        end_s=np.array(spans.end_s) - first,
        peak_bytes=np.array(peak_bytes, dtype=np.int64),
    )


def make_cost_rows(steps: list[Spans], graph: Graph, chips: list[str], torch_version: str) -> list[CostRow]:
    """The median seconds of every key that was timed, for each chip; `chips` [D] names the devices."""
    keys = collect_keys(graph)
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for spans in steps:
        for index, (kind, at, op) in enumerate(zip(spans.kind, spans.resource, spans.item, strict=True)):
            if kind == SpanKind.COMPUTE and spans.alone[index] and keys.of_op[op] >= 0:
                seconds = spans.end_s[index] - spans.start_s[index], spans.issue_s[index]
                found[keys.text[keys.of_op[op]], chips[at]].append(seconds)
    rows, date = [], today()
    for (key, chip), pairs in found.items():
        seconds_of, issued = zip(*pairs, strict=True)
        middle, spread = _summarise_seconds(list(seconds_of))
        issue_s = _summarise_seconds(list(issued))[0]
        rows.append(CostRow(key, chip, torch_version, date, middle, spread, len(pairs), issue_s))
    return rows


def _summarise_seconds(seconds: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles relative to it."""
    low, middle, high = np.quantile(np.array(seconds), (0.25, 0.5, 0.75)).tolist()
    return middle, (high - low) / 2 / middle if middle > 0 else 0.0

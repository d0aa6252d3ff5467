"""Waiting: why a device stands idle, gap by gap, summed up by what it waited for.

A gap before an op is taken apart from its end: the input that came last was a transfer, which may have queued
for its link, and before that its producer still ran elsewhere.

    |-- op on gpu0 --|..queue..|== transfer ==|  op here
    |<---- op ------>|<-queue->|<- transfer ->|
"""

from collections import defaultdict

from loadmaster.core.graph import Graph
from loadmaster.core.problem import Problem
from loadmaster.core.review import Wait
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.review.spans import SpanIndex, index_spans, spans_by_start

_Key = tuple[str, str, str, int]  # kind, cause, module, source


def list_waits(problem: Problem, timeline: Timeline, index: SpanIndex | None = None) -> tuple[Wait, ...]:
    """What every device waited for, the longest first; idle times of a device add up to its idle time."""
    index = index or index_spans(problem.graph, timeline)
    found: list[Wait] = []
    for device in range(len(timeline.device_name)):
        sums: dict[_Key, list[float]] = defaultdict(lambda: [0.0, 0])
        _collect_gaps(problem, index, device, sums)
        rows = [
            Wait(device, kind, cause, module, source, seconds, int(count))
            for (kind, cause, module, source), (seconds, count) in sums.items()
        ]
        found += sorted(rows, key=lambda row: (-row.seconds, row.kind, row.cause))
    return tuple(found)


def _collect_gaps(problem: Problem, index: SpanIndex, device: int, sums: dict[_Key, list[float]]) -> None:
    timeline = index.timeline
    spans = spans_by_start(timeline, device).tolist()
    free_s = 0.0
    shared = int((problem.cluster.engine == problem.cluster.engine[device]).sum()) > 1
    for span in spans:
        begin = index.start_s(span)
        if begin > free_s + index.eps_s:
            _take_apart(index, span, free_s, begin, "engine" if shared else "launch", sums)
        free_s = max(free_s, index.end_s(span))
    if timeline.step_s > free_s + index.eps_s:
        _add(sums, ("end" if spans else "empty", "", "", -1), timeline.step_s - free_s)


def _take_apart(
    index: SpanIndex, span: int, free_s: float, begin: float, otherwise: str, sums: dict[_Key, list[float]]
) -> None:
    """Give each part of a gap to its reason."""
    arrivals = index.inputs_of(span)
    came_s, brought, maker = max(arrivals, default=(0.0, -1, -1))
    late = min(begin, max(free_s, came_s))
    _add_if(index, sums, (otherwise, "", "", -1), begin - late)
    if late <= free_s + index.eps_s:
        return
    graph, timeline = index.graph, index.timeline
    name, module, source = _producer(graph, timeline, maker)
    sent_s = late
    if timeline.kind[brought] != SpanKind.COMPUTE:
        sent_s = max(free_s, min(late, index.start_s(brought)))
        _add_if(index, sums, ("transfer", name, module, source), late - sent_s)
    made_s = max(free_s, min(sent_s, index.end_s(maker)))
    _add_if(index, sums, ("queue", name, module, source), sent_s - made_s)
    _add_if(index, sums, ("op", name, module, source), made_s - free_s)


def _producer(graph: Graph, timeline: Timeline, span: int) -> tuple[str, str, int]:
    op = int(timeline.item[span])
    return graph.op_name[op], graph.module[op], int(timeline.resource[span])


def _add_if(index: SpanIndex, sums: dict[_Key, list[float]], key: _Key, seconds: float) -> None:
    if seconds > index.eps_s:
        _add(sums, key, seconds)


def _add(sums: dict[_Key, list[float]], key: _Key, seconds: float) -> None:
    sums[key][0] += seconds
    sums[key][1] += 1

"""Waiting: why a device stands idle, gap by gap, summed up by what it waited for.

A gap before an op is taken apart from its end: the input that came last was a transfer, which may have queued
for its link, and before that its producer still ran elsewhere.

    |-- op on gpu0 --|..queue..|== transfer ==|  op here
    |<---- op ------>|<-queue->|<- transfer ->|
"""

import bisect
from collections import defaultdict

import numpy as np

from loadmaster.core.answers.review import Wait
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Problem
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
    others = _busy_intervals(problem, index, device)
    for span in spans:
        begin = index.start_s(span)
        if begin > free_s + index.eps_s:
            _take_apart(index, span, free_s, begin, others, sums)
        free_s = max(free_s, index.end_s(span))
    if timeline.step_s > free_s + index.eps_s:
        _add(sums, ("end" if spans else "empty", "", "", -1), timeline.step_s - free_s)


def _busy_intervals(problem: Problem, index: SpanIndex, device: int) -> list[tuple[float, float]]:
    """When other devices of the same engine compute, in order and without overlaps."""
    engine, timeline = problem.cluster.engine, index.timeline
    sharing = [other for other in np.flatnonzero(engine == engine[device]).tolist() if other != device]
    here = np.flatnonzero((timeline.kind == SpanKind.COMPUTE) & np.isin(timeline.resource, sharing))
    found: list[tuple[float, float]] = []
    for start, end in sorted(
        zip(timeline.start_s[here].tolist(), timeline.end_s[here].tolist(), strict=True)
    ):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _overlap_s(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of [begin, end] that the intervals cover."""
    at = max(bisect.bisect_right(intervals, (begin, np.inf)) - 1, 0)
    total = 0.0
    while at < len(intervals) and intervals[at][0] < end:
        total += max(0.0, min(end, intervals[at][1]) - max(begin, intervals[at][0]))
        at += 1
    return total


def _take_apart(
    index: SpanIndex,
    span: int,
    free_s: float,
    begin: float,
    others: list[tuple[float, float]],
    sums: dict[_Key, list[float]],
) -> None:
    """Give each part of a gap to its reason."""
    arrivals = index.inputs_of(span)
    came_s, brought, maker = max(arrivals, default=(0.0, -1, -1))
    late = min(begin, max(free_s, came_s))
    shared_s = _overlap_s(others, late, begin)
    _add_if(index, sums, ("engine", "", "", -1), shared_s)
    _add_if(index, sums, ("launch", "", "", -1), begin - late - shared_s)
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

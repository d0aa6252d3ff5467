"""Critical path: from the last end back to the first start, always to what the span had to wait for.

A span begins when its last input is there and its resource is free: an op's device, a transfer's links. The
one of these that ended last is the step before it. Nothing on the path can take longer without the step
taking longer in this order of events; a stretch where neither held it back is a wait (a launch, or a turn).
"""

from collections.abc import Iterable

import numpy as np

from loadmaster.core.answers.review import CriticalPart
from loadmaster.core.arrays import Longs
from loadmaster.core.problem import Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.review.spans import NONE, SpanIndex, index_spans


def critical_spans(problem: Problem, timeline: Timeline, index: SpanIndex | None = None) -> list[int]:
    """The spans of the path, first to last."""
    if not len(timeline.kind):
        return []
    index = index or index_spans(problem.graph, timeline)
    before = _previous_on_resource(problem, timeline)
    span = int(np.lexsort((timeline.start_s, timeline.end_s))[-1])
    path, seen = [span], {span}
    while True:
        ready = _list_predecessors(index, before, span)
        ready = [pair for pair in ready if pair[1] not in seen]
        if not ready:
            return path[::-1]
        _, span = max(ready)
        seen.add(span)
        path.append(span)


def _list_predecessors(index: SpanIndex, before: list[list[int]], span: int) -> list[tuple[float, int]]:
    """(end, span) of all that the span had to wait for."""
    timeline, limit = index.timeline, index.start_s(span) + index.eps_s
    found = [(index.end_s(other), other) for other in before[span]]
    if timeline.kind[span] == SpanKind.COMPUTE:
        found += [(end, brought) for end, brought, _ in index.inputs_of(span)]
    else:
        batch, tensor = int(timeline.microbatch[span]), int(timeline.item[span])
        run = batch * index.graph.num_ops + int(index.graph.tensor_op[tensor])
        maker = int(index.span_of_run[run])
        if maker != NONE:
            found.append((index.end_s(maker), maker))
    return [(end, other) for end, other in found if end <= limit]


def _previous_on_resource(problem: Problem, timeline: Timeline) -> list[list[int]]:
    """[S] the spans that ran before each on its engine, or on the links of its route."""
    num = len(timeline.device_name)
    previous: list[list[int]] = [[] for _ in range(len(timeline.kind))]
    engine, route = problem.cluster.engine, problem.cluster.route
    last: dict[tuple[str, int], int] = {}
    order: Longs = np.lexsort((timeline.end_s, timeline.start_s))
    kinds, resources = timeline.kind.tolist(), timeline.resource.tolist()
    for span in order.tolist():
        keys: Iterable[tuple[str, int]]
        if kinds[span] == SpanKind.COMPUTE:
            keys = [("engine", int(engine[resources[span]]))]
        else:
            source, target = divmod(resources[span], num)
            taken = route[source, target] if source != target else np.array([], dtype=np.int32)
            keys = [("link", link) for link in taken.tolist() if link >= 0]
        for key in keys:
            if key in last:
                previous[span].append(last[key])
            last[key] = span
    return previous


def _name_way(source: str, target: str) -> str:
    """From where to where; an edge of a channel has both ends in its own name."""
    return target if target.startswith(f"{source}: ") else f"{source} to {target}"


def describe_path(
    problem: Problem, timeline: Timeline, path: list[int], *, depth: int = 2
) -> tuple[CriticalPart, ...]:
    """The path in stretches: neighbours on one resource in one module, with the waits between them."""
    graph, names, num = problem.graph, timeline.device_name, len(timeline.device_name)
    eps = max(timeline.step_s * 1e-9, 1e-15)
    parts: list[CriticalPart] = []
    now = 0.0
    for span in path:
        begin, end = float(timeline.start_s[span]), float(timeline.end_s[span])
        item, at = int(timeline.item[span]), int(timeline.resource[span])
        compute = timeline.kind[span] == SpanKind.COMPUTE
        op = item if compute else int(graph.tensor_op[item])
        where = names[at] if compute else _name_way(names[at // num], names[at % num])
        module = ".".join(graph.module[op].split(".")[:depth])
        if begin > now + eps:
            parts.append(CriticalPart("wait", where, module, graph.op_name[op], "", 1, now, begin))
        kind, name = "compute" if compute else "transfer", graph.op_name[op]
        old = parts[-1] if parts else None
        if old is not None and (old.kind, old.resource, old.module) == (kind, where, module):
            parts[-1] = CriticalPart(
                kind, where, module, old.first, name, old.num + 1, old.start_s, max(end, now)
            )
        else:
            parts.append(CriticalPart(kind, where, module, name, name, 1, begin, end))
        now = max(now, end)
    return tuple(parts)

"""Spans by what they are: where and when every op ran, and every transfer, whatever order a timeline has."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs, offsets
from loadmaster.core.graph import Graph
from loadmaster.core.timeline import SpanKind, Timeline

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class SpanIndex:
    """A timeline made ready to be asked. A run is an op in one micro-batch: `microbatch * N + op`."""

    graph: Graph
    timeline: Timeline
    num_devices: int
    span_of_run: Longs  # [B * N] span of a run, or NONE
    span_of_move: dict[tuple[int, int, int], int]  # (micro-batch, tensor, device it is sent to) -> span
    in_ptr: Ints  # [N + 1]
    in_tensor: Ints  # [U] tensors read by an op
    eps_s: float  # what counts as the same instant

    def start_s(self, span: int) -> float:
        """When a span begins."""
        return float(self.timeline.start_s[span])

    def end_s(self, span: int) -> float:
        """When a span ends."""
        return float(self.timeline.end_s[span])

    def inputs_of(self, span: int) -> list[tuple[float, int, int]]:
        """(arrival, the span that brought it, the span of its producer) of every input of an op's span."""
        timeline, graph = self.timeline, self.graph
        op, batch, here = (int(c[span]) for c in (timeline.item, timeline.microbatch, timeline.resource))
        found = []
        for tensor in self.in_tensor[self.in_ptr[op] : self.in_ptr[op + 1]].tolist():
            maker = int(self.span_of_run[batch * graph.num_ops + int(graph.tensor_op[tensor])])
            if maker == NONE:
                continue
            brought = maker
            if int(timeline.resource[maker]) != here:
                brought = self.span_of_move.get((batch, tensor, here), maker)
            found.append((self.end_s(brought), brought, maker))
        return found


def index_spans(graph: Graph, timeline: Timeline) -> SpanIndex:
    """Look-ups for a timeline of a graph."""
    num = len(timeline.device_name)
    compute = np.flatnonzero(timeline.kind == SpanKind.COMPUTE)
    batches = int(timeline.microbatch.max()) + 1 if len(timeline.microbatch) else 1
    runs = np.full(batches * graph.num_ops, NONE, dtype=np.int64)
    known = compute[timeline.item[compute] < graph.num_ops]
    runs[timeline.microbatch[known].astype(np.int64) * graph.num_ops + timeline.item[known]] = known
    moved = np.flatnonzero(timeline.kind == SpanKind.TRANSFER)
    keys = zip(
        timeline.microbatch[moved].tolist(),
        timeline.item[moved].tolist(),
        (timeline.resource[moved] % num).tolist(),
        strict=True,
    )
    by_op = np.argsort(graph.use_op, kind="stable")
    return SpanIndex(
        graph=graph,
        timeline=timeline,
        num_devices=num,
        span_of_run=runs,
        span_of_move=dict(zip(keys, moved.tolist(), strict=True)),
        in_ptr=offsets(graph.use_op[by_op], graph.num_ops),
        in_tensor=graph.use_tensor[by_op],
        eps_s=max(timeline.step_s * 1e-9, 1e-15),
    )


def spans_by_start(timeline: Timeline, device: int) -> Longs:
    """The ops of one device in the order in which they ran."""
    here = np.flatnonzero((timeline.kind == SpanKind.COMPUTE) & (timeline.resource == device))
    order: Longs = here[np.lexsort((timeline.end_s[here], timeline.start_s[here]))]
    return order


def seconds_of(timeline: Timeline) -> Floats:
    """[S] how long every span took."""
    seconds: Floats = timeline.end_s - timeline.start_s
    return seconds

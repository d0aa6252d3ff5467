"""Timelines: what each process measured, on one clock, as one `Timeline`; predicted beside measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.graph import Graph, Phase
from loadmaster.core.pipelines.order import RECEIVES, SENDS, Work
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin

_PHASE = {
    Work.FORWARD: Phase.FORWARD,
    Work.BACKWARD: Phase.BACKWARD,
    Work.BACKWARD_INPUT: Phase.BACKWARD,
    Work.BACKWARD_WEIGHT: Phase.BACKWARD,
    Work.REDUCE: Phase.UPDATE,
    Work.UPDATE: Phase.UPDATE,
}


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage in one step: seconds of a micro-batch, and the share without work."""

    stage: int
    rank: int
    device: str
    forward_s: float  # median
    backward_s: float  # median, both parts
    update_s: float
    bubble_share: float  # of its rank


def merge_spans(
    placement: Placement, devices: Sequence[int], reports: Sequence[Mapping[str, Any]]
) -> Timeline:
    """One step as all ranks measured it: `devices[r]` is rank r's."""
    cluster, graph, plan = placement.problem.cluster, placement.problem.graph, placement.plan
    assert plan is not None, "it ran"
    assert plan.pipeline is not None, "it ran as a pipeline"
    items = _first_ops(graph, plan.pipeline.stage)
    zero = min((span[3] for report in reports for span in report["spans"]), default=0.0)
    rows = []
    for rank, report in enumerate(reports):
        for work, stage, batch, start, end in report["spans"]:
            kind = Work(work)
            if kind in SENDS or kind in RECEIVES:
                continue  # begun there; they last while other things are computed
            item = items.get((stage, _PHASE[kind]), 0)
            rows.append((devices[rank], item, max(batch, 0), start - zero, end - zero))
    rows.sort(key=lambda row: (row[3], row[0]))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    peak = np.zeros(cluster.num_devices, dtype=np.int64)
    for rank, report in enumerate(reports):
        peak[devices[rank]] += report["peak_bytes"]
    return Timeline(
        origin=TimelineOrigin.MEASURED,
        device_name=cluster.device_name,
        kind=np.full(len(rows), SpanKind.COMPUTE, dtype=np.int8),
        resource=np.array(columns[0], dtype=np.int32),
        item=np.array(columns[1], dtype=np.int32),
        microbatch=np.array(columns[2], dtype=np.int32),
        start_s=np.array(columns[3], dtype=np.float64),
        end_s=np.array(columns[4], dtype=np.float64),
        peak_bytes=peak,
    )


def stage_times(reports: Sequence[Mapping[str, Any]], device_names: Sequence[str]) -> tuple[StageTimes, ...]:
    """Each stage of each rank; the bubble is what is left of the step."""
    spans = [span for report in reports for span in report["spans"]]
    if not spans:
        return ()
    whole = max(span[4] for span in spans) - min(span[3] for span in spans)
    found = []
    for rank, report in enumerate(reports):
        computed = [s for s in report["spans"] if Work(s[0]) not in SENDS and Work(s[0]) not in RECEIVES]
        busy = sum(span[4] - span[3] for span in computed)
        for stage in sorted({span[1] for span in computed}):
            own = [span for span in computed if span[1] == stage]
            found.append(
                StageTimes(
                    stage,
                    rank,
                    device_names[rank],
                    _median([s[4] - s[3] for s in own if s[0] == Work.FORWARD]),
                    _median([s[4] - s[3] for s in own if s[0] == Work.BACKWARD])
                    or _median([s[4] - s[3] for s in own if s[0] == Work.BACKWARD_INPUT])
                    + _median([s[4] - s[3] for s in own if s[0] == Work.BACKWARD_WEIGHT]),
                    sum(s[4] - s[3] for s in own if s[0] in (Work.REDUCE, Work.UPDATE)),
                    max(0.0, 1.0 - busy / whole) if whole else 0.0,
                )
            )
    return tuple(sorted(found, key=lambda one: (one.stage, one.rank)))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0


def _first_ops(graph: Graph, stage: Any) -> dict[tuple[int, Phase], int]:
    """The first op of each stage and phase: what a span of a whole stage is named after."""
    found: dict[tuple[int, Phase], int] = {}
    for op, (where, phase) in enumerate(zip(stage.tolist(), graph.phase.tolist(), strict=True)):
        found.setdefault((where, Phase(phase)), op)
    return found

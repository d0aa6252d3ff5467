"""Strategy run: a launched strategy, what its ranks measured and sent, and how far copies drifted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.graph import Phase
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from loadmaster.runtime.distributed.running import LaunchedRun
from loadmaster.runtime.distributed.strategy.drift import DriftReport
from loadmaster.runtime.distributed.strategy.layout import StrategyLayout

_PHASE = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "REDUCE": Phase.UPDATE, "UPDATE": Phase.UPDATE}


@dataclass(slots=True, kw_only=True)
class StrategyRun(LaunchedRun):
    """A strategy that is running; leave it with `with`, or `close`."""

    answer: StrategyAnswer
    layout: StrategyLayout

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it, on one clock."""
        devices = [self.layout.device_of(rank) for rank in range(self.layout.world)]
        return merge_strategy_spans(self.answer, self.layout, devices, self.reports())

    def sent_bytes(self) -> Mapping[str, int]:
        """What all ranks sent in the last step, by what it was for: allreduce, ps, sfb, move."""
        total: Counter[str] = Counter()
        for report in self.reports():
            total.update({why: size for why, _, size in report["sent"]})
        return dict(total)

    def drift(self) -> DriftReport:
        """How far copies of a weight were apart when they were compared."""
        reports = [report["drift"] for report in self.reports()]
        return max(reports, key=lambda one: (one.largest, one.checks))


def merge_strategy_spans(
    answer: StrategyAnswer,
    layout: StrategyLayout,
    devices: Sequence[int],
    reports: Sequence[Mapping[str, Any]],
) -> Timeline:
    """One step as all ranks measured it: `devices[r]` is rank r's; a span is named after its first op."""
    cluster, graph = answer.problem.cluster, answer.problem.graph
    share = np.array(layout.share_of_group)[answer.strategy.group_of]
    first: dict[tuple[int, int], int] = {}
    for op, key in enumerate(zip(share.tolist(), graph.phase.tolist(), strict=True)):
        first.setdefault(key, op)
    zero = min((span[3] for report in reports for span in report["spans"]), default=0.0)
    rows = []
    for rank, report in enumerate(reports):
        for work, own, _, start, end in report["spans"]:
            if work in _PHASE:
                item = first.get((own, int(_PHASE[work])), 0)
                rows.append((devices[rank], item, start - zero, end - zero))
    rows.sort(key=lambda row: (row[2], row[0]))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 4
    peak = np.zeros(cluster.num_devices, dtype=np.int64)
    for rank, report in enumerate(reports):
        peak[devices[rank]] += report["peak_bytes"]
    return Timeline(
        origin=TimelineOrigin.MEASURED,
        device_name=cluster.device_name,
        kind=np.full(len(rows), SpanKind.COMPUTE, dtype=np.int8),
        resource=np.array(columns[0], dtype=np.int32),
        item=np.array(columns[1], dtype=np.int32),
        microbatch=np.zeros(len(rows), dtype=np.int32),
        start_s=np.array(columns[2], dtype=np.float64),
        end_s=np.array(columns[3], dtype=np.float64),
        peak_bytes=peak,
    )

"""Pipeline run: a launched pipeline, and what its stages measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from loadmaster.core.cluster import Cluster, process_cluster
from loadmaster.core.pipelines.order import Action, Work, partner_of
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.runtime.distributed.pipeline.batches import count_rows
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout
from loadmaster.runtime.distributed.running import LaunchedRun
from loadmaster.runtime.distributed.timelines import StageTimes, merge_spans, stage_times


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What one stage sends another for a micro-batch."""

    stage: int
    to_stage: int
    rank: int
    to_rank: int
    num_bytes: int
    predicted_s: float
    measured_s: float | None  # median of those that were waited for; None: all came while others computed


@dataclass(slots=True, kw_only=True)
class PipelineRun(LaunchedRun):
    """A pipeline that is running; leave it with `with`, or `close`."""

    placement: Placement
    layout: PipelineLayout

    def _require_rows(self, inputs: Any) -> None:
        self.layout.split_rows(count_rows(inputs))

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it, on one clock."""
        devices = [self.layout.device_of(rank) for rank in range(self.layout.world)]
        return merge_spans(self.placement, devices, self.reports())

    def stage_times(self) -> tuple[StageTimes, ...]:
        """The last step by stages: forward, backward, bubble."""
        names = self.placement.problem.cluster.device_name
        devices = [names[self.layout.device_of(rank)] for rank in range(self.layout.world)]
        return stage_times(self.reports(), devices)

    def link_times(self) -> tuple[LinkTimes, ...]:
        """What stages sent each other in the last step, predicted and measured."""
        return link_times(self.reports(), self.layout, self.placement.problem.cluster)


def link_times(
    reports: Sequence[Mapping[str, Any]], layout: PipelineLayout, cluster: Cluster
) -> tuple[LinkTimes, ...]:
    """Each transfer of each replica, predicted beside measured.

    Measured are those that a rank already waited for when they were sent: of others nobody knows when they
    arrived.
    """
    known = process_cluster(cluster)
    latency, rate = route_latency_s(known), route_bytes_per_s(known)
    found = []
    for rank, report in enumerate(reports):
        replica = rank // layout.num_places
        for key, num_bytes in sorted({(work, stage): size for work, stage, size in report["sent"]}.items()):
            sent = {span[2]: span[3] for span in report["spans"] if (span[0], span[1]) == key}
            place, receive = partner_of(Action(Work(key[0]), key[1], 0), layout.num_places)
            target = layout.ranks(replica)[place]
            times = [
                span[4] - sent[span[2]]
                for span in reports[target]["arrivals"]
                if (span[0], span[1]) == (receive.work.value, receive.stage)
                and span[3] <= sent.get(span[2], -np.inf)
            ]
            ends = layout.device_of(rank), layout.device_of(target)
            predicted = float(latency[ends] + num_bytes / rate[ends])
            found.append(
                LinkTimes(
                    key[1],
                    receive.stage,
                    rank,
                    target,
                    num_bytes,
                    predicted,
                    median(times) if times else None,
                )
            )
    return tuple(found)

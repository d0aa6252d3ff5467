"""Pipeline run: a launched pipeline, and what its stages measured."""

from dataclasses import dataclass

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout
from loadmaster.runtime.distributed.running import LaunchedRun
from loadmaster.runtime.distributed.timelines import (
    LinkTimes,
    StageTimes,
    link_times,
    merge_spans,
    stage_times,
)


@dataclass(slots=True, kw_only=True)
class PipelineRun(LaunchedRun):
    """A pipeline that is running; leave it with `with`, or `close`."""

    placement: Placement
    layout: PipelineLayout

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

"""Chrome trace: the timeline with device lanes and links, for Perfetto."""

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported
from loadmaster.report.trace import chrome_trace
from loadmaster.simulator.pipelines.lowering import lower


def export(placement: Placement, timeline: Timeline) -> Exported:
    """The predicted timeline."""
    plan = placement.plan or placement.least_overflow_plan
    graph = placement.problem.graph
    if plan is not None and plan.pipeline is not None and placement.problem.is_stepped:
        graph = lower(placement.problem, plan).problem.graph
    lost = ["memory over time and the lower bound are not part of a trace"]
    return Exported(chrome_trace(timeline, graph), tuple(lost))

"""Chrome trace: the timeline with device lanes and links, for Perfetto."""

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported
from loadmaster.report.trace import chrome_trace


def export(placement: Placement, timeline: Timeline) -> Exported:
    """The predicted timeline."""
    lost = ["memory over time and the lower bound are not part of a trace"]
    return Exported(chrome_trace(timeline, placement.problem.graph), tuple(lost))

"""Placements as JSON documents and files: the same words for every verb."""

from typing import Any

from loadmaster.core.io import write_bytes
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.timeline import Timeline
from loadmaster.report.trace import chrome_trace


def placement_document(placement: Placement) -> dict[str, Any]:
    """What `--json` prints of a placement."""
    problem = placement.problem
    return {
        "algorithm": placement.algorithm,
        "status": placement.status.value,
        "objective": problem.objective.value,
        "step_s": placement.score_s,
        "bound_s": placement.bound_s,
        "bound_name": placement.bound_name,
        "gap": placement.gap,
        "samples_per_s": _rate(placement),
        "devices": list(problem.cluster.device_name),
        "peak_bytes": placement.peak_bytes.tolist(),
        "memory_bytes": problem.cluster.usable_bytes.tolist(),
        "shortfall_bytes": placement.shortfall_bytes.tolist(),
        "proof": placement.proof,
        "plan_s": placement.wall_s,
        "digest": placement.digest,
        "problem_digest": problem.digest,
        "graph": problem.graph.name,
        "num_ops": problem.graph.num_ops,
        "links": problem.links.value,
        "split": problem.split.value,
        "members": [
            {
                "name": m.name,
                "status": m.status.value if m.status else None,
                "step_s": m.score_s,
                "plan_s": m.seconds,
                "reason": m.reason,
            }
            for m in placement.members
        ],
    }


def _rate(placement: Placement) -> float | None:
    """Samples a second of a pipelined plan."""
    if placement.problem.objective != Objective.THROUGHPUT or not placement.score_s:
        return None
    return 1.0 / placement.score_s


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints of a timeline."""
    return {
        "step_s": timeline.step_s,
        "origin": timeline.origin.value,
        "devices": list(timeline.device_name),
        "busy_s": timeline.busy_s.tolist(),
        "peak_bytes": timeline.peak_bytes.tolist(),
        "num_spans": len(timeline.kind),
    }


def save_trace(placement: Placement, timeline: Timeline, path: str) -> None:
    """Write the timeline of a placement as a Chrome trace."""
    write_bytes(chrome_trace(timeline, placement.problem.graph), path)

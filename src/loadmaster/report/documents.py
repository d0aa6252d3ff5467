"""Placements and timelines as JSON documents and files: the same words for every verb."""

from dataclasses import asdict
from typing import Any

import numpy as np

from loadmaster.core.check import check_plan, why_not_runnable
from loadmaster.core.errors import PlanError
from loadmaster.core.files import write_bytes
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Origin
from loadmaster.core.reasons import why_none_fits
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.cost.error_bar import step_error
from loadmaster.cost.measure import measured_share
from loadmaster.graph.origin import samples_in_a_pass
from loadmaster.report import pipelines
from loadmaster.report.trace import chrome_trace
from loadmaster.simulator.pipelines.lowering import lower


def findings_document(graph: Graph) -> dict[str, Any]:
    """What was assumed of a captured model, and what looks wrong in it; else empty lists."""
    return {
        "assumptions": [asdict(assumption) for assumption in graph.assumptions],
        "warnings": [asdict(warning) for warning in graph.warnings],
        "notes": list(graph.notes),
    }


def placement_document(placement: Placement, timeline: Timeline | None = None) -> dict[str, Any]:
    """What `--json` prints of a placement; `timeline` says how long the devices of a pipeline wait."""
    problem = placement.problem
    return {
        "algorithm": placement.algorithm,
        "status": placement.status.value,
        "reasons": [] if placement.fits else why_none_fits(placement),
        **findings_document(problem.graph),
        "objective": problem.objective.value,
        "step_s": placement.score_s,
        "step_rel_error": predicted_error(placement),
        "bound_s": placement.bound_s,
        "bound_name": placement.bound_name,
        "gap": placement.gap,
        "samples_per_s": samples_per_s(placement),
        "devices": list(problem.cluster.device_name),
        "peak_bytes": placement.peak_bytes.tolist(),
        "memory_bytes": problem.cluster.usable_bytes.tolist(),
        "shortfall_bytes": placement.shortfall_bytes.tolist(),
        "proof": placement.proof,
        "guarantee": placement.guarantee,
        "plan_s": placement.wall_s,
        "measured_share": measured_part(placement),
        "digest": placement.digest,
        "problem_digest": problem.digest,
        "graph": problem.graph.name,
        "num_ops": problem.graph.num_ops,
        "assignment": placement.plan.device.tolist() if placement.plan is not None else None,
        "not_runnable": why_not_runnable(problem, placement.plan) if placement.plan is not None else [],
        "links": problem.links.value,
        "split": problem.split.value,
        "pipeline": _pipeline_document(placement, timeline),
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


def _pipeline_document(placement: Placement, timeline: Timeline | None) -> dict[str, Any] | None:
    """The stages of a plan, None where it has none."""
    plan = placement.plan
    if plan is None or plan.pipeline is None:
        return None
    pipeline, names = plan.pipeline, placement.problem.cluster.device_name
    first = [int(np.flatnonzero(pipeline.stage == s)[0]) for s in range(len(pipeline.replicas))]
    return {
        "schedule": pipeline.schedule,
        "num_microbatches": pipeline.num_microbatches,
        "devices": [names[plan.device[op]] for op in first],
        "in_flight": pipeline.in_flight.tolist(),
        "stage_s": pipeline.stage_s.tolist(),
        "recomputed": recomputed_stages(placement),
        **(pipelines.pipeline_document(placement, timeline) if placement.problem.is_stepped else {}),
    }


def recomputed_stages(placement: Placement) -> list[int]:
    """Stages of the plan that run their forward ops again."""
    plan = placement.plan
    if plan is None or plan.pipeline is None:
        return []
    again: list[int] = np.unique(plan.pipeline.stage[plan.recompute]).tolist()
    return again


def samples_per_s(placement: Placement) -> float | None:
    """Samples a second of a pipelined plan, while it runs."""
    if placement.problem.objective != Objective.THROUGHPUT or not placement.score_s:
        return None
    return (samples_in_a_pass(placement.problem.graph) or 1) / placement.score_s


def predicted_error(placement: Placement) -> float | None:
    """The relative error to expect of the predicted time, where it rests on measured costs."""
    plan = placement.plan or placement.least_overflow_plan
    return None if plan is None else step_error(placement.problem, plan)


def measured_part(placement: Placement) -> float | None:
    """The share of the plan's compute time that was measured; None where nothing was."""
    plan = placement.plan or placement.least_overflow_plan
    if plan is None or not (placement.problem.costs.origin == Origin.MEASURED).any():
        return None
    return measured_share(placement.problem, plan)


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints of a timeline."""
    compute = timeline.resource[timeline.kind == SpanKind.COMPUTE]
    if len(compute) and compute.max() >= len(timeline.device_name):
        raise PlanError(
            f"a span computes on device {compute.max()}, the timeline has {len(timeline.device_name)} devices"
        )
    return {
        "step_s": timeline.step_s,
        "origin": timeline.origin.value,
        "devices": list(timeline.device_name),
        "busy_s": timeline.busy_s.tolist(),
        "peak_bytes": timeline.peak_bytes.tolist(),
        "num_spans": len(timeline.kind),
    }


def require_matching(placement: Placement) -> None:
    """Refuse a saved placement whose plan is not one of its problem."""
    for plan in (placement.plan, placement.least_overflow_plan):
        broken = check_plan(placement.problem, plan) if plan is not None else []
        if broken and broken[0].rule in ("length", "device"):
            raise PlanError(broken[0].message)


def save_trace(placement: Placement, timeline: Timeline, path: str) -> None:
    """Write the timeline of a placement as a Chrome trace."""
    plan = placement.plan or placement.least_overflow_plan
    graph = placement.problem.graph
    if placement.problem.is_stepped and plan is not None:
        graph = lower(placement.problem, plan).problem.graph
    write_bytes(chrome_trace(timeline, graph), path)

"""Placements and timelines as JSON documents and files: the same words for every verb."""

from typing import Any

import numpy as np

from loadmaster.core.check import check_plan, why_not_runnable
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Phase, home_bytes
from loadmaster.core.io import write_bytes
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective, Origin, Problem, Split
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.core.units import format_bytes
from loadmaster.cost.measure import measured_share
from loadmaster.report.trace import chrome_trace

_MOST_HOLDERS = 3


def placement_document(placement: Placement) -> dict[str, Any]:
    """What `--json` prints of a placement."""
    problem = placement.problem
    return {
        "algorithm": placement.algorithm,
        "status": placement.status.value,
        "reasons": [] if placement.fits else why_not_fit(placement),
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
        "pipeline": _pipeline(placement),
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


def _pipeline(placement: Placement) -> dict[str, Any] | None:
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
    }


def recomputed_stages(placement: Placement) -> list[int]:
    """Stages of the plan that run their forward ops again."""
    plan = placement.plan
    if plan is None or plan.pipeline is None:
        return []
    again: list[int] = np.unique(plan.pipeline.stage[plan.recompute]).tolist()
    return again


def _rate(placement: Placement) -> float | None:
    """Samples a second of a pipelined plan."""
    if placement.problem.objective != Objective.THROUGHPUT or not placement.score_s:
        return None
    return 1.0 / placement.score_s


def measured_part(placement: Placement) -> float | None:
    """The share of the plan's compute time that was measured; None where nothing was."""
    plan = placement.plan or placement.least_overflow_plan
    if plan is None or not (placement.problem.costs.origin == Origin.MEASURED).any():
        return None
    return measured_share(placement.problem, plan)


def kind_of_plan(problem: Problem) -> str:
    """What plans of a problem are: pipelines or chains where only those are asked for."""
    if problem.pipeline:
        return "pipeline"
    asked_for_chains = problem.objective == Objective.THROUGHPUT and problem.split == Split.CHAIN
    return "chain" if asked_for_chains else "plan"


def why_not_fit(placement: Placement) -> list[str]:
    """One line per reason: the proof, or which device lacks how many bytes and what to do."""
    cluster, kind = placement.problem.cluster, kind_of_plan(placement.problem)
    proven = placement.status == Status.INFEASIBLE
    lines = [f"proven that no {kind} fits: {placement.proof}"] if proven else []
    spill = "" if cluster.on_host[cluster.kind].any() else ", host memory as a device (cpu-64GB)"
    remedy = f": a smaller batch, a device more{spill}, or a longer --budget"
    if proven:
        remedy = ""  # the proof says what would help
    for d in np.flatnonzero(placement.shortfall_bytes > 0):
        need, have = int(placement.peak_bytes[d]), int(cluster.usable_bytes[d])
        lines.append(
            f"{cluster.device_name[d]} needs {format_bytes(need)} of {format_bytes(have)}; free"
            f" {format_bytes(need - have)} more{remedy}{_largest(placement, int(d))}"
        )
    return lines or [placement.proof or "no plan was found"]


def _largest(placement: Placement, device: int) -> str:
    """The modules, or ops where there are none, that hold most on a device after the forward pass."""
    plan, graph = placement.least_overflow_plan, placement.problem.graph
    if plan is None:
        return ""
    here = plan.device == device
    later = np.isin(graph.phase[graph.use_op], (Phase.BACKWARD, Phase.UPDATE))
    stays = graph.keep.copy()
    stays[graph.use_tensor[later]] = True
    held = np.where(stays, home_bytes(graph), 0).astype(np.float64)
    made = graph.resident_bytes + np.bincount(graph.tensor_op, held, graph.num_ops).astype(np.int64)
    total: dict[str, int] = {}
    for op in np.flatnonzero(here & (made > 0)).tolist():
        name = graph.module[op] or graph.op_name[op]
        total[name] = total.get(name, 0) + int(made[op])
    first = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:_MOST_HOLDERS]
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in first)
    return f" (the largest there: {text})" if text else ""


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
    write_bytes(chrome_trace(timeline, placement.problem.graph), path)

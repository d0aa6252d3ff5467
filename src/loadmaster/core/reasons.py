"""Reasons: why no plan fits, in words: the proof where there is one, else what the nearest plan lacks."""

import numpy as np

from loadmaster.core.graph import Phase, home_bytes
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.units import format_apart, format_bytes

_MOST_HOLDERS = 3


def kind_of_plan(problem: Problem) -> str:
    """What plans of a problem are: pipelines or chains where only those are asked for."""
    if problem.pipeline:
        return "pipeline"
    asked_for_chains = problem.objective == Objective.THROUGHPUT and problem.split == Split.CHAIN
    return "chain" if asked_for_chains else "plan"


def why_none_fits(placement: Placement, *, longer: str = "a longer --budget") -> list[str]:
    """One line per reason: the proof, or which device lacks how many bytes and what to do.

    `longer` is how more time for the search is asked for; a proof needs none.
    """
    cluster, kind = placement.problem.cluster, kind_of_plan(placement.problem)
    proven = placement.status == Status.INFEASIBLE
    lines = [f"proven that no {kind} fits: {placement.proof}"] if proven else []
    spill = "" if cluster.on_host[cluster.kind].any() else ", host memory as a device (cpu-64GB)"
    remedy = f": use a smaller batch, one more device{spill}, or {longer}"
    if proven:
        remedy = ""  # the proof says what would help
    for d in np.flatnonzero(placement.shortfall_bytes > 0):
        need, have = int(placement.peak_bytes[d]), int(cluster.usable_bytes[d])
        needed, there = format_apart(need, have)
        lines.append(
            f"{cluster.device_name[d]} needs {needed} but has {there}"
            f" ({format_bytes(need - have)} short){remedy}{_largest_holders(placement, int(d))}"
        )
    return lines or [placement.proof or "no plan was found"]


def why_none_fits_in_short(placement: Placement) -> str:
    """The proof, or what the nearest plan lacks and what may help: one line for an error."""
    lines = why_none_fits(placement, longer="a longer budget")
    if placement.status == Status.INFEASIBLE:
        return lines[0]
    nearest = "in the nearest one " if placement.shortfall_bytes.any() else ""
    kind = kind_of_plan(placement.problem)
    return f"no {kind} that fits was found, nor a proof that there is none; {nearest}{lines[0]}"


def _largest_holders(placement: Placement, device: int) -> str:
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

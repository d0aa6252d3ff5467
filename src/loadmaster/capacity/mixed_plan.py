"""Mixed plan: a plan over GPUs and CPUs whose ops on a CPU are counted with the CPU's kernels.

A model is captured for the kernels of a GPU where there is one. Attention, dropout and recurrent layers run
other kernels on a CPU and take other memory there. A plan that has no such op on a CPU stands as it is. Else
two other questions are asked, each right about what it answers, and the better answer counts:

    the kernels of the GPU, and no such op may be on a CPU
    the kernels of the CPU everywhere: exact on CPUs, and at least what is needed on GPUs
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from loadmaster.capacity.host_kernels import count_made_bytes, is_mixed
from loadmaster.core.arrays import Bools
from loadmaster.core.errors import LoadmasterError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import FREE, Problem
from loadmaster.core.run import Budget

_SHARE = 0.5  # of the budget, for each of the two questions


def plan_with_own_kernels(
    problem: Problem,
    budget: Budget,
    ask: Callable[[Problem, Budget], Placement],
    again: Callable[[], Problem],
) -> Placement:
    """A plan of a captured model's problem; `again` is the problem with the kernels of CPUs."""
    first = ask(problem, budget)
    if not is_mixed(problem.cluster) or not _has_ops_on_host(first):
        return first
    other: Problem | None = None
    try:
        other = again()
        differing = find_differing_ops(problem.graph, other.graph)
    except LoadmasterError:  # it cannot be captured for a CPU: then no op of its passes may be on one
        differing = np.isin(problem.graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    if first.plan is not None and not (_names_on_host(first) & _names(problem.graph, differing)):
        return first  # what it leaves out only makes other plans worse, so what is proven holds
    half, answers = share_budget(budget, _SHARE), []
    barred = forbid_on_host(problem, differing)
    if barred is not None:
        answers.append(ask(barred, half))
    if other is not None:
        answers.append(ask(other, half))
    if not answers:
        return first
    found = min(answers, key=_rank)
    if found.status == Status.OPTIMAL or (found.status == Status.INFEASIBLE and first.fits):
        status = Status.FEASIBLE if found.fits else Status.NOT_FOUND
        found = replace(found, status=status, proof="" if found.fits else found.proof)
    return replace(found, wall_s=first.wall_s + sum(answer.wall_s for answer in answers))


def find_differing_ops(graph: Graph, other: Graph) -> Bools:
    """[N] ops that take other memory, or are none, where the same step is captured for other kernels."""
    there = dict(zip(other.op_name, zip(other.op_kind, count_made_bytes(other), strict=True), strict=True))
    here = zip(graph.op_name, graph.op_kind, count_made_bytes(graph), strict=True)
    return np.array([there.get(name) != (kind, made) for name, kind, made in here], dtype=bool)


def forbid_on_host(problem: Problem, ops: Bools) -> Problem | None:
    """The problem where some ops may not be on CPUs; None where they are pinned to one."""
    cluster = problem.cluster
    on_host = cluster.on_host[cluster.kind]
    pinned = problem.pinned[ops]
    if on_host[pinned[pinned != FREE]].any():
        return None
    seconds = problem.costs.compute_s.copy()
    seconds[np.ix_(ops, cluster.on_host)] = np.inf
    try:
        return replace(problem, costs=replace(problem.costs, compute_s=seconds))
    except LoadmasterError:  # a group of them is pinned to a CPU by another op
        return None


def share_budget(budget: Budget, share: float) -> Budget:
    """A share of seconds, or of a count; never nothing."""
    if budget.count is not None:
        return Budget(count=max(1, int(share * budget.count)))
    assert budget.seconds is not None
    return Budget(seconds=share * budget.seconds)


def _rank(answer: Placement) -> tuple[bool, float]:
    if answer.score_s is not None:
        return False, answer.score_s
    return True, float(answer.shortfall_bytes.sum())


def _has_ops_on_host(answer: Placement) -> bool:
    return bool(_names_on_host(answer)) or answer.plan is None


def _names_on_host(answer: Placement) -> set[str]:
    """Ops that a plan has on CPUs."""
    if answer.plan is None:
        return set()
    graph, cluster = answer.problem.graph, answer.problem.cluster
    return _names(graph, cluster.on_host[cluster.kind[answer.plan.device]])


def _names(graph: Graph, some: Bools) -> set[str]:
    return {graph.op_name[op] for op in np.flatnonzero(some).tolist()}

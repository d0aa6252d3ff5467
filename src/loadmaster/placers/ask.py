"""Ask: one question put to one algorithm, with its bound, its simulator and its budget.

`order` 'captured' asks for plans whose ops run in the graph's own order on every device: what autograd runs
of a captured training step. 'free' lets the algorithm choose the order; such a plan may put off gradients
of weights, which torch on its own does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.findings import FOR_THIS_BRANCH
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Plan, in_graph_order
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, Run, Score, ignore_progress
from loadmaster.placers.registry import Placer

FREE, CAPTURED = ORDERS = ("free", "captured")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Who is asked, and how; `spill` names the device that weights may stay on."""

    algorithm: Placer
    budget: Budget
    seed: int = 0
    order: str = FREE
    spill: str | None = None
    progress: Callable[[str, float], None] = ignore_progress

    def __post_init__(self) -> None:
        """Refuse an unknown order."""
        if self.order not in ORDERS:
            raise UnknownNameError("order", self.order, ORDERS)


def find_placement(problem: Problem, ask: PlanRequest) -> Placement:
    """The answer of an algorithm; with `spill` the better of two plans, one of which may spill weights.

    A plan for a graph whose branches were assumed is proven for these branches only, so it is not optimal.
    """
    answer = _answer(problem, ask)
    if answer.status != Status.OPTIMAL or not problem.graph.assumptions:
        return answer
    return replace(answer, status=Status.FEASIBLE, proof=f"{FOR_THIS_BRANCH}: {answer.proof}")


def _answer(problem: Problem, ask: PlanRequest) -> Placement:
    if ask.spill is None:
        return _run_algorithm(problem, ask)
    from loadmaster.placers.spill import find_store_device, with_spill

    store, kept = find_store_device(problem.cluster, ask.spill), replace(ask, spill=None)
    first = _run_algorithm(problem, kept)
    return with_spill(first, store, plan=lambda other: _run_algorithm(other, kept), budget=ask.budget)


def _run_algorithm(problem: Problem, ask: PlanRequest) -> Placement:
    from loadmaster.placers.bounds import quick_bound
    from loadmaster.placers.warm import warm_up
    from loadmaster.simulator.events import engine

    bound = quick_bound(problem)
    simulator = engine.prepare(problem)
    simulator.warm_up(ask.progress)
    warm_up(ask.progress)
    captured = ask.order == CAPTURED
    run = Run(
        budget=ask.budget,
        rng=np.random.default_rng(ask.seed),
        score=_score_in_graph_order(simulator.score) if captured else simulator.score,
        arrange=_arrange_in_graph_order(simulator.score) if captured else simulator.order_and_score,
        bound=bound,
        progress=ask.progress,
    )
    answer = ask.algorithm(problem, run)
    if not isinstance(answer, Placement):
        name = type(ask.algorithm).__name__
        raise InputError(f"{name} answered with a {type(answer).__name__}, not a Placement")
    if not captured:
        return answer
    nearest = answer.least_overflow_plan
    return replace(
        answer,
        plan=None if answer.plan is None else in_graph_order(answer.plan),
        least_overflow_plan=None if nearest is None else in_graph_order(nearest),
    )


def _score_in_graph_order(score: Callable[[Plan], Score]) -> Callable[[Plan], Score]:
    return lambda plan: score(in_graph_order(plan))


def _arrange_in_graph_order(score: Callable[[Plan], Score]) -> Callable[[Plan], tuple[Plan, Score]]:
    def arrange(plan: Plan) -> tuple[Plan, Score]:
        ordered = in_graph_order(plan)
        return ordered, score(ordered)

    return arrange

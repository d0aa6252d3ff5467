"""Ask: one question put to one algorithm, with its bound, its simulator and its budget.

`order` 'captured' asks for plans whose ops run in the graph's own order on every device: what autograd runs
of a captured training step. 'free' lets the algorithm choose the order; such a plan may put off gradients
of weights, which torch on its own does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, in_order
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, Run, Score, silent
from loadmaster.placers.registry import Placer

FREE, CAPTURED = ORDERS = ("free", "captured")


@dataclass(frozen=True, slots=True)
class Ask:
    """Who is asked, and how; `spill` names the device that weights may stay on."""

    algorithm: Placer
    budget: Budget
    seed: int = 0
    order: str = FREE
    spill: str | None = None
    progress: Callable[[str, float], None] = silent

    def __post_init__(self) -> None:
        """Refuse an unknown order."""
        if self.order not in ORDERS:
            raise UnknownNameError("order", self.order, ORDERS)


def answered(problem: Problem, ask: Ask) -> Placement:
    """The answer of an algorithm; with `spill` the better of two plans, one of which may spill weights."""
    if ask.spill is None:
        return _placed(problem, ask)
    from loadmaster.placers.spill import store_of, with_spill

    store, kept = store_of(problem.cluster, ask.spill), replace(ask, spill=None)
    first = _placed(problem, kept)
    return with_spill(first, store, plan=lambda other: _placed(other, kept), budget=ask.budget)


def _placed(problem: Problem, ask: Ask) -> Placement:
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
        score=_as_captured(simulator.score) if captured else simulator.score,
        arrange=_kept(simulator.score) if captured else simulator.arranged,
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
        plan=None if answer.plan is None else in_order(answer.plan),
        least_overflow_plan=None if nearest is None else in_order(nearest),
    )


def _as_captured(score: Callable[[Plan], Score]) -> Callable[[Plan], Score]:
    return lambda plan: score(in_order(plan))


def _kept(score: Callable[[Plan], Score]) -> Callable[[Plan], tuple[Plan, Score]]:
    def arrange(plan: Plan) -> tuple[Plan, Score]:
        ordered = in_order(plan)
        return ordered, score(ordered)

    return arrange

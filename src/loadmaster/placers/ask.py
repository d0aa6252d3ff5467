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
from loadmaster.core.run import Bound, Budget, PlanNews, Run, Score, ignore_news, ignore_progress
from loadmaster.placers.answer import broken_rules, make_placement
from loadmaster.placers.registry import Placer

FREE, CAPTURED = ORDERS = ("free", "captured")


class PlanInterrupted(KeyboardInterrupt):
    """Ctrl-C while a plan was looked for; `placement` is the best one so far."""

    def __init__(self, placement: Placement) -> None:
        super().__init__("interrupted; .placement is the best plan so far")
        self.placement = placement


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Who is asked, and how; `spill` names the device that weights may stay on."""

    algorithm: Placer
    budget: Budget
    seed: int = 0
    order: str = FREE
    spill: str | None = None
    progress: Callable[[str, float], None] = ignore_progress
    watch: Callable[[PlanNews], None] = ignore_news  # told of every better plan
    score: Callable[[Plan], Score] | None = None  # instead of the simulator: of plans in the captured order

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
    try:
        return with_spill(first, store, plan=lambda other: _run_algorithm(other, kept), budget=ask.budget)
    except KeyboardInterrupt:  # a plan that spills was being looked for; the other is whole
        raise PlanInterrupted(first) from None


def _run_algorithm(problem: Problem, ask: PlanRequest) -> Placement:
    from loadmaster.placers.bounds import quick_bound
    from loadmaster.placers.warm import warm_up_for
    from loadmaster.simulator.events import engine
    from loadmaster.simulator.pipelines.unrolled import Unrolled

    bound = quick_bound(problem)
    simulator = Unrolled(problem) if problem.is_stepped else engine.prepare(problem)
    simulator.warm_up(ask.progress)
    warm_up_for(problem, ask.algorithm, ask.progress)
    captured, judge = ask.order == CAPTURED or ask.score is not None, ask.score or simulator.score
    if ask.score is not None:  # what bounds a simulated time bounds no measured one
        bound = Bound(0.0, "none: times are measured", bound.infeasible)
    news = _News(ask.watch, bound.seconds)
    best = _BestSoFar(
        problem,
        _score_in_graph_order(judge) if captured else judge,
        _arrange_in_graph_order(judge) if captured else simulator.order_and_score,
        news.tell_plan,
    )
    run = Run(
        budget=ask.budget,
        rng=np.random.default_rng(ask.seed),
        score=best.score,
        arrange=best.arrange,
        bound=bound,
        progress=ask.progress,
        prove=news.tell_bound,
    )
    try:
        answer = ask.algorithm(problem, run)
    except KeyboardInterrupt:
        if best.found is None:
            raise
        plan, score = best.found
        plan = in_graph_order(plan) if captured else plan
        name = getattr(ask.algorithm, "name", type(ask.algorithm).__name__)
        raise PlanInterrupted(make_placement(problem, run, plan, score, algorithm=name)) from None
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


class _News:
    """Tells a listener of better plans and of better bounds."""

    def __init__(self, watch: Callable[[PlanNews], None], bound_s: float) -> None:
        self._watch, self._bound_s = watch, bound_s
        self._best: Score | None = None

    def tell_plan(self, score: Score) -> None:
        """A better plan."""
        self._best = score
        self._tell(score)

    def tell_bound(self, bound: Bound) -> None:
        """More is proven."""
        self._bound_s = bound.seconds
        if self._best is not None:
            self._tell(self._best)

    def _tell(self, score: Score) -> None:
        self._watch(PlanNews(score.time_s, score.overflow_bytes, self._bound_s))


class _BestSoFar:
    """Remembers the best plan that was scored: rules come before fitting, and that before fast."""

    def __init__(
        self,
        problem: Problem,
        score: Callable[[Plan], Score],
        arrange: Callable[[Plan], tuple[Plan, Score]],
        tell: Callable[[Score], None],
    ) -> None:
        self._problem, self._score, self._arrange, self._tell = problem, score, arrange, tell
        self._rated: tuple[bool, Score] | None = None
        self.found: tuple[Plan, Score] | None = None

    def score(self, plan: Plan) -> Score:
        """Score a plan in its own order."""
        found = self._score(plan)
        self._keep(plan, found)
        return found

    def arrange(self, plan: Plan) -> tuple[Plan, Score]:
        """Order a plan by its starts, and score it."""
        ordered, found = self._arrange(plan)
        self._keep(ordered, found)
        return ordered, found

    def _keep(self, plan: Plan, score: Score) -> None:
        if self._rated is not None and (False, score) >= self._rated:
            return  # its rules need no look
        rated = (bool(broken_rules(self._problem, plan)), score)
        if self._rated is None or rated < self._rated:
            self._rated, self.found = rated, (plan, score)
            if not rated[0]:
                self._tell(score)


def _score_in_graph_order(score: Callable[[Plan], Score]) -> Callable[[Plan], Score]:
    return lambda plan: score(in_graph_order(plan))


def _arrange_in_graph_order(score: Callable[[Plan], Score]) -> Callable[[Plan], tuple[Plan, Score]]:
    def arrange(plan: Plan) -> tuple[Plan, Score]:
        ordered = in_graph_order(plan)
        return ordered, score(ordered)

    return arrange

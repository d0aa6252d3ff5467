"""Replanning: the best of the plan as it was, that plan improved, and a new one, for a problem that has
changed.

A change that only takes limits away never looks worse than the old plan does under it, since that is one of
the candidates; the budget counts plans, so that an answer can be had again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, ignore_progress
from loadmaster.placers.ask import PlanRequest, find_placement
from loadmaster.placers.fixed_plan import Given, why_foreign
from loadmaster.placers.registry import Placer, placer, why_not
from loadmaster.placers.search.refine import Refine

_REFINING = 20  # times as many plans: a move is scored much faster than a plan is made


@dataclass(frozen=True, slots=True)
class Replanner:
    """How changed problems are planned again."""

    budget: Budget
    order: str = "free"
    seed: int = 0
    progress: Callable[[str, float], None] = ignore_progress

    def find(self, problem: Problem, *starts: Plan | None) -> Placement:
        """The best plan that is found; `starts` are plans of the problem, where there are any."""
        candidates: list[Placement] = []
        for start in starts:
            if start is None or why_foreign(problem, start):
                continue
            candidates.append(self._ask(problem, Given(start)))
            improve = Refine(start)
            if not why_not(improve, problem):
                candidates.append(self._ask(problem, improve, _REFINING))
        candidates.append(self._ask(problem, placer("auto")))
        best = min(candidates, key=lambda found: (found.score_s is None, found.score_s or 0.0))
        strongest = max(candidates, key=lambda found: found.bound_s)
        if best.score_s is not None and best.bound_s < strongest.bound_s <= best.score_s:
            best = replace(best, bound_s=strongest.bound_s, bound_name=strongest.bound_name)
        return best

    def _ask(self, problem: Problem, algorithm: Placer, times: int = 1) -> Placement:
        budget = self.budget if self.budget.count is None else Budget(count=self.budget.count * times)
        try:
            ask = PlanRequest(algorithm, budget, self.seed, self.order, progress=self.progress)
            return find_placement(problem, ask)
        except InputError:
            if not isinstance(algorithm, Refine | Given):
                raise
            return find_placement(problem, PlanRequest(placer("auto"), self.budget, self.seed, self.order))

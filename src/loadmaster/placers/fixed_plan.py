"""The user's own plan as an answer: scored and checked, not searched for."""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.check import check_plan
from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.simulator.events.engine import is_unordered

_FOREIGN = ("length", "device", "support", "order", "recompute")


@dataclass(frozen=True, slots=True)
class Given:
    """The answer that `plan` is; one that does not fit is none, and says what it lacks."""

    plan: Plan
    objectives: ClassVar[tuple[Objective, ...]] = tuple(Objective)
    splits: ClassVar[tuple[Split, ...]] = tuple(Split)
    pipelines: ClassVar[bool] = True
    stepped: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Score it, in its order if it has one."""
        broken = why_foreign(problem, self.plan)
        if broken:
            raise InputError(f"this is not a plan for the problem: {broken}")
        tally = Tally(problem, run)
        tally.offer(self.plan, in_order=not is_unordered(self.plan))
        return tally.answer(algorithm="given")


def why_foreign(problem: Problem, plan: Plan) -> str:
    """Why a plan is none of this problem, '' = it is one, if perhaps one that does not fit."""
    return next((v.message for v in check_plan(problem, plan) if v.rule in _FOREIGN), "")

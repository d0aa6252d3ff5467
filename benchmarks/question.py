"""Question: a problem made ready once, then put to many algorithms; and when their first plan fitted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.cases import never_freed
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Bound, Budget, Run, Score, ignore_progress
from loadmaster.placers.registry import Placer, own_algorithms, placer, why_not
from loadmaster.simulator.bounds import lower_bounds
from loadmaster.simulator.events import engine

AMPLE = Budget(seconds=120.0)  # for constructors, which need no limit


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A problem with its simulator and its lower bound."""

    problem: Problem
    simulator: engine.Simulator
    bound: Bound

    def ask(
        self,
        algorithm: Placer,
        budget: Budget = AMPLE,
        *,
        progress: Callable[[str, float], None] = ignore_progress,
    ) -> Placement:
        """One call of an algorithm; its clock starts here."""
        run = Run(
            budget=budget,
            rng=np.random.default_rng(0),
            score=self.simulator.score,
            arrange=self.simulator.order_and_score,
            bound=self.bound,
            progress=progress,
        )
        return algorithm(self.problem, run)

    def first_come_s(self, plan: Plan) -> float:
        """The step time of a plan's devices first come first served, its order forgotten."""
        return self.simulator.order_and_score(plan_of(plan.device))[1].time_s

    @property
    def serial_s(self) -> float:
        """Everything on the best single device, whether or not it fits."""
        return float(self.problem.device_compute_s.sum(axis=0).min())


def warm() -> None:
    """Have every algorithm answer a small problem with and without room, so that all kernels are loaded."""
    for factor in (2.0, 1.05):
        question = question_of(never_freed("fork_join", 100, factor))
        for name in own_algorithms():
            algorithm = placer(name)
            if not why_not(algorithm, question.problem):
                question.ask(algorithm, Budget(count=200))


def question_of(problem: Problem) -> Question:
    """A problem made ready."""
    return Question(problem, engine.prepare(problem), lower_bounds.lower_bound(problem))


@dataclass(slots=True)
class Watched:
    """An algorithm, and the seconds from its call to the first plan scored that fits; None: no such plan."""

    algorithm: Placer
    first_fit_s: float | None = None
    called: float = field(default=0.0, init=False)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """As the algorithm does."""
        self.called = time.perf_counter()

        def arrange(plan: Plan) -> tuple[Plan, Score]:
            ordered, score = run.arrange(plan)
            self._note(score)
            return ordered, score

        def score(plan: Plan) -> Score:
            found = run.score(plan)
            self._note(found)
            return found

        return self.algorithm(problem, replace(run, arrange=arrange, score=score))

    def _note(self, score: Score) -> None:
        if self.first_fit_s is None and score.overflow_bytes == 0:
            self.first_fit_s = time.perf_counter() - self.called

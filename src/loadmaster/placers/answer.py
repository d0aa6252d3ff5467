"""How a placer states its answer: ordered, scored, and with the reason when nothing fits."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.check import check_plan
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Run, Score

_REPAIRS = 6
Builder = Callable[[Floats], Ints]  # bytes each device may hold at the end of the step -> device of each op


class Tally:
    """The best of the plans offered so far; fitting comes before fast, and rules before both."""

    def __init__(self, problem: Problem, run: Run) -> None:
        """Nothing scored yet."""
        self.problem = problem
        self.run = run
        self.scored = 0
        self._best: tuple[bool, Score] | None = None
        self._plan: Plan | None = None

    def offer(self, plan: Plan) -> Score:
        """Order and score a plan, and keep it if it is the best."""
        ordered = self.run.order(plan)
        score = self.run.score(ordered)
        self.scored += 1
        rated = (bool(broken_rules(self.problem, ordered)), score)
        if self._best is None or rated < self._best:
            self._best, self._plan = rated, ordered
        return score

    @property
    def spent(self) -> bool:
        """Whether the budget is used up; one plan is always allowed."""
        return self.scored > 0 and self.run.out_of_budget(self.scored)

    def answer(self, *, algorithm: str, proof: str = "") -> Placement:
        """The placement of the best plan; `proof` claims that it is optimal."""
        assert self._best is not None
        assert self._plan is not None
        return answer(self.problem, self.run, self._plan, self._best[1], algorithm=algorithm, proof=proof)


def broken_rules(problem: Problem, plan: Plan) -> list[str]:
    """The rules a plan breaks, memory apart: the simulator judges that."""
    return [v.message for v in check_plan(problem, plan) if v.rule != "memory"]


def answer(
    problem: Problem,
    run: Run,
    plan: Plan,
    score: Score,
    *,
    algorithm: str,
    proof: str = "",
    members: tuple[Member, ...] = (),
) -> Placement:
    """The placement of an ordered, scored plan. A plan that breaks a rule or does not fit is none."""
    peak = np.array(score.peak_bytes, dtype=np.int64)
    shortfall: Longs = np.maximum(peak - problem.cluster.usable_bytes, 0)
    broken = broken_rules(problem, plan)
    fits = score.overflow_bytes == 0 and not broken
    if fits:
        status = Status.OPTIMAL if proof else Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if run.bound.infeasible else Status.NOT_FOUND
        proof = run.bound.infeasible or (broken[0] if broken else "")
    return Placement(
        problem=problem,
        plan=plan if fits else None,
        algorithm=algorithm,
        status=status,
        score_s=score.time_s if fits else None,
        bound_s=run.bound.seconds,
        bound_name=run.bound.name,
        proof=proof,
        shortfall_bytes=shortfall,
        peak_bytes=peak,
        least_overflow_plan=None if fits else plan,
        members=members,
        wall_s=time.perf_counter() - run.started,
    )


def best_of(problem: Problem, run: Run, plans: Iterable[Plan], *, algorithm: str) -> Placement:
    """The best of several plans within the budget."""
    tally = Tally(problem, run)
    for plan in plans:
        tally.offer(plan)
        if tally.spent:
            break
    return tally.answer(algorithm=algorithm)


def best_repaired(problem: Problem, run: Run, builders: Iterable[Builder], *, algorithm: str) -> Placement:
    """The best of several builders' plans; one whose peak overflows is built again with less room there."""
    tally = Tally(problem, run)
    usable = problem.cluster.usable_bytes
    for build in builders:
        room = usable.astype(np.float64)
        for _ in range(_REPAIRS):
            peak = np.array(tally.offer(plan_of(build(room.copy()))).peak_bytes)
            over = np.maximum(peak - usable, 0)
            if tally.spent or not over.any():
                break
            room = np.maximum(room - 1.1 * over, 0.0)
        if tally.spent:
            break
    return tally.answer(algorithm=algorithm)

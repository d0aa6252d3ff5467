"""How a placer states its answer: ordered, scored, and with the reason when nothing fits."""

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.check import check_plan
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, Run, Score
from loadmaster.core.units import format_apart, format_bytes
from loadmaster.placers.placement_units import Cargo, load_cargo

_ATTEMPTS = 7
_SHRINK = 0.95  # of the room that would just do, for what is shared unevenly
_EQUAL = 1e-9  # a score this near its bound differs by rounding alone
Builder = Callable[[Floats, Floats], Ints]  # bytes [U] of units, room [D] for them -> device [U]


class Meter:
    """A run's scorers, counting, so that several algorithms share its budget."""

    def __init__(self, run: Run) -> None:
        """Nothing spent yet."""
        self.run = run
        self.count = 0

    def score(self, plan: Plan) -> Score:
        """As the run does."""
        self.count += 1
        return self.run.score(plan)

    def arrange(self, plan: Plan) -> tuple[Plan, Score]:
        """As the run does."""
        self.count += 1
        return self.run.arrange(plan)

    def charge(self, count: int) -> None:
        """Count plans tried without these scorers: `count` in all so far."""
        self.count = max(self.count, count)

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.run.out_of_budget(self.count)

    def member(self) -> Run:
        """A run for one algorithm with what is left, never nothing, and a die of its own."""
        limit, now = self.run.budget, time.perf_counter()
        if limit.count is not None:
            left = Budget(count=max(limit.count - self.count, 1))
        else:
            assert limit.seconds is not None
            left = Budget(seconds=max(limit.seconds - (now - self.run.started), 1e-3))
        die = copy.deepcopy(self.run.rng)
        return replace(self.run, score=self.score, arrange=self.arrange, budget=left, rng=die, started=now)


class Tally:
    """The best of the plans offered so far; fitting comes before fast, and rules before both."""

    def __init__(self, problem: Problem, run: Run) -> None:
        """Nothing scored yet."""
        self.problem = problem
        self.run = run
        self.scored = 0
        self.last: Plan  # the plan offered last, in the order of its starts
        self._best: tuple[bool, Score] | None = None
        self._plan: Plan | None = None

    def offer(self, plan: Plan, *, in_order: bool = False) -> Score:
        """Score a plan and keep it if it is the best; it is ordered by its starts unless it is `in_order`."""
        ordered, score = (plan, self.run.score(plan)) if in_order else self.run.arrange(plan)
        self.scored += 1
        self.last = ordered
        rated = (bool(broken_rules(self.problem, ordered)), score)
        if self._best is None or rated < self._best:
            self._best, self._plan = rated, ordered
        return score

    def adopt(self, placement: Placement) -> None:
        """Keep another algorithm's plan if it is the best; it was scored there."""
        plan = placement.plan if placement.plan is not None else placement.least_overflow_plan
        assert plan is not None
        over = int(placement.shortfall_bytes.sum())
        seconds = np.inf if placement.score_s is None else placement.score_s
        rated = (
            bool(broken_rules(self.problem, plan)),
            Score(over, seconds, tuple(placement.peak_bytes.tolist())),
        )
        if self._best is None or rated < self._best:
            self._best, self._plan = rated, plan

    @property
    def best_plan(self) -> Plan:
        """The best plan so far, in the order of its starts."""
        assert self._plan is not None
        return self._plan

    @property
    def best_score(self) -> Score:
        """Its score."""
        assert self._best is not None
        return self._best[1]

    @property
    def spent(self) -> bool:
        """Whether the budget is used up; one plan is always allowed."""
        return self.scored > 0 and self.run.out_of_budget(self.scored)

    def mend(self) -> None:
        """Where no plan fits, repair the one that came nearest, as far as the budget goes."""
        if self.best_score.overflow_bytes > 0 and self.run.repair and not self.spent:
            from loadmaster.placers.repair import repair_until_fits  # loads a compiler, and is seldom needed

            cargo, best = load_cargo(self.problem), self.best_plan
            device = np.empty(cargo.num_units, dtype=np.int32)
            device[cargo.of_op] = best.device
            repair_until_fits(self.problem, self, cargo, device, priority=best.priority)

    def answer(self, *, algorithm: str, proof: str = "", guarantee: str = "") -> Placement:
        """The placement of the best plan; `proof` claims that there is no better one."""
        found = make_placement(
            self.problem, self.run, self.best_plan, self.best_score, algorithm=algorithm, proof=proof
        )
        return replace(found, guarantee=guarantee) if guarantee and found.fits else found


def broken_rules(problem: Problem, plan: Plan) -> list[str]:
    """The rules a plan breaks, memory apart: the simulator judges that."""
    return [v.message for v in check_plan(problem, plan) if v.rule != "memory"]


def make_placement(
    problem: Problem,
    run: Run,
    plan: Plan,
    score: Score,
    *,
    algorithm: str,
    proof: str = "",
    members: tuple[Member, ...] = (),
) -> Placement:
    """The placement of an ordered, scored plan. A plan that breaks a rule or does not fit is none.

    `proof` claims that no plan is better: the status is then optimal, or infeasible where this one is none.
    """
    peak = np.array(score.peak_bytes, dtype=np.int64)
    shortfall: Longs = np.maximum(peak - problem.cluster.usable_bytes, 0)
    broken = broken_rules(problem, plan)
    fits = score.overflow_bytes == 0 and not broken
    if fits and not proof and score.time_s <= run.bound.seconds * (1.0 + _EQUAL):
        proof = f"no plan beats the lower bound ({run.bound.name}), and this one reaches it"
    if not fits:
        proof = run.bound.infeasible or (f"{proof}, and none is valid and fits" if proof else "")
    certain, searched = (Status.OPTIMAL, Status.FEASIBLE) if fits else (Status.INFEASIBLE, Status.NOT_FOUND)
    return Placement(
        problem=problem,
        plan=plan if fits else None,
        algorithm=algorithm,
        status=certain if proof else searched,
        score_s=score.time_s if fits else None,
        bound_s=run.bound.seconds,
        bound_name=run.bound.name,
        proof=proof or (broken[0] if broken else "" if fits else _describe_shortfall(problem, peak)),
        shortfall_bytes=shortfall,
        peak_bytes=peak,
        least_overflow_plan=None if fits else plan,
        members=members,
        wall_s=time.perf_counter() - run.started,
    )


def _describe_shortfall(problem: Problem, peak: Longs) -> str:
    """The device that is short of most, with both numbers."""
    cluster = problem.cluster
    d = int((peak - cluster.usable_bytes).argmax())
    need, have = int(peak[d]), int(cluster.usable_bytes[d])
    needed, there = format_apart(need, have)
    return (
        f"in the nearest plan {cluster.device_name[d]} needs {needed} but has {there}"
        f" ({format_bytes(need - have)} short): use a smaller batch, one more device, or host memory as"
        " a device"
    )


def best_of(
    problem: Problem, run: Run, plans: Iterable[Plan], *, algorithm: str, mend: bool = True
) -> Placement:
    """The best of several plans within the budget; where none fits the nearest is repaired, if asked."""
    tally = Tally(problem, run)
    for plan in plans:
        tally.offer(plan)
        if tally.spent:
            break
    if mend:
        tally.mend()
    return tally.answer(algorithm=algorithm)


def best_repaired(
    problem: Problem,
    run: Run,
    cargo: Cargo,
    builders: Iterable[Builder],
    *,
    algorithm: str,
    hopeless: Callable[[], bool] = lambda: False,
) -> Placement:
    """The best of several builders' plans; one whose peak overflows is built again with less room there.

    Room is first what a device may hold at the end of the step. Tensors that are gone by then decide a peak
    too: after a failure room is counted in all bytes that units make, as many as the memory stood for.
    Where a builder has proven on the way that nothing fits (`hopeless`), nothing more is tried.
    """
    tally = Tally(problem, run)
    usable = problem.cluster.usable_bytes
    for build in builders:
        unit_bytes, room = cargo.held_bytes, usable.astype(np.float64)
        for attempt in range(_ATTEMPTS):
            device = build(unit_bytes, room)
            peak = np.array(tally.offer(plan_of(device[cargo.of_op])).peak_bytes)
            over = peak > usable
            made = np.bincount(device, cargo.made_bytes, len(usable))
            if tally.spent or not over.any() or not made.any() or hopeless():
                break
            if attempt == 0:
                unit_bytes = cargo.made_bytes
                room = usable * np.where(made > 0, made / np.maximum(peak, 1), made.sum() / peak.sum())
            room = np.where(over, _SHRINK * np.minimum(room, made) * usable / np.maximum(peak, 1), room)
            room = room * max(1.0, made.sum() / room.sum())  # what has no room anywhere is spread
        if tally.spent or hopeless():
            break
    if not hopeless():
        tally.mend()
    return tally.answer(algorithm=algorithm)


def with_note(placement: Placement, name: str, note: str) -> Placement:
    """The placement with a word on how it came about among its members."""
    if not note:
        return placement
    done = Member(name, placement.status, placement.score_s, placement.wall_s, note)
    return replace(placement, members=(*placement.members, done))

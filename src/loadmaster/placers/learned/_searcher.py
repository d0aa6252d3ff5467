"""Searchers: who proposes rows and observes their times; whoever evaluates them counts.

`run_searcher` evaluates with the run's scorer, which simulates or measures. A benchmark may evaluate the same
searcher in closed form. An evaluation is one request for the time of a whole row, repeated ones included.
"""

import time
from dataclasses import replace
from typing import Protocol

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.errors import InputError
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Budget
from loadmaster.placers.answer import Meter, Tally
from loadmaster.placers.fixed_plan import why_foreign
from loadmaster.placers.learned._groups import Groups
from loadmaster.placers.registry import placer

_MET = 1.0 + 1e-9
_WARM_STARTS = {Objective.THROUGHPUT: "linear_dp", Objective.STEP: "heft"}


class Searcher(Protocol):
    """Proposes, then observes; it never evaluates."""

    def propose(self, rng: np.random.Generator) -> Ints:
        """[B, U] rows to evaluate."""
        ...

    def observe(self, rows: Ints, times_s: Floats) -> None:
        """The times of the first rows that were proposed; less than all where the budget ended."""
        ...


class Climb:
    """One random group to another device, kept if that is not worse; a restart after a long time in vain."""

    def __init__(
        self, groups: Groups, start: Ints | None, start_s: float = np.inf, *, restarts: bool = True
    ) -> None:
        self.groups, self.restarts = groups, restarts
        self.row, self.time_s, self.idle = start, start_s, 0
        self.fits = groups.cargo.fits

    def propose(self, rng: np.random.Generator) -> Ints:
        """[1, U] a neighbour of the present row; a row from nowhere first, and when nothing helps."""
        stuck = self.restarts and self.idle > 5 * self.groups.num
        if self.row is None or stuck:
            self.time_s, self.idle = np.inf, 0
            return self.groups.draw(self.fits / self.fits.sum(axis=1, keepdims=True), rng, 1)
        row = self.row.copy()
        at = int(rng.integers(self.groups.num))
        others = np.flatnonzero(self.fits[at] & (np.arange(self.groups.num_devices) != row[at]))
        if len(others):
            row[at] = others[int(rng.integers(len(others)))]
        return row[None]

    def observe(self, rows: Ints, times_s: Floats) -> None:
        """Move on to what is no worse."""
        for row, time_s in zip(rows, times_s.tolist(), strict=True):
            self.idle = 0 if time_s < self.time_s else self.idle + 1
            if time_s <= self.time_s:
                self.row, self.time_s = row, time_s


def run_searcher(searcher: Searcher, groups: Groups, tally: Tally, *, share: float = 1.0) -> None:
    """Evaluate what a searcher proposes until the bound is met or this share of the budget is spent."""
    run = tally.run
    while not is_over(tally, share):
        rows = searcher.propose(run.rng)
        times: list[float] = []
        for row in rows:
            if is_over(tally, share):
                break
            times.append(groups.penalised_s(tally.offer(groups.plan(row))))
        searcher.observe(rows[: len(times)], np.array(times))
        run.progress(f"{tally.scored:,} plans tried", 0.0)


def is_over(tally: Tally, share: float = 1.0) -> bool:
    """Whether the bound is met, nothing can fit, or this share of the budget is spent."""
    if tally.scored > 0 and tally.run.bound.infeasible:
        return True
    if tally.spent or (share < 1.0 and tally.scored > 0 and _spent_share(tally) >= share):
        return True
    met = tally.scored > 0 and tally.best_score.overflow_bytes == 0
    return met and tally.best_score.time_s <= tally.run.bound.seconds * _MET


def _spent_share(tally: Tally) -> float:
    budget = tally.run.budget
    if budget.count is not None:
        return tally.scored / budget.count
    assert budget.seconds is not None
    return (time.perf_counter() - tally.run.started) / budget.seconds


def offer_start(problem: Problem, tally: Tally, start: str | Plan) -> None:
    """Begin with a plan, or with the first plan of a constructor: either is one evaluation."""
    if isinstance(start, Plan):
        broken = why_foreign(problem, start)
        if broken:
            raise InputError(f"a search cannot start from that plan: {broken}; give a plan of this problem")
        tally.offer(start)
        return
    meter = Meter(tally.run)
    tally.adopt(placer(start)(problem, replace(meter.member(), budget=Budget(count=1), repair=False)))
    tally.scored = max(tally.scored, meter.count)


def warm_start_of(problem: Problem) -> str:
    """Whose plan a warm search starts from."""
    return _WARM_STARTS[problem.objective]

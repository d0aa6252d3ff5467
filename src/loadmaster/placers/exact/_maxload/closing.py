"""Closing the gap between the best split known and what no split can beat, from both sides.

Every question is "is there a split within this limit?": *no* raises the bound, *yes* is a better split, which
local search improves. Just under the best value a *no* is the proof of optimality; that is asked first and
again with more time. Between, the limit is halved towards the bound, where *no* is cheap to prove: asked for
the least value outright, the solver's bound stays at the work bound.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from loadmaster.core.run import Bound, Run
from loadmaster.placers.exact._maxload.climb import Assignment, fits, make_assignment
from loadmaster.placers.exact._maxload.cpsat import MOST_BOOLEANS, Effort, decide_limit, num_booleans
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.exact._maxload.prices import find_prices
from loadmaster.placers.exact._maxload.reduce import least_busiest_s, reduce_model

_UNDER = 5e-10  # a split that is better by less than this share is not looked for
_CLOSE = 2e-3  # of the value: an open interval so small is not halved again before more time is given
_FIRST_S, _MORE = 0.5, 2.0
_STEPS_PER_PLAN = 0.02  # deterministic time that a plan of a count budget stands for
_PROBES = 12
MOST_CLASSES = 1000  # beyond, the bound is that of work


@dataclass(frozen=True, slots=True, eq=False)
class ClosedGap:
    """The best split, and a proven bound of all splits of the model."""

    best: Assignment
    bound_s: float
    bound_name: str


class Clock:
    """What is left of a run's budget, as effort for the next question."""

    def __init__(self, run: Run) -> None:
        """Nothing spent yet."""
        self.run, self.spent_steps = run, 0.0
        count = run.budget.count
        self.steps = None if count is None else _STEPS_PER_PLAN * count

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        if self.steps is not None:
            return self.spent_steps >= self.steps
        assert self.run.budget.seconds is not None
        return time.perf_counter() - self.run.started >= self.run.budget.seconds

    def effort(self, wanted_s: float) -> Effort:
        """So much effort, or what is left."""
        if self.steps is not None:
            steps = min(wanted_s, self.steps - self.spent_steps)
            self.spent_steps += steps
            return Effort(steps=max(steps, 1e-3))
        assert self.run.budget.seconds is not None
        left = self.run.budget.seconds - (time.perf_counter() - self.run.started)
        return Effort(seconds=max(min(wanted_s, left), 1e-3))


def close_gap(
    model: MaxLoad,
    best: Assignment,
    bound_s: float,
    clock: Clock,
    *,
    chain: bool,
    improve: Callable[[Assignment], Assignment],
) -> ClosedGap:
    """Ask until the gap is closed or the clock is over."""
    gap = _Gap(model, best, bound_s, chain=chain)
    if model.num_classes <= MOST_CLASSES:
        gap.halve_by_reduction(over=lambda: clock.over)
    slice_s = _FIRST_S
    if too_large(model):
        return gap.result()
    while not clock.over and not gap.shut:
        gap.ask(gap.under_best, clock.effort(2 * slice_s), improve)
        high_s = gap.best.value_s
        while not clock.over and not gap.shut and high_s - gap.bound_s > _CLOSE * high_s:
            limit_s = (gap.bound_s + high_s) / 2
            if not gap.ask(limit_s, clock.effort(slice_s), improve):
                high_s = limit_s
            high_s = min(high_s, gap.best.value_s)
        slice_s *= _MORE
    return gap.result()


def too_large(model: MaxLoad) -> bool:
    """Whether the solver is not asked at all."""
    return num_booleans(model) > MOST_BOOLEANS or model.num_classes > MOST_CLASSES


def free_bound(model: MaxLoad, value_s: float, *, probes: int = _PROBES) -> Bound:
    """What prices and cuts alone prove of a model, given that a split has this value."""
    if not model.bounding or model.restricted or model.num_classes > MOST_CLASSES:
        return Bound(0.0, "none")
    best = Assignment(np.zeros(0, dtype=np.int32), value_s)
    gap = _Gap(model, best, find_prices(model).bound_s, chain=False)
    gap.halve_by_reduction(probes)
    return Bound(gap.bound_s * (1 - 1e-12), gap.name)


class _Gap:
    """The best split and the bound so far."""

    def __init__(self, model: MaxLoad, best: Assignment, bound_s: float, *, chain: bool) -> None:
        self.model, self.best, self.bound_s, self.chain = model, best, bound_s, chain
        self.name = "work"

    @property
    def under_best(self) -> float:
        """The limit whose refutation is a proof of optimality."""
        return self.best.value_s * (1 - _UNDER)

    @property
    def shut(self) -> bool:
        """Whether the bound is as good as the best."""
        return self.bound_s >= self.best.value_s * (1 - 2 * _UNDER)

    def result(self) -> ClosedGap:
        """As it stands."""
        return ClosedGap(self.best, self.bound_s, self.name)

    def halve_by_reduction(self, probes: int = _PROBES, *, over: Callable[[], bool] = lambda: False) -> None:
        """Raise the bound as far as prices and cuts alone refute limits."""
        self._raise_bound(least_busiest_s(self.model), "anchored cut")
        if probes and self._reduce_model(self.under_best) is None:
            self._raise_bound(self.under_best, "reduction")
        low_s, high_s = self.bound_s, self.under_best
        for _ in range(probes):
            if self.shut or over():
                break
            middle_s = (low_s + high_s) / 2
            if self._reduce_model(middle_s) is None:
                low_s = middle_s
                self._raise_bound(middle_s, "reduction")
            else:
                high_s = middle_s

    def _raise_bound(self, bound_s: float, name: str) -> None:
        if bound_s > self.bound_s:
            self.bound_s, self.name = bound_s, name

    def _reduce_model(self, limit_s: float) -> tuple[MaxLoad, "np.typing.NDArray[np.int32]"] | None:
        found = reduce_model(self.model, limit_s)
        return None if found is None else (found.model, found.of_class)

    def ask(self, limit_s: float, effort: Effort, improve: Callable[[Assignment], Assignment]) -> bool:
        """Whether a limit was decided; bound or best are what follows."""
        small = self._reduce_model(limit_s)
        refuted, device = small is None, None
        if small is not None:
            model, label = small
            reply = decide_limit(model, limit_s, effort, chain=self.chain)
            refuted = reply.refuted
            device = None if reply.device is None else reply.device[label]
        if refuted:
            self._raise_bound(limit_s, "CP-SAT" if small is not None else "reduction")
            return True
        if device is None or not fits(self.model, device):
            return False
        found = make_assignment(self.model, device)
        if found.value_s < self.best.value_s:
            self.best = improve(found)
        return True

"""Run and Budget: how long a placer may work and how its plans are scored."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from loadmaster.core.arrays import content_digest
from loadmaster.core.errors import InputError
from loadmaster.core.plan import Plan
from loadmaster.core.units import parse_seconds


@dataclass(frozen=True, slots=True)
class Budget:
    """How long an algorithm may search: seconds, or a count of scored plans (repeatable to the bit)."""

    seconds: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        """Exactly one of the two, positive."""
        if (self.seconds is None) == (self.count is None):
            raise InputError("a budget is seconds or a count; give exactly one")
        value = self.seconds if self.seconds is not None else self.count
        kind = float | int if self.seconds is not None else int
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise InputError(
                f"a budget of {value!r} is not positive, finite and, for a count, whole;"
                " give for example 10s or 2000x"
            )

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)

    def __str__(self) -> str:
        """'10s' or '2000x'."""
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.count}x"


def parse_budget(value: "Budget | float | int | str") -> Budget:
    """Seconds from a number, seconds or a count from '10s', '500ms' or '2000x'."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, int | float):
        return Budget(seconds=value)
    text = str(value)
    if re.fullmatch(r"\s*[0-9]{1,18}\s*x\s*", text):
        return Budget(count=int(text.strip().rstrip("x")))
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parse_seconds(text)
        except InputError:
            raise InputError(
                f"{value!r} is not a budget; write seconds as '10s' or a count as '2000x'"
            ) from None
    return Budget(seconds=seconds)


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a plan is; ordered so that fitting comes before being fast."""

    overflow_bytes: int  # sum over devices of peak above memory; 0 = fits
    time_s: float
    peak_bytes: tuple[int, ...] = field(default=(), compare=False)  # [D]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound of the objective and the argument behind it."""

    seconds: float
    name: str
    infeasible: str = ""  # why no plan can fit at all, '' = not proven


@dataclass(frozen=True, slots=True)
class PlanNews:
    """A better plan was found, or more is proven."""

    time_s: float
    overflow_bytes: int  # 0 = it fits
    bound_s: float  # what is proven so far


def ignore_news(_news: PlanNews) -> None:
    """A listener that does nothing."""


def ignore_bound(_bound: Bound) -> None:
    """A listener that does nothing."""


def ignore_progress(_message: str, _share: float) -> None:
    """A progress callback that says nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one call of a placer gets: its budget, its random numbers and its scorer."""

    budget: Budget
    rng: np.random.Generator
    score: Callable[[Plan], Score]
    arrange: Callable[
        [Plan], tuple[Plan, Score]
    ]  # the plan in the order in which its ops start, and its score
    bound: Bound
    progress: Callable[[str, float], None] = ignore_progress
    prove: Callable[[Bound], None] = ignore_bound  # told of a better bound before the answer has it
    repair: bool = True  # whether a constructor may spend time on plans that do not fit
    started: float = field(default_factory=lambda: time.perf_counter())  # looked up at the call

    def out_of_budget(self, scored: int) -> bool:
        """Whether `scored` plans, or the time since the start, use up the budget."""
        if self.budget.count is not None:
            return scored >= self.budget.count
        assert self.budget.seconds is not None
        return time.perf_counter() - self.started >= self.budget.seconds

"""StrategyAnswer: a strategy with the question it answers and what it is predicted to take: what is run."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Longs, content_digest, require_range, set_column
from loadmaster.core.errors import PlanError
from loadmaster.core.problem import Problem
from loadmaster.core.strategy import Strategy


@dataclass(frozen=True, slots=True, eq=False)
class StrategyAnswer:
    """One strategy for a problem; the step is that of the whole batch."""

    problem: Problem
    strategy: Strategy
    algorithm: str
    score_s: float  # predicted step
    bound_s: float  # no strategy for this problem takes less; 0 = nothing is proven
    bound_name: str
    peak_bytes: Longs  # [D] predicted
    wall_s: float
    notes: tuple[str, ...] = ()  # which ops cannot have rows of their own, and why

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        for field, noun in (("problem", Problem), ("strategy", Strategy)):
            if not isinstance(getattr(self, field), noun):
                found = type(getattr(self, field)).__name__
                raise PlanError(f"StrategyAnswer.{field} is a {found}; needs a {noun.__name__}")
        set_column(self, "peak_bytes", np.int64, (self.problem.cluster.num_devices,), PlanError)
        require_range(self.peak_bytes, 0, 2**63 - 1, "StrategyAnswer.peak_bytes", PlanError)
        for field in ("score_s", "bound_s", "wall_s"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise PlanError(f"StrategyAnswer.{field} is {value!r}; needs a finite number >= 0")
        if self.score_s < self.bound_s:
            raise PlanError(f"StrategyAnswer.score_s is {self.score_s}, below the bound of {self.bound_s}")

    @property
    def gap(self) -> float | None:
        """score / bound - 1, or None without a positive bound."""
        return self.score_s / self.bound_s - 1.0 if self.bound_s > 0 else None

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)

    def __repr__(self) -> str:
        """One line; it holds a whole graph."""
        return f"<StrategyAnswer {self.strategy.name!r}: {self.score_s:.6g} s by {self.algorithm}>"

"""SearchRun: one call of a search: its budget in replays or seconds, and its randomness."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from loadmaster.core.run import Budget, ignore_progress
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator

KEPT = 20


@dataclass(slots=True)
class SearchRun:
    """Counts replays of the evaluator from when it was made."""

    budget: Budget
    rng: np.random.Generator
    progress: Callable[[str, float], None] = ignore_progress
    started: float = field(default_factory=time.perf_counter)
    first_replay: int = 0

    def used(self, evaluator: Evaluator) -> float:
        """The share of the budget that is used up."""
        if self.budget.count is not None:
            return (evaluator.replays - self.first_replay) / self.budget.count
        assert self.budget.seconds is not None
        return (time.perf_counter() - self.started) / self.budget.seconds

    def out_of_budget(self, evaluator: Evaluator) -> bool:
        """Whether to stop."""
        used = self.used(evaluator)
        self.progress("weighing strategies", min(used, 1.0))
        return used >= 1.0


def best_first(evaluator: Evaluator, most: int = KEPT) -> list[Evaluated]:
    """The best states that an evaluator has seen."""
    return sorted(evaluator.seen.values(), key=lambda e: (e.rank, e.choice))[:most]

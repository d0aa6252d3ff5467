"""Coordinate descent from the best uniform strategy: one group's action at a time, while that helps."""

from dataclasses import dataclass

import numpy as np

from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.search.uniform import Uniform
from loadmaster.strategies.search_run import SearchRun, best_first


@dataclass(frozen=True, slots=True)
class Greedy:
    """`share` of the budget at most; ties go to the first action."""

    share: float = 1.0

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """Rounds over all groups, the longest first, until none helps."""
        best = Uniform()(evaluator, run)[0]
        improved = True
        while improved:
            improved = False
            for g in range(evaluator.facts.num_groups):
                for action in _tried_first(evaluator, best.choice, g):
                    if run.used(evaluator) >= self.share or run.out_of_budget(evaluator):
                        return best_first(evaluator)
                    changed = (*best.choice[:g], action, *best.choice[g + 1 :])
                    found = evaluator.evaluate(changed)
                    if found.rank < best.rank:
                        best, improved = found, True
        return best_first(evaluator)


def _tried_first(evaluator: Evaluator, choice: tuple[int, ...], group: int) -> list[int]:
    """Allowed actions, those that other groups take first: fewer tensors change layout."""
    used = set(choice)
    allowed = [int(a) for a in np.flatnonzero(evaluator.allowed[group]) if a != choice[group]]
    return sorted(allowed, key=lambda a: (a not in used, a))


SEARCH = Greedy

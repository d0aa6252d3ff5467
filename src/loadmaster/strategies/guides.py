"""Guides: what a tree search asks: how likely each action of the next group is, what a state may come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadmaster.core.arrays import Floats
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """None where the guide does not say."""

    prior: Floats | None  # [A]
    value: float | None


class Guide(Protocol):
    """A prior and a value for states that are prefixes of choices."""

    def prepare(self, evaluator: Evaluator) -> Any:
        """What it keeps of a problem."""
        ...

    def guess(self, record: Any, states: Sequence[Sequence[int]], best: Evaluated) -> list[Guess]:
        """A guess for each state; `best` fills what is undecided."""
        ...


class UniformGuide:
    """All actions alike, and no value."""

    def prepare(self, evaluator: Evaluator) -> None:
        """Nothing."""

    def guess(self, record: Any, states: Sequence[Sequence[int]], best: Evaluated) -> list[Guess]:
        """The same for all."""
        return [Guess(None, None)] * len(states)

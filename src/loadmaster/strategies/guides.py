"""Guides: what a tree search asks: how likely each action of the next group is, what a state may come to."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadmaster.core.arrays import Floats
from loadmaster.core.errors import InputError
from loadmaster.strategies.evaluator import Evaluator


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

    def guess(self, record: Any, states: Sequence[Sequence[int]], best: Sequence[int]) -> list[Guess]:
        """A guess for each state; `best` fills what is undecided."""
        ...


class UniformGuide:
    """All actions alike, and no value."""

    def prepare(self, evaluator: Evaluator) -> None:
        """Nothing."""

    def guess(self, record: Any, states: Sequence[Sequence[int]], best: Sequence[int]) -> list[Guess]:
        """The same for all."""
        return [Guess(None, None)] * len(states)


def load_guide(name: str) -> Guide:
    """The network of the weights that are shipped, or of a file; uniform where torch is not installed."""
    if not is_installed():
        if name != "shipped":
            raise InputError("a network needs PyTorch; install it with: pip install 'loadmaster[torch]'")
        return UniformGuide()
    from loadmaster.strategies.learned.guide import load_network_guide

    return load_network_guide(name)


def is_installed() -> bool:
    """Whether there is torch, and what reads weights."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "safetensors"))

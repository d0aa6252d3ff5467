"""Chance: random numbers of Python and NumPy, which a model may draw beside torch's own."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def preserve_rng() -> Iterator[Callable[[], str]]:
    """Afterwards both go on as if nothing had been drawn; until then it can be asked who was drawn from."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)

    def drawn() -> str:
        if random.getstate() != python:
            return "Python's random"
        return (
            "numpy.random"
            if _to_comparable(np.random.get_state(legacy=False)) != _to_comparable(numpy)
            else ""
        )

    try:
        yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_rng(seed: int) -> None:
    """Both from a seed, as torch.manual_seed does it for torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _to_comparable(state: Any) -> Any:
    """A state of NumPy as what can be compared."""
    if isinstance(state, dict):
        return {key: _to_comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state

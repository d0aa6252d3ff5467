"""Checkpoints: `torch.utils.checkpoint`, both of its ways, whoever imported it under what name.

`torch.export` keeps no trace of it, so an export that meets one is given up (`refused`) and the model is
traced. Autograd's nodes of the older, reentrant way say nothing of what is computed again, so where the
backward pass is estimated the newer way is taken instead (`told_apart`); both compute the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.utils.checkpoint as home


class Recomputes(Exception):  # noqa: N818
    """The model throws activations away and computes them again, of which torch.export keeps no trace."""


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Both ways raise."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Recomputes("the model uses torch.utils.checkpoint; capture it with path='traced'")

    with _instead(_checkpoint_without_reentrant_generator=refuse, CheckpointFunction=_applied(refuse)):
        yield


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """The reentrant way becomes the other."""

    def newer(function: Any, keeps_rng: bool, *args: Any) -> Any:
        return home.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keeps_rng)

    with _instead(CheckpointFunction=_applied(newer)):
        yield


def _applied(function: Any) -> type:
    return type("CheckpointFunction", (), {"apply": staticmethod(function)})


@contextlib.contextmanager
def _instead(**ways: Any) -> Iterator[None]:
    before = {name: getattr(home, name) for name in ways if hasattr(home, name)}
    try:
        for name in before:
            setattr(home, name, ways[name])
        yield
    finally:
        for name, way in before.items():
            setattr(home, name, way)

"""An optimizer made from what a user may pass: a class, a name ('adamw'), or a function of the weights."""

from collections.abc import Callable
from typing import Any

import torch

from loadmaster.core.errors import InputError, UnknownNameError

NAMED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def optimizer_name(optimizer: Any) -> str:
    """What to call an optimizer."""
    if isinstance(optimizer, str):
        return optimizer.lower()
    named = getattr(optimizer, "__name__", "")
    return str(named) if named else type(optimizer).__name__


def make_optimizer(optimizer: Any, weights: list[Any]) -> Any:
    """An optimizer by class, name or function, on weights."""
    if isinstance(optimizer, str):
        if optimizer.lower() not in NAMED:
            raise UnknownNameError("optimizer", optimizer, NAMED)
        optimizer = NAMED[optimizer.lower()]
    if not callable(optimizer):
        raise InputError(
            f"optimizer is {optimizer!r}; give a class such as torch.optim.AdamW, a name such as 'adamw',"
            " or a function of the list of weights"
        )
    return optimizer(weights)

"""Optimizers: their state goes where their weights are; one that was forgotten is an error, not silence.

Optimizers that hold a weight of the model when it is placed are found among the live objects. Each is stopped
at its first step until it is handed over.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from loadmaster.core.errors import InputError, RunError
from loadmaster.runtime.accounts import Accounts


class Optimizers:
    """The optimizers of a placed model."""

    def __init__(
        self,
        model: nn.Module,
        accounts: Accounts | None,
        homes: dict[str, int],
        current: Callable[[], bool] = lambda: True,
    ) -> None:
        """`current` says whether the model has not been placed anew."""
        self._current = current
        self._weights = {id(weight): (name, weight) for name, weight in model.named_parameters()}
        self._accounts, self._homes = accounts, homes
        self._stops: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        for made in _live():
            if self._holds(made):
                self._stops[made] = made.register_step_pre_hook(_stop)

    def adopt(self, optimizer: Any) -> None:
        """Move an optimizer's state to its weights."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"{type(optimizer).__name__} is not an optimizer; give the optimizer itself")
        if not self._holds(optimizer):
            raise InputError("the optimizer holds no weight of this model; make it on placed.parameters()")
        for weight, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():  # a step count stays where it was
                    state[name] = value.to(weight.device)
        stop = self._stops.pop(optimizer, None)
        if stop is not None:
            stop.remove()
        self.count(optimizer)

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's state is counted where its weights are."""
        if self._accounts is None:
            return
        for weight, state in optimizer.state.items():
            known = self._weights.get(id(weight))
            if known is not None:
                self._accounts.add(state, self._homes[known[0]], f"the optimizer's state of {known[0]}")

    def watch(self) -> None:
        """Count the state of optimizers made from now on, as long as this lives."""
        this = weakref.ref(self)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            found = this()
            if found is not None and found._current():
                found.count(optimizer)

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)

    def _holds(self, optimizer: Any) -> bool:
        groups = optimizer.param_groups
        return any(id(weight) in self._weights for group in groups for weight in group["params"])


def _live() -> list[Any]:
    """Every optimizer there is."""
    kind = torch.optim.Optimizer
    return [one for one in gc.get_objects() if issubclass(type(one), kind) and hasattr(one, "param_groups")]


def _stop(optimizer: Any, args: Any, kwargs: Any) -> None:
    raise RunError(
        f"this {type(optimizer).__name__} was made before the model was placed, and its state is where the"
        " weights were; hand it over with placed.adopt(optimizer), or lm.place(..., optimizer=optimizer)"
    )

"""Optimizers: their state follows their weights; an optimizer that was not adopted is an error.

Optimizers that hold a weight of the model when it is placed are found among the live objects. Each is stopped
at its first step until it is handed over. On one GPU torch updates all weights in few kernels; over a GPU and
the host it would go weight by weight unless told: it is told, for the time of the step.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from loadmaster.core.errors import InputError, RunError
from loadmaster.runtime.transport.byte_accounts import Accounts


class Optimizers:
    """The optimizers of a placed model."""

    def __init__(
        self,
        model: nn.Module,
        accounts: Accounts | None,
        homes: dict[str, int],
        current: Callable[[], bool] = lambda: True,
    ) -> None:
        """`current` says whether the model has not been placed again."""
        self._current = current
        self._weights: dict[int, tuple[str, torch.Tensor]] = {}
        self.name_weights(model)
        self._accounts, self._homes = accounts, homes
        self._stops: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        for made in _find_optimizers():
            if self._holds(made):
                self._stops[made] = made.register_step_pre_hook(_refuse_stale_optimizer)

    def name_weights(self, model: nn.Module) -> None:
        """Weights came, or have other names, after placing."""
        self._weights = {id(weight): (name, weight) for name, weight in model.named_parameters()}

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

    def watch(self, *, together: bool = True) -> None:
        """While this lives, optimizers have their state counted, and weights of a GPU stepped `together`."""
        this = weakref.ref(self)

        def stepping(optimizer: Any, args: Any, kwargs: Any) -> None:
            found = this()
            if found is not None and found._current() and found._holds(optimizer):
                found._told[optimizer] = [group for group in optimizer.param_groups if is_divided(group)]
                for group in found._told[optimizer]:
                    group["foreach"] = True

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            found = this()
            if found is not None:
                for group in found._told.pop(optimizer, ()):
                    group["foreach"] = None
                if found._current():
                    found.count(optimizer)

        places = {weight.device.type for _, weight in self._weights.values()}
        if together and len(places) > 1:
            weakref.finalize(self, register_optimizer_step_pre_hook(stepping).remove)
        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def _holds(self, optimizer: Any) -> bool:
        groups = optimizer.param_groups
        return any(id(weight) in self._weights for group in groups for weight in group["params"])


def is_divided(group: dict[str, Any]) -> bool:
    """Whether torch would go weight by weight only because a group's weights are on a GPU and on the host."""
    if group.get("foreach", False) is not None or group.get("fused") or group.get("differentiable"):
        return False
    plain = all(type(weight) in (torch.Tensor, nn.Parameter) for weight in group["params"])
    return plain and len({weight.device.type for weight in group["params"]}) > 1


def _find_optimizers() -> list[Any]:
    """Every optimizer there is: an object refers to its class, and the collector finds who does."""
    return [one for one in gc.get_referrers(*_list_kinds(torch.optim.Optimizer)) if _is_optimizer(one)]


def _is_optimizer(one: Any) -> bool:
    return isinstance(one, torch.optim.Optimizer) and hasattr(one, "param_groups")


def _list_kinds(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for one in below:
        yield from _list_kinds(one)


def _refuse_stale_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    raise RunError(
        f"this {type(optimizer).__name__} was made before the model was placed, and its state is where the"
        " weights were; hand it over with placed.adopt(optimizer), or lm.place(..., optimizer=optimizer)"
    )

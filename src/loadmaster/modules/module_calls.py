"""Stand around the calls of some modules, with all hooks that the user put on them inside.

`module(...)` looks up `_call_impl` on the instance, which runs hooks and `forward`. An attribute of that name
on the instance is therefore called in its place; nothing of the module's class or of its hooks is touched.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as every
from torch.utils.checkpoint import CheckpointFunction

_GLOBAL_HOOKS = (
    every._global_forward_hooks,
    every._global_forward_pre_hooks,
    every._global_backward_hooks,
    every._global_backward_pre_hooks,
)
Around = Callable[..., Any]  # (number, original, *args, **kwargs) -> output


class _Call:
    """What is called in the place of a module's `_call_impl`; a copy of the module is called as it is."""

    __slots__ = ("_around", "_module", "_number", "_original")

    def __init__(self, around: Around, number: int, module: nn.Module) -> None:
        self._around, self._number, self._module = around, number, module
        self._original = type(module)._call_impl.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._number, self._original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return type(copied)._call_impl.__get__(copied)


def stand_around(modules: Sequence[nn.Module], around: Around) -> Callable[[], None]:
    """Have every call of a module go through `around`; gives what undoes it."""
    for number, module in enumerate(modules):
        vars(module)["_call_impl"] = _Call(around, number, module)

    def undo() -> None:
        for module in modules:
            vars(module).pop("_call_impl", None)

    return undo


@contextmanager
def standing_around(modules: Sequence[nn.Module], around: Around) -> Iterator[None]:
    """The same for a while."""
    undo = stand_around(modules, around)
    try:
        yield
    finally:
        undo()


def is_checkpointing() -> bool:
    """Whether a reentrant checkpoint runs its part for the first time: it will run again in backward."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def has_user_hooks(block: nn.Module) -> bool:
    """Whether a module or one in it has hooks that would run twice; those that only compute a weight may."""
    if any(table for table in _GLOBAL_HOOKS):
        return True
    for module in block.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not type(hook).__module__.startswith("torch.nn.utils") for hook in hooks):
            return True
        if module._backward_hooks or module._backward_pre_hooks:
            return True
    return False

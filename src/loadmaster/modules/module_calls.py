"""Stand around the calls of some modules, with all hooks that the user put on them inside.

`module(...)` looks up `_call_impl` on the instance, which runs hooks and `forward`. An attribute of that name
on the instance is therefore called in its place; nothing of the module's class or of its hooks is touched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

Around = Callable[..., Any]  # (number, original, *args, **kwargs) -> output


def stand_around(modules: Sequence[nn.Module], around: Around) -> Callable[[], None]:
    """Have every call of a module go through `around`; gives what undoes it."""
    for number, module in enumerate(modules):
        original = type(module)._call_impl.__get__(module)
        vars(module)["_call_impl"] = partial(around, number, original)

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

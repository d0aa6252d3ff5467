"""Positions: whole numbers that a forward counts off, known although its tensors have no values.

`torch.arange(length) + 0` says the same in every step. What asks for such numbers while a model is exported
gets the answer of a step that is not. Followed are a few ways to count and to look; whatever else comes of
them, or of the model's inputs, is not known; but for masks that are given and mask nothing.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_FOLLOWED = {
    "arange", "add", "sub", "__add__", "__radd__", "__sub__", "unsqueeze", "squeeze", "expand", "view",
    "reshape", "to", "long", "int", "__getitem__", "detach", "contiguous", "clone", "all",
}  # fmt: skip
_LESS = {"lt", "__lt__"}
_IN_PLACE = {"__setitem__", "__set__"}
_IN_PLACE |= {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
_IN_PLACE |= {f"__i{name}__" for name in ("pow", "and", "or", "xor", "lshift", "rshift")}
_MOST = 1 << 20


class PositionTracker(TorchFunctionMode):
    """Follows them for as long as it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the tensor is kept: ids stay its own
        self._fractions: dict[int, torch.Tensor] = {}  # random numbers from 0 to 1

    def learn_ones(self, tensor: torch.Tensor) -> None:
        """A tensor that is known to hold ones, whatever its batch."""
        sizes = [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in tensor.shape]
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._known[id(tensor)] = tensor, torch.ones(sizes, dtype=tensor.dtype)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The numbers, where they are known."""
        kept = self._known.get(id(tensor))
        return None if kept is None else kept[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and where all it was given is known, know what it gave."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__bool__" and id(args[0]) in self._known:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return bool(self._known[id(args[0])][1])
        out = func(*args, **kwargs)
        if _writes(func, name, kwargs):
            self._known.clear()  # perhaps one of these, by another name
            self._fractions.clear()
        elif name in _FOLLOWED and isinstance(out, torch.Tensor):
            self._note(func, args, kwargs, out)
        elif name == "rand" and isinstance(out, torch.Tensor):
            self._fractions[id(out)] = out
        elif name in _LESS and id(args[0]) in self._fractions and isinstance(args[1], int | float):
            self._note_comparison(out, args[1])
        return out

    def _note_comparison(self, out: torch.Tensor, limit: float) -> None:
        """No random fraction is below 0, and all are below 1: a layer that is skipped never, or always."""
        if limit <= 0 or limit >= 1:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._known[id(out)] = out, torch.full(tuple(out.shape), limit >= 1)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> None:
        given = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        if any(id(tensor) not in self._known for tensor in tensors) or out.is_floating_point():
            return
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                args, kwargs = tree_map(self._plain, (args, kwargs))
                value = func(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
        except Exception:
            return  # then it is not known
        if value.numel() <= _MOST:
            self._known[id(out)] = out, value

    def _plain(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._known[id(leaf)][1]
        if isinstance(leaf, torch.SymInt):
            return int(leaf.node.hint)  # of the example; positions are alike in every row
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def is_one_sequence(positions: torch.Tensor) -> bool:
    """Whether each row counts up by one: nothing is packed into it."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return bool((positions.diff(dim=-1) == 1).all())


def is_full(mask: torch.Tensor) -> bool:
    """Whether a mask masks nothing."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return bool(mask.bool().all())


def _writes(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """By the names of PyTorch (`add_`, `__iadd__`, `__setitem__`); what is of `torch.ops` says it itself."""
    schema = getattr(func, "_schema", None)
    if "out" in kwargs or kwargs.get("inplace") or (schema is not None and schema.is_mutable):
        return True
    if hasattr(func, "overloads"):  # of which nobody knows yet
        return True
    if name.startswith("__"):
        return name in _IN_PLACE
    return name.endswith("_")

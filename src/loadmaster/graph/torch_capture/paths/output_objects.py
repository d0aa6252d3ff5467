"""Output objects: what a model gives that torch does not take apart, such as a cache of keys and values.

`torch.export` knows tensors, plain values and trees of them. A model of `transformers` gives its cache along
with its loss by default. While the model is exported, each such object is handed over as the tuple of its
tensors; when the graph has run, a copy of the object is filled with the tensors that were computed.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from loadmaster.graph.torch_capture.paths.export_gaps import Unexported
from loadmaster.modules.tensor_trees import find_tensors

_DEPTH = 5  # objects within objects that are looked at


@dataclass(slots=True)
class OutputObjects:
    """The objects among a model's outputs, as they came out of its export."""

    spec: TreeSpec | None = None
    kept: dict[int, Any] = field(default_factory=dict)  # [leaf of the outputs] an object with tensors in it

    def pack(self, out: Any, model: nn.Module) -> Any:
        """The outputs with a tuple of tensors in place of each object; as they are if there is none."""
        leaves, spec = tree_flatten(out)
        self.spec, self.kept = None, {}
        found = {at: leaf for at, leaf in enumerate(leaves) if _is_opaque(leaf)}
        if not found:
            return out
        _require_own(found.values(), model)
        self.spec, self.kept = spec, found
        return tuple(tuple(find_tensors(leaf)) if at in found else leaf for at, leaf in enumerate(leaves))

    def unpack(self, out: Any) -> Any:
        """What the model would give, of what its graph gives."""
        if self.spec is None:
            return out
        leaves, memo = list(out), dict[int, Any]()
        for at, kept in self.kept.items():
            memo |= {id(old): new for old, new in zip(find_tensors(kept), leaves[at], strict=True)}
        made = copy.deepcopy(list(self.kept.values()), memo)
        for old, new in zip(self.kept.values(), made, strict=True):
            _correct_devices(old, new)
        for at, one in zip(self.kept, made, strict=True):
            leaves[at] = one
        return tree_unflatten(leaves, self.spec)


@contextlib.contextmanager
def pack_outputs(model: nn.Module) -> Iterator[OutputObjects]:
    """The model gives packed outputs for a while."""
    objects, before = OutputObjects(), model.__dict__.get("forward")
    right = model.forward

    @functools.wraps(right)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return objects.pack(right(*args, **kwargs), model)

    model.__dict__["forward"] = forward
    try:
        yield objects
    finally:
        del model.__dict__["forward"]
        if before is not None:
            model.__dict__["forward"] = before


def _is_opaque(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor | type | nn.Module) or not hasattr(leaf, "__dict__"):
        return False
    return bool(find_tensors(leaf))


def _require_own(found: Sequence[Any] | Any, model: nn.Module) -> None:
    """Refuse an object that outlives the call, and one whose numbers depend on a free size."""
    held = {id(leaf) for module in model.modules() for leaf in tree_leaves(dict(vars(module)))}
    for leaf in found:
        name = type(leaf).__name__
        if id(leaf) in held:
            raise Unexported(f"the model gives out a {name} that it keeps")
        for one in _iterate_objects(leaf):
            if any(isinstance(value, torch.SymInt) for value in tree_leaves(dict(vars(one)))):
                raise Unexported(f"a number in the {name} that the model gives depends on a free size")


def _correct_devices(old: Any, new: Any) -> None:
    """An object that notes the device of its tensors notes the device that they are on now."""
    for before, after in zip(_iterate_objects(old), _iterate_objects(new), strict=True):
        here = [value.device for value in vars(after).values() if isinstance(value, torch.Tensor)]
        for name, value in vars(before).items():
            if isinstance(value, torch.device) and here:
                setattr(after, name, here[0])


def _iterate_objects(tree: Any, depth: int = _DEPTH) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type | nn.Module):
            yield leaf
            yield from _iterate_objects(dict(vars(leaf)), depth - 1)

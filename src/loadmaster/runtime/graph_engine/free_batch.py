"""Free sizes: one graph for every batch size and sequence length, by an export whose axes are free.

The batch is axis 0 of the first input that has one, and of all inputs as long there; the sequence axis 1 of
the first input of whole numbers (tokens), else of the first with two axes, and of all as long there. A size
of one is another graph: torch takes axes of length one for known.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from loadmaster.graph.export import find_size
from loadmaster.modules.fake_model import FakeModel

_SMALLEST = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call that may be free; None is fixed."""

    batch: int | None = None
    seq: int | None = None

    def __bool__(self) -> bool:
        """Whether any is free."""
        return self.batch is not None or self.seq is not None

    def free_axes(self, leaf: Any) -> list[int]:
        """The axes of an input that are free."""
        if not isinstance(leaf, torch.Tensor):
            return []
        shape = leaf.shape
        return [
            axis
            for axis, size in ((0, self.batch), (1, self.seq))
            if size is not None and len(shape) > axis and shape[axis] == size
        ]

    @property
    def axes(self) -> str:
        """'batch', 'sequence' or 'batch and sequence'."""
        words = [("batch", self.batch), ("sequence", self.seq)]
        return " and ".join(what for what, size in words if size is not None)

    def __str__(self) -> str:
        """'a batch of 4', 'a batch of 4 and a sequence of 12'."""
        words = [("a batch", self.batch), ("a sequence", self.seq)]
        return " and ".join(f"{what} of {size}" for what, size in words if size is not None)


FIXED = Sizes()
Fits = Callable[[Sizes], bool]  # whether a graph with free axes holds for sizes


def find_free_sizes(inputs: Any) -> list[Sizes]:
    """Which sizes may be free, in the order in which graphs are tried."""
    batch, seq = (
        size if size is not None and size >= _SMALLEST else None
        for size in (find_size(inputs, "batch"), find_size(inputs, "seq"))
    )
    found = [Sizes(batch, None), Sizes(batch, seq), Sizes(None, seq)]
    return [one for at, one in enumerate(found) if one and one not in found[:at]]


def make_input_pattern(leaves: list[Any], sizes: Sizes = FIXED) -> tuple[Any, ...]:
    """What of the arguments a graph with such free axes depends on."""
    return tuple(_make_leaf_pattern(leaf, sizes) for leaf in leaves)


def _make_leaf_pattern(leaf: Any, sizes: Sizes) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf)
    shape = list(leaf.shape)
    for axis in sizes.free_axes(leaf):
        shape[axis] = -1 - axis
    return tuple(shape), leaf.dtype, leaf.requires_grad


def make_dynamic_shapes(fake: FakeModel, sizes: Sizes) -> Any:
    """What torch.export is told: which axes are free."""

    def axes(leaf: Any) -> Any:
        return dict.fromkeys(sizes.free_axes(leaf), torch.export.Dim.AUTO) or None

    args, kwargs = tree_map(axes, fake.args), tree_map(axes, fake.kwargs)
    if not kwargs:
        return tuple(args)
    names = list(inspect.signature(fake.model.forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def spell_out_arguments(forward: Callable[..., Any], fake: FakeModel) -> None:
    """Names that a forward takes as `**kwargs` become its own: export has no free axes for those."""
    signature = inspect.signature(forward)
    known = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
    if len(known) == len(signature.parameters):
        return
    names = {one.name for one in known}
    more = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY) for one in fake.kwargs if one not in names]
    vars(forward)["__signature__"] = signature.replace(parameters=[*known, *more])


def make_size_check(exported: torch.export.ExportedProgram, fake: FakeModel, sizes: Sizes) -> Fits | None:
    """Which sizes take the way the export took; None: the model knows one of its sizes.

    A model may ask whether its batch is larger than some number, and go another way: export keeps the answer.
    """
    leaves = tree_leaves((fake.args, fake.kwargs))
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    found: dict[int, list[Any]] = {0: [], 1: []}  # of each axis
    for name, leaf in zip(names, leaves, strict=True):
        for axis in sizes.free_axes(leaf):
            found[axis].append(values[name].shape[axis])
    wanted = [axis for axis, size in ((0, sizes.batch), (1, sizes.seq)) if size is not None]
    every = [size for axis in wanted for size in found[axis]]
    if not all(found[axis] for axis in wanted) or not all(isinstance(one, torch.SymInt) for one in every):
        return None
    symbols = {axis: {size.node.expr for size in found[axis]} for axis in wanted}
    if any(one.is_number for each in symbols.values() for one in each):  # `len(x)` made it one
        return None
    if any(not one.is_symbol for each in symbols.values() for one in each):
        return None
    asked = {guard.expr for size in every for guard in size.node.shape_env.guards}
    limits = exported.range_constraints

    @functools.lru_cache(maxsize=256)
    def fits(now: Sizes) -> bool:
        length = {0: now.batch, 1: now.seq}
        given = {one: length[axis] for axis in wanted for one in symbols[axis]}
        if any(given[one] is None or given[one] != length[axis] for axis in wanted for one in symbols[axis]):
            return False
        for one, size in given.items():
            if one in limits and not limits[one].lower <= size <= limits[one].upper:
                return False
        return all(str(expr.subs(given)) != "False" for expr in asked)  # what is not known is no answer

    return fits

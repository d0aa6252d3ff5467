"""Batch: one graph for every batch size, by an export whose batch axis is free.

The batch is axis 0 of the first input that has one, and of all inputs as long there. A batch of one is
another graph: torch takes axes of length one for known.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from loadmaster.graph.export import find_size
from loadmaster.modules.fake_model import FakeModel

_SMALLEST = 2
Fits = Callable[[int | None], bool]  # whether a graph for any batch holds for one of a size


def find_batch_size(inputs: Any) -> int | None:
    """The size that may be free; None where there is none."""
    size = find_size(inputs, "batch")
    return size if size is not None and size >= _SMALLEST else None


def make_input_pattern(leaves: list[Any], batch: int | None) -> tuple[Any, ...]:
    """What of the arguments a graph with a free batch depends on."""
    return tuple(_make_leaf_pattern(leaf, batch) for leaf in leaves)


def _make_leaf_pattern(leaf: Any, batch: int | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf)
    shape = tuple(leaf.shape)
    if _is_batched(leaf, batch):
        shape = (-1, *shape[1:])
    return shape, leaf.dtype, leaf.requires_grad


def _is_batched(leaf: Any, batch: int | None) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and batch is not None and leaf.shape[0] == batch


def make_dynamic_shapes(fake: FakeModel) -> Any:
    """What torch.export is told: axis 0 of batched inputs is free."""
    batch = find_batch_size((fake.args, fake.kwargs))

    def axes(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if _is_batched(leaf, batch) else None

    args, kwargs = tree_map(axes, fake.args), tree_map(axes, fake.kwargs)
    if not kwargs:
        return tuple(args)
    names = list(inspect.signature(fake.model.forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def make_size_check(exported: torch.export.ExportedProgram, fake: FakeModel) -> Fits | None:
    """Which sizes of the batch take the way the export took; None: the model knows its one size.

    A model may ask whether its batch is larger than some number, and go another way: export keeps the answer.
    """
    leaves = tree_leaves((fake.args, fake.kwargs))
    batch = find_batch_size((fake.args, fake.kwargs))
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    batched = [name for name, leaf in zip(names, leaves, strict=True) if _is_batched(leaf, batch)]
    sizes = [values[name].shape[0] for name in batched]
    if not sizes or not all(isinstance(size, torch.SymInt) for size in sizes):
        return None
    symbols = {size.node.expr for size in sizes}
    if any(one.is_number for one in symbols):  # `len(x)` made it one
        return None
    asked = {guard.expr for size in sizes for guard in size.node.shape_env.guards}
    ranges = [exported.range_constraints[one] for one in symbols if one in exported.range_constraints]

    @functools.lru_cache(maxsize=256)
    def fits(batch: int | None) -> bool:
        if not all(one.lower <= batch <= one.upper for one in ranges):
            return False
        given = dict.fromkeys(symbols, batch)
        return all(str(expr.subs(given)) != "False" for expr in asked)  # what is not known is no answer

    return fits

"""Ranges: the sizes of batch and sequence for which a captured graph is the model's.

A plan names ops; it can be run on another batch as long as the model runs the same ops on it. So the model is
captured at both ends of the range, too, and weights and forward ops are compared by name, kind and order. The
batch is axis 0 of the first input and of all others as long there, the sequence axis 1 of the first input of
whole numbers (tokens), else of the first with two axes, and of all others as long there.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from loadmaster.core.errors import GraphError, InputError, UnknownNameError
from loadmaster.core.graph import Graph, Phase
from loadmaster.graph.torch_capture.record.accumulation import MARK

AXES = {"batch": 0, "seq": 1}
Ranges = dict[str, tuple[int, int]]
_MOST = 2**20


def check_ranges(ranges: Mapping[str, Any] | None, inputs: Any) -> Ranges:
    """The ranges asked for, each with the example's own size inside."""
    found: Ranges = {}
    for name, given in (ranges or {}).items():
        if name not in AXES:
            raise UnknownNameError("range", str(name), AXES)
        low, high = _check_range(name, given)
        own = find_size(inputs, name)
        if own is None:
            raise InputError(f"ranges has {name}, but no input has an axis {AXES[name]}; leave it out")
        if not low <= own <= high:
            raise InputError(
                f"the example has {name} {own}, not in {low} to {high}; give a range with it inside"
            )
        found[name] = (low, high)
    return found


def _check_range(name: str, given: Any) -> tuple[int, int]:
    whole = isinstance(given, tuple | list) and len(given) == 2
    if not whole or not all(isinstance(end, int) and not isinstance(end, bool) for end in given):
        raise InputError(f"ranges[{name!r}] is {given!r}; give two whole numbers, such as (1, 64)")
    low, high = given
    if not 1 <= low <= high <= _MOST:
        raise InputError(f"ranges[{name!r}] is {given!r}; give 1 <= low <= high <= {_MOST}")
    return low, high


def find_size(inputs: Any, name: str) -> int | None:
    """The example's own batch or sequence length."""
    axis = AXES[name]
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > axis]
    whole = [tensor for tensor in tensors if not tensor.dtype.is_floating_point]
    chosen = (whole or tensors) if name == "seq" else tensors
    return int(chosen[0].shape[axis]) if chosen else None


def resize_inputs(inputs: Any, sizes: Mapping[str, int]) -> Any:
    """The example with other sizes: its rows over and over, or the first of them."""

    def cut(leaf: Any) -> Any:
        for name, size in sizes.items():
            axis = AXES[name]
            fits = isinstance(leaf, torch.Tensor) and leaf.dim() > axis
            if fits and leaf.shape[axis] == own[name] != size:
                rows = torch.arange(size, device=leaf.device) % own[name]
                leaf = leaf.detach().index_select(axis, rows).requires_grad_(leaf.requires_grad)
        return leaf

    own = {name: find_size(inputs, name) for name in sizes}
    return tree_map(cut, inputs)


def require_same_ops(graph: Graph, other: Graph, sizes: Mapping[str, int]) -> None:
    """Refuse a range at whose end the model runs other ops."""
    ours, theirs = _list_forward_ops(graph), _list_forward_ops(other)
    if ours == theirs:
        return
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    at = min(len(ours), len(theirs)) if at is None else at
    here, there = (_describe_op(ops, at) for ops in (ours, theirs))
    raise GraphError(
        f"with {describe_sizes(sizes)} the model runs other ops: {there} where the example has {here};"
        " narrow the range"
    )


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """'batch 1 and seq 16'."""
    return " and ".join(f"{name} {size}" for name, size in sizes.items())


def _list_forward_ops(graph: Graph) -> list[tuple[str, str]]:
    """Names and kinds of weights and forward ops."""
    wanted = (Phase.PARAM, Phase.FORWARD)
    rows = zip(graph.op_name, graph.op_kind, graph.phase.tolist(), strict=True)
    return [(name, kind) for name, kind, phase in rows if phase in wanted and MARK not in name]


def _describe_op(ops: list[tuple[str, str]], at: int) -> str:
    return f"{ops[at][0]!r} ({ops[at][1]})" if at < len(ops) else "no more"

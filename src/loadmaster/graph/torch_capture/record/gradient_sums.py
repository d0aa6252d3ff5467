"""Sums: whose gradient autograd adds up, when it adds two outside of every formula.

A tensor that several ops read gets a gradient from each; autograd adds them before it runs the node of the
tensor's own maker, or before it hands them to a weight. That is where a placed model adds them, too: at the
tensor's home, not at the reader whose gradient came last.
"""

from typing import Any

import torch

_ADD = torch.ops.aten.add.Tensor


def find_sum_target(func: Any, before: list[torch.Tensor], node: Any) -> Any:
    """The node whose gradient a sum is, made while `node` ends; None: nobody can tell."""
    if node is None or func is not _ADD or len(before) != 2 or before[0].shape != before[1].shape:
        return None
    shape = tuple(before[0].shape)
    found = {
        id(one): one for one, at in node.next_functions if one is not None and _grad_shape(one, at) == shape
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _grad_shape(node: Any, at: int) -> tuple[int, ...] | None:
    """The shape of the gradient that a node takes at a place."""
    if hasattr(node, "variable"):
        return tuple(node.variable.shape)
    given = getattr(node, "_input_metadata", ())
    return tuple(given[at].shape) if at < len(given) else None

"""Batches: the rows of a batch dealt to micro-batches.

The batch is axis 0 of the first tensor that has one, and of all tensors as long there; anything else is given
to every micro-batch as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from loadmaster.core.errors import InputError
from loadmaster.graph.export import find_size


def count_rows(inputs: Any) -> int:
    """Rows of a batch."""
    found = find_size(inputs, "batch")
    if found is None:
        raise InputError("the batch has no tensor with rows, so it cannot be split into micro-batches")
    return found


def split_batch(inputs: Any, rows: Sequence[int]) -> list[Any]:
    """The inputs of each micro-batch; tensors of the batch's length are cut along axis 0."""
    total, parts, begin = sum(rows), [], 0
    for count in rows:
        end = begin + count

        def cut(leaf: Any, begin: int = begin, end: int = end) -> Any:
            is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == total
            return leaf[begin:end] if is_batch else leaf

        parts.append(tree_map(cut, inputs))
        begin = end
    return parts

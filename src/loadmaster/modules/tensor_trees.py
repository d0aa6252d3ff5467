"""The tensors inside of what is passed around: arguments, outputs, optimizer state."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def list_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def find_tensors(tree: Any, *, depth: int = 4) -> list[torch.Tensor]:
    """The tensors of a tree, also those in attributes of objects that torch does not take apart."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += find_tensors(dict(vars(leaf)), depth=depth - 1)
    return found

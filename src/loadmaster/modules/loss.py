"""Which number a training step minimises, given what the model returns."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from loadmaster.core.errors import GraphError
from loadmaster.modules.tensor_trees import find_tensors


def compute_loss(out: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The scalar to minimise: the user's function, the output's own loss, else the mean of all outputs.

    A lone scalar is the loss only if it trains all that the outputs train: beside them it may as well be a
    term of the loss (a router's balance, a codebook's commitment), and a plan for it alone is too small.
    """
    if loss is not None:
        found = loss(out)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shown = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise GraphError(f"loss gives {shown}; it must give one number")
        return found
    own = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return own
    floats = [tensor for tensor in find_tensors(out) if tensor.requires_grad]
    if not floats:
        raise GraphError("no output of the model depends on a trained weight; capture it with train=False")
    for leaf in floats:
        if leaf.numel() == 1 and _trains_all(leaf, [other for other in floats if other is not leaf]):
            return leaf
    total = floats[0].mean()
    for leaf in floats[1:]:
        total = total + leaf.mean()
    return total


def _trains_all(scalar: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether every leaf that the others depend on is one that the scalar depends on."""
    made = {other.grad_fn for other in others if other.grad_fn is not None}
    bare = {id(other) for other in others if other.grad_fn is None}  # a weight that is given as it is
    seen = _find_reachable_nodes({scalar.grad_fn}, until=None if bare else made)
    if made <= seen and not bare:  # mostly so, and found at once: the loss is made of the logits
        return True
    own = _find_leaves(seen) if scalar.grad_fn is not None else {id(scalar)}
    return _find_leaves(_find_reachable_nodes(made)) | bare <= own


def _find_leaves(nodes: set[Any]) -> set[int]:
    """The leaves among what nodes of autograd's graph depend on."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _find_reachable_nodes(roots: set[Any], until: set[Any] | None = None) -> set[Any]:
    """The nodes that roots depend on, with them, nearest first; no further than where all `until` are."""
    seen = roots - {None}
    waiting, missing = deque(seen), (until or set()) - seen
    while waiting and (missing or until is None):
        for node, _ in waiting.popleft().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                missing.discard(node)
                waiting.append(node)
    return seen

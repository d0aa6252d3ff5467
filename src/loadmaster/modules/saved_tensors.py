"""What a hook of saved tensors may keep: never the tensor itself where an op made it.

An op such as tanh saves its own output. A hook that keeps that very tensor closes a circle through autograd's
graph, which the garbage collector does not see: output, op, saved tensor, output. Nothing of it is ever freed
unless backward runs.
"""

import torch


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written; tensors of inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def drop_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers without the op that made them; autograd puts that back when it unpacks."""
    return tensor if tensor.grad_fn is None else tensor.detach()

"""Outputs: the outputs of a placed model may be on another device than its inputs.

A loop that kept its labels where the inputs are would then be told by torch that two devices do not match,
which helps nobody. So such an output is a tensor that, in its first op, says what to do; what comes of that
op is an ordinary tensor. A single number (the model's own loss) meets no labels and is ordinary from the
start.
"""

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from loadmaster.core.errors import RunError

_MISMATCHES = ("same device", "expected device")  # torch's words


class Output(torch.Tensor):
    """A tensor that stands elsewhere than the inputs did."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The op on ordinary tensors; a mismatch of devices is explained."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        except RuntimeError as problem:
            if not any(words in str(problem) for words in _MISMATCHES):
                raise
            devices = _find_devices((args, kwargs))
            raise RunError(
                f"the model's output is on {_join_devices(_find_devices((args, kwargs), Output))},"
                f" what it meets is on {_join_devices(devices - _find_devices((args, kwargs), Output))};"
                " move the labels with labels.to(output.device), or give lm.place(..., output_device='cpu')"
            ) from problem

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """An ordinary tensor's copy."""
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)


def mark_outputs(out: Any, given: Any) -> Any:
    """What a model gives; tensors on a device on which no input was explain mismatches."""
    here = _find_devices(given)
    if not here or _find_devices(out) <= here:
        return out
    return pytree.tree_map_only(
        torch.Tensor,
        lambda one: one if one.device in here or one.dim() == 0 else one.as_subclass(Output),
        out,
    )


def _find_devices(tree: Any, kind: type[torch.Tensor] = torch.Tensor) -> set[torch.device]:
    return {leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kind)}


def _join_devices(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))

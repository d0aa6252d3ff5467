"""Rounding: when two tensors are the same numbers, and how far apart they are otherwise."""

from typing import Any

import torch

RELATIVE = 1e-5
_OF_LARGEST = 1e-7  # a difference this small beside the largest element is rounding


def is_close(wanted: Any, given: Any) -> bool:
    """Equal up to rounding; what is not a number is equal to itself."""
    if wanted is None or given is None:
        return wanted is given
    given = given.detach().to(wanted.device)
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return torch.equal(wanted, given)
    room = RELATIVE * wanted.abs() + _OF_LARGEST * wanted.abs().nan_to_num(posinf=0.0).max()
    close = ((wanted - given).abs() <= room) | (wanted == given) | (wanted.isnan() & given.isnan())
    return bool(close.all())


def max_difference(wanted: Any, given: Any) -> float:
    """The largest difference; infinite where only one is there."""
    if wanted is None or given is None:
        return 0.0 if wanted is given else float("inf")
    if not wanted.numel():
        return 0.0
    return float((wanted.double() - given.detach().to(wanted.device).double()).abs().max())

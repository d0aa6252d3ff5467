"""Rounding: when two tensors are the same numbers, and how far apart they are otherwise.

Element by element (`is_close`) where the same kernel ran on the same inputs. By norm (`find_distant`) where
whole passes are compared, whose sums were taken in another order: single elements may then differ by more.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
_ITEM_TYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RELATIVE = TOLERANCE[torch.float32]
_OF_LARGEST = 1e-7  # a difference this small beside the largest element is rounding
_SMALL = 0.1  # a tensor is also held to this share of the tolerance of all tensors together


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number on the tensor's device, another one if a bit is another, as good as always; nothing waits."""
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_ITEM_TYPE[plain.element_size()]).sum(dtype=torch.int64)


def is_close(wanted: Any, given: Any) -> bool:
    """Equal up to rounding; what is not a number is equal to itself."""
    if wanted is None or given is None:
        return wanted is given
    given = given.detach().to(wanted.device)
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return torch.equal(wanted, given)
    room = _RELATIVE * wanted.abs() + _OF_LARGEST * wanted.abs().nan_to_num(posinf=0.0).max()
    close = ((wanted - given).abs() <= room) | (wanted == given) | (wanted.isnan() & given.isnan())
    return bool(close.all())


def max_difference(wanted: Any, given: Any) -> float:
    """The largest difference; infinite where only one is there."""
    if wanted is None or given is None:
        return 0.0 if wanted is given else float("inf")
    if not wanted.numel():
        return 0.0
    return float((wanted.double() - given.detach().to(wanted.device).double()).abs().max())


class Distance(NamedTuple):
    """How far apart two tensors of the same key are."""

    key: int
    given: float  # norms
    wanted: float
    apart: float  # norm of the difference


def find_distant(
    wanted: Mapping[int, torch.Tensor], given: Mapping[int, torch.Tensor], tolerance: float
) -> list[Distance]:
    """The tensors that differ by more than a share of their norm, by key; one that is not there is zero."""
    rows = []
    for key in sorted(given.keys() | wanted.keys()):
        like = given.get(key, wanted.get(key))
        assert like is not None
        mine = given.get(key, torch.zeros_like(like)).double()
        theirs = wanted.get(key, torch.zeros_like(like)).double()
        apart = (mine - theirs).norm().item()
        if math.isfinite(apart) or bool(torch.isfinite(mine).all() != torch.isfinite(theirs).all()):
            rows.append(Distance(key, mine.norm().item(), theirs.norm().item(), apart))
    total = math.sqrt(sum(row.wanted**2 for row in rows if math.isfinite(row.wanted)))
    return [row for row in rows if not row.apart <= tolerance * (row.wanted + _SMALL * total)]

"""Full masks: padding masks that mask nothing.

A model of `transformers` looks whether a mask masks anything, and attends without one if not: by another
kernel, which rounds otherwise. So whether a mask is full belongs to what a graph is made for.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def name_arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument by the name that forward gives it; `names` are those of its parameters, in order."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def find_full_masks(named: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that are masks of ones; none where the library that looks at them is not in use."""
    if "transformers.masking_utils" not in sys.modules:
        return frozenset()
    return frozenset(name for name, value in named.items() if "mask" in name and _is_full(value))


def _is_full(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in _WHOLE or value.dim() != 2:
        return False
    known = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
    return known and bool((value == 1).all())

"""Memory that two things share although training must tell them apart: refused by both names.

A parameter has a place of its own in the host store. Two that share memory (tied by `.data`) would part
there; and a model, or a trained parameter, that two trials were given would be trained by both.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.shards.model.blocks import Chain


def check_shared_memory(trial: str, chain: Chain) -> None:
    """Refuse parameters and buffers of one model that share memory without being one tensor.

    Parameters that are all frozen may: nothing parts them.
    """
    tensors = [
        *zip(chain.parameter_name, chain.parameters, strict=True),
        *zip(chain.buffer_name, chain.buffers, strict=True),
    ]
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    sparse = next((row for row in tensors if row[1].layout != torch.strided), None)
    if sparse is not None:
        raise InputError(
            f"trial {trial!r}: {sparse[0]!r} of its model is a tensor in {sparse[1].layout}, which training"
            " by shards cannot carry; make it dense"
        )
    for row in tensors:
        if row[1].numel():
            by_storage.setdefault(row[1].untyped_storage()._cdata, []).append(row)
    for rows in by_storage.values():
        for at, (second, other) in enumerate(rows):
            first = next((name for name, each in rows[:at] if _would_part(each, other)), None)
            if first is not None:
                raise InputError(
                    f"trial {trial!r}: {first!r} and {second!r} of its model share memory without being one"
                    " tensor (tied by .data?), which training by shards would part; tie them as one"
                    " parameter (model.a.weight = model.b.weight), or give each its own (clone())"
                )


def _would_part(left: torch.Tensor, right: torch.Tensor) -> bool:
    frozen = all(isinstance(each, nn.Parameter) and not each.requires_grad for each in (left, right))
    return not frozen and _overlap(left, right)


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    (a, b), (c, d) = _byte_range(left), _byte_range(right)
    if a >= d or c >= b:
        return False
    if left.is_contiguous() or right.is_contiguous() or left.dtype != right.dtype:
        return True
    marks = torch.zeros(max(b, d) // left.element_size(), dtype=torch.bool)  # columns of one matrix may not
    marks.as_strided(left.shape, left.stride(), left.storage_offset()).fill_(True)
    return bool(marks.as_strided(right.shape, right.stride(), right.storage_offset()).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its storage."""
    width, start = tensor.element_size(), tensor.storage_offset()
    last = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * width, (last + 1) * width


@dataclass
class ParameterOwners:
    """Which trial a model and its trained parameters belong to."""

    _of: dict[int, tuple[Any, str]] = field(default_factory=dict)  # [id] (a weak reference, its trial)

    def claim(self, trial: str, chain: Chain) -> None:
        """Note what a trial trains; refuse what another was given, too."""
        things: list[tuple[str, nn.Module | nn.Parameter]] = [("its model", chain.model)]
        named = zip(chain.parameter_name, chain.parameters, strict=True)
        things += [(f"parameter {name!r}", p) for name, p in named if p.requires_grad]
        for what, thing in things:
            weak, owner = self._of.get(id(thing), (None, trial))
            if weak is not None and weak() is thing and owner != trial:
                raise InputError(
                    f"trials {owner!r} and {trial!r} were given the same object: {what} of {trial!r} is that"
                    f" of {owner!r}, and both would train it; make a new one in each build"
                )
            self._of[id(thing)] = weakref.ref(thing), trial

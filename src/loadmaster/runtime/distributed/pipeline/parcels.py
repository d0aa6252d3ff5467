"""Parcels: the tensors of one transfer as one piece of memory, and the layout that both ends agree on.

A transfer is one message, however many tensors cross a cut. Its layout (shapes, types, which want a gradient,
which are missing) is the same for every micro-batch of a shape, so it is sent once, before the first one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from loadmaster.core.errors import RunError

_ALIGN = 64
_TYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class ParcelEntry(msgspec.Struct, frozen=True):
    """One tensor of a parcel; `dtype` '' is one that is missing (no gradient came)."""

    dtype: str
    shape: tuple[int, ...]
    wants_grad: bool
    begin: int

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * _TYPES[self.dtype].itemsize if self.dtype else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a parcel lies."""

    entries: tuple[ParcelEntry, ...]
    num_bytes: int

    def encode(self) -> bytes:
        """As it is sent."""
        return msgspec.json.encode(self.entries)

    @classmethod
    def decode(cls, data: bytes) -> "Layout":
        """What was sent."""
        entries = msgspec.json.decode(data, type=tuple[ParcelEntry, ...])
        return cls(entries, max((one.begin + one.num_bytes for one in entries), default=0))


def make_layout(tensors: Sequence[torch.Tensor | None], wants_grad: Sequence[bool]) -> Layout:
    """The layout of a parcel of these tensors."""
    entries, at = [], 0
    for tensor, wants in zip(tensors, wants_grad, strict=True):
        if tensor is None:
            entries.append(ParcelEntry("", (), False, at))
            continue
        name = str(tensor.dtype).removeprefix("torch.")
        entries.append(ParcelEntry(name, tuple(tensor.shape), wants, at))
        at += -(-entries[-1].num_bytes // _ALIGN) * _ALIGN
    end = entries[-1].begin + entries[-1].num_bytes if entries else 0
    return Layout(tuple(entries), end)


def pack(tensors: Sequence[torch.Tensor | None], layout: Layout, where: torch.device) -> torch.Tensor:
    """The parcel as bytes on a device; a lone contiguous tensor is its own parcel."""
    present = [
        (t.detach(), e) for t, e in zip(tensors, layout.entries, strict=True) if t is not None and e.dtype
    ]
    lacking = [e for t, e in zip(tensors, layout.entries, strict=True) if (t is None) != (not e.dtype)]
    for tensor, entry in present:
        if tuple(tensor.shape) != entry.shape or str(tensor.dtype).removeprefix("torch.") != entry.dtype:
            lacking.append(entry)
    if lacking:
        raise RunError(
            "a micro-batch gives other tensors than the one before it, so the next stage cannot receive them:"
            f" {lacking[0].shape} {lacking[0].dtype or 'nothing'} was expected; the model's"
            " shapes must not depend on values"
        )
    if len(present) == 1 and present[0][0].is_contiguous() and present[0][0].device == where:
        return present[0][0].reshape(-1).view(torch.uint8)
    data = torch.empty(layout.num_bytes, dtype=torch.uint8, device=where)
    for tensor, entry in present:
        _slot(data, entry).copy_(tensor)
    return data


def unpack(data: torch.Tensor, layout: Layout) -> list[torch.Tensor | None]:
    """The tensors of a parcel, in its own memory."""
    return [_slot(data, entry) if entry.dtype else None for entry in layout.entries]


def _slot(data: torch.Tensor, entry: ParcelEntry) -> torch.Tensor:
    part = data[entry.begin : entry.begin + entry.num_bytes]
    return part.view(_TYPES[entry.dtype]).reshape(entry.shape)

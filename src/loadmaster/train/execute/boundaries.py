"""What shards hand on, kept from forward to backward in one region of the device.

The framework's own tensors would lie among those that live for a moment only, and leave holes between them
that nothing large fits into. A copy on the device costs a thousandth of a unit.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from loadmaster.shards.device.arena import BookingStack, align_bytes
from loadmaster.train.execute.device_slots import DeviceSlots
from loadmaster.train.execute.units import ForwardRecord


class Boundaries:
    """A stack in a region that trials share; what does not fit is left where it is, and booked."""

    def __init__(self, device_slots: DeviceSlots, name: str) -> None:
        self._device_slots, self._beside = device_slots, BookingStack(device_slots.device.arena, name)
        self._ends: list[int] = []

    def keep(self, shard: int, values: list[Any], *, stays: bool) -> list[Any]:
        """The same values, standing in the region."""
        self._ends.append(self._ends[-1] if self._ends else 0)
        region, beside = self._device_slots.boundaries, 0

        def copy_to_region(leaf: Any) -> Any:
            nonlocal beside
            if not isinstance(leaf, torch.Tensor):
                return leaf
            size, at = leaf.numel() * leaf.element_size(), self._ends[-1]
            fits = region is not None and at + size <= region.memory.numel()
            if region is None or not fits or not _is_dense(leaf):
                beside += size
                return leaf
            flat = region.memory[at : at + size].view(leaf.dtype)
            self._ends[-1] = at + align_bytes(size)
            return flat.as_strided(leaf.shape, leaf.stride()).copy_(leaf)

        with torch.no_grad():
            found = [tree_map(copy_to_region, value) for value in values]
        self._beside.push(beside)
        return found

    def recall(self, shard: int, records: list[ForwardRecord]) -> None:
        """They stand where they are read."""

    def leave(self, kind: str, shard: int, records: list[ForwardRecord]) -> None:
        """After a backward the newest is not wanted any more."""
        if kind != "B":
            return
        if self._ends:
            self._ends.pop()
        self._beside.pop()

    def clear(self) -> None:
        """Nothing is."""
        self._ends.clear()
        self._beside.clear()


def _is_dense(leaf: torch.Tensor) -> bool:
    """Whether its elements lie side by side, each once, in whatever order."""
    return bool(torch.empty_like(leaf, device="meta").stride() == leaf.stride())

"""The simulated device with a meter on it: what tensors really take counts, whatever was booked.

As on a GPU, whoever makes one tensor too many gets an out-of-memory error where it is made.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from loadmaster.core.units import format_bytes
from loadmaster.modules.live_storages import LiveBytes
from loadmaster.shards.device.cpu_device import CpuDevice


class _Meter(LiveBytes):
    """Every tensor made while units run, beside the arena's regions, under the cap."""

    def __init__(self, device: "MeteredDevice") -> None:
        super().__init__()
        self._device = device
        self.most_bytes = 0

    def note(self, storage: Any) -> None:
        """Count one; or say that there is no room for it."""
        arena, size = self._device.arena, int(storage.nbytes())
        total = arena.region_bytes + self.now_bytes + size
        if total > arena.cap_bytes:
            raise torch.OutOfMemoryError(
                f"{self._device.name} out of memory: tried to allocate {format_bytes(size)} with"
                f" {format_bytes(total - size)} of {format_bytes(arena.cap_bytes)} in use"
            )
        super().note(storage)
        self.most_bytes = max(self.most_bytes, total)


class MeteredDevice(CpuDevice):
    """A `CpuDevice` whose cap is on real bytes."""

    def __init__(self, name: str = "metered", *, cap_bytes: int, **more: Any) -> None:
        super().__init__(name, cap_bytes=cap_bytes, **more)
        self.rehearses = True
        self.meter = _Meter(self)

    def computing(self) -> AbstractContextManager[Any]:
        """What is made here is metered."""
        return self.meter

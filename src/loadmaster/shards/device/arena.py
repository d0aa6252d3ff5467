"""A device's memory for training under a byte cap: regions that stay, and what else is held.

Weights in flight, pinned weights, optimizer rings and boundaries are regions, taken when a trial enters and
given back when it leaves; no step takes or frees one. Activations come from the framework; they are booked
here (`hold`), so that the cap counts everything and raises before it would be passed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes

ALIGN = 256


def align_bytes(num_bytes: int) -> int:
    """The next multiple of the alignment every tensor starts on."""
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(eq=False)
class Region:
    """A piece of the arena."""

    name: str
    memory: torch.Tensor  # uint8, flat


@dataclass(eq=False)
class Arena:
    """Bytes of one device under one cap."""

    device: str
    cap_bytes: int
    allocate: Callable[[int], torch.Tensor]
    used_bytes: int = 0
    peak_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)
    region_bytes: int = 0  # of regions that were taken, whatever is booked

    def region(self, name: str, num_bytes: int) -> Region:
        """Take a region; it counts until it is given back."""
        size = align_bytes(max(num_bytes, 1))
        self._book(name, size)
        try:
            region = Region(name, self.allocate(size))
        except torch.OutOfMemoryError as error:
            self._release(name, size)
            raise DeviceMemoryError(f"{self.device}: no room for {format_bytes(size)} of {name}") from error
        self.region_bytes += size
        return region

    def give_back(self, region: Region) -> None:
        """Return a region."""
        self._release(region.name, region.memory.numel())
        self.region_bytes -= region.memory.numel()
        region.memory = region.memory[:0].clone()

    @contextmanager
    def hold(self, name: str, num_bytes: int) -> Iterator[None]:
        """Book bytes the framework allocates by itself, for as long as they live."""
        self._book(name, num_bytes)
        try:
            yield
        finally:
            self._release(name, num_bytes)

    def mark(self) -> dict[str, int]:
        """What is held now, for `rewind`."""
        return dict(self.held)

    def rewind(self, mark: dict[str, int]) -> None:
        """Forget whatever was booked since the mark: its owners are gone."""
        self.held, self.used_bytes = dict(mark), sum(mark.values())

    def book(self, name: str, num_bytes: int) -> None:
        """Book bytes until `release`."""
        self._book(name, num_bytes)

    def release(self, name: str, num_bytes: int) -> None:
        """Undo `book`."""
        self._release(name, num_bytes)

    def _book(self, name: str, num_bytes: int) -> None:
        if self.used_bytes + num_bytes > self.cap_bytes:
            standing = ", ".join(f"{key} {format_bytes(size)}" for key, size in sorted(self.held.items()))
            raise DeviceMemoryError(
                f"{self.device}: {name} needs {format_bytes(num_bytes)}, but"
                f" {format_bytes(self.cap_bytes - self.used_bytes)} of {format_bytes(self.cap_bytes)} is free"
                f" ({standing or 'nothing stands there'}); raise memory_cap, cut into smaller blocks or"
                " take a smaller batch"
            )
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.held[name] = self.held.get(name, 0) + num_bytes

    def _release(self, name: str, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        self.held[name] = self.held.get(name, 0) - num_bytes
        if self.held[name] == 0:
            del self.held[name]


class BookingStack:
    """Bytes booked one after another and given back in the other order."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._arena, self._name = arena, name
        self._sizes: list[int] = []

    def push(self, num_bytes: int) -> None:
        """Book more."""
        self._arena.book(self._name, num_bytes)
        self._sizes.append(num_bytes)

    def pop(self) -> None:
        """Give the newest back, if any is left."""
        if self._sizes:
            self._arena.release(self._name, self._sizes.pop())

    def clear(self) -> None:
        """Give everything back."""
        while self._sizes:
            self.pop()

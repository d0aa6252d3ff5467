"""Runs of a piece's parameters as they pass through a ring place: where each lies there, and what is copied.

    slab  [ compute copies | masters | first state | second state | gradients ]
    ring  [ masters | first state | second state | compute copies ]               of the chunk's parameters

The ring keeps the slab's order, so neighbours stay neighbours and go in one copy, the few bytes between them
too. All of this is the same every step and is made once: issuing it must not take longer than it saves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from loadmaster.core.errors import RunError
from loadmaster.core.units import format_bytes
from loadmaster.shards.device.arena import align_bytes
from loadmaster.shards.device.streams import Copy
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.shards.plan.layout import Packer, Place

MASTER, COPY = "", "="  # names of the two that are no optimizer state
_SMALL = 512  # times smaller than the largest: such parameters ride along, for little room


def ring_size(sizes: Iterable[int]) -> int:
    """Bytes of a ring place for parameters of these: the largest, and all that is small beside it."""
    found = list(sizes)
    largest = max(found, default=0)
    return largest + sum(size for size in found if size * _SMALL <= largest)


def chunk_places(host: HostPiece, positions: Sequence[int]) -> tuple[list[dict[str, Place]], int]:
    """Where masters (''), state and compute copies ('=') of parameters lie in a ring place, and its bytes."""
    packer = Packer()
    found: list[dict[str, Place]] = [{} for _ in positions]
    for places, position in zip(found, positions, strict=True):
        places[MASTER] = packer.place(host.master[position].shape, host.master[position].dtype)
    for key in sorted({key for position in positions for key in host.state[position]}):
        for places, position in zip(found, positions, strict=True):
            if key in host.state[position]:
                view = host.state[position][key]
                places[key] = packer.place(view.shape, view.dtype)
    for places, position in zip(found, positions, strict=True):
        if host.separate[position]:
            places[COPY] = packer.place(host.master[position].shape, host.compute[position].dtype)
    return found, packer.end_bytes


def divide_positions(host: HostPiece, positions: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Runs of parameters that fit a ring place."""
    found: list[list[int]] = []
    for position in positions:
        if found and chunk_places(host, [*found[-1], position])[1] <= limit_bytes:
            found[-1].append(position)
            continue
        size = chunk_places(host, [position])[1]
        if size > limit_bytes:
            raise RunError(
                f"{host.piece.name}: one parameter needs {format_bytes(size)}"
                f" of a ring of {format_bytes(limit_bytes)}"
            )
        found.append([position])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some parameters of a piece, and their way to a ring place and back."""

    positions: tuple[int, ...]
    places: tuple[dict[str, Place], ...]
    layout: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]  # equal where places are
    up: tuple[tuple[int, torch.Tensor], ...]  # byte of the ring, bytes of the slab
    down: tuple[tuple[int, torch.Tensor], ...]
    up_bytes: int  # of the tensors alone
    down_bytes: int

    def brought(self, ring: torch.Tensor) -> list[Copy]:
        """Copies to a ring place."""
        return [Copy(ring[at : at + flat.numel()], flat) for at, flat in self.up]

    def list_copies_home(self, ring: torch.Tensor) -> list[Copy]:
        """Copies home."""
        return [Copy(flat, ring[at : at + flat.numel()]) for at, flat in self.down]


def make_chunks(host: HostPiece, positions: Sequence[int], limit_bytes: int) -> list[Chunk]:
    """A piece's parameters in chunks; state that the optimizer has not made yet is not brought."""
    return [_make_chunk(host, run) for run in divide_positions(host, positions, limit_bytes)]


def _make_chunk(host: HostPiece, positions: Sequence[int]) -> Chunk:
    places, _ = chunk_places(host, positions)
    up, down = [], []
    for at, position in enumerate(positions):
        homes = {MASTER: host.master[position], **host.state[position]}
        down += [(places[at][key], home) for key, home in homes.items()]
        started = homes if host.started[position] else {MASTER: homes[MASTER]}
        up += [(places[at][key], home) for key, home in started.items()]
        if COPY in places[at]:
            down.append((places[at][COPY], host.compute[position]))
    return Chunk(
        tuple(positions),
        tuple(places),
        tuple((key, p.offset_bytes, p.shape, p.dtype) for each in places for key, p in each.items()),
        _merge_ranges(host.slab, up),
        _merge_ranges(host.slab, down),
        sum(place.num_bytes for place, _ in up),
        sum(place.num_bytes for place, _ in down),
    )


def _merge_ranges(
    slab: torch.Tensor, pairs: Sequence[tuple[Place, torch.Tensor]]
) -> tuple[tuple[int, torch.Tensor], ...]:
    """As few flat ranges as hold them all: those that follow each other alike in ring and slab are one."""
    runs: list[list[int]] = []  # byte of the slab, byte of the ring, bytes
    for place, home in sorted(pairs, key=lambda pair: pair[1].data_ptr()):
        first = home.data_ptr() - slab.data_ptr()
        assert 0 <= first <= slab.numel() - place.num_bytes, "a piece's tensors lie in its slab"
        if runs:
            start, ring, size = runs[-1]
            if first == align_bytes(start + size) and place.offset_bytes == align_bytes(ring + size):
                gap = first - (start + size)
                if place.offset_bytes - (ring + size) == gap:
                    runs[-1][2] = size + gap + place.num_bytes
                    continue
        runs.append([first, place.offset_bytes, place.num_bytes])
    return tuple((ring, slab[start : start + size]) for start, ring, size in runs)

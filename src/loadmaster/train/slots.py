"""Places on a device for pieces on their way: what is loaded next, and what leaves for it.

The order of units is known, so a piece that must leave is the one used again last. A piece much larger than
the others has a place of its own.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from loadmaster.train.arena import Region
from loadmaster.train.layout import Layout, Piece
from loadmaster.train.streams import Device, Event


@dataclass(eq=False)
class Slot:
    """One place."""

    region: Region
    reserved: int | None = None  # the piece it is kept for
    piece: int | None = None  # the piece in it, None = nothing of use
    ready: Event | None = None  # its bytes have arrived
    free: Event | None = None  # its last reader is done

    @property
    def memory(self) -> torch.Tensor:
        """Flat bytes."""
        return self.region.memory


def unit_order(num_shards: int) -> list[tuple[str, int]]:
    """F0 ... L ... B0."""
    last = num_shards - 1
    forward = [("F", shard) for shard in range(last)]
    return [*forward, ("L", last), *(("B", shard) for shard in reversed(range(last)))]


@dataclass(eq=False)
class Slots:
    """The places of one trial on one device, over its cyclic order of units."""

    layout: Layout
    streamed: frozenset[int]
    slots: list[Slot]
    depth: int  # units ahead that may be loaded
    order: list[tuple[str, int]] = field(default_factory=list)
    uses: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Where in the order each piece is used."""
        self.order = unit_order(self.layout.num_shards)
        for position, (_, shard) in enumerate(self.order):
            for piece in self.layout.pieces_of[shard]:
                if piece in self.streamed:
                    self.uses.setdefault(piece, []).append(position)

    def holding(self, piece: int) -> Slot | None:
        """The place a piece stands in."""
        return next((slot for slot in self.slots if slot.piece == piece), None)

    def next_use(self, piece: int, position: int) -> int:
        """The first use at or after a position, counted over the end of a step."""
        uses = self.uses[piece]
        index = bisect_right(uses, position - 1)
        return uses[index] if index < len(uses) else uses[0] + len(self.order)

    def wanted(self, position: int) -> list[int]:
        """Pieces of this unit and the next ones, soonest first, that stand nowhere yet."""
        found: list[int] = []
        for ahead in range(self.depth + 1):
            _, shard = self.order[(position + ahead) % len(self.order)]
            for piece in self.layout.pieces_of[shard]:
                if piece in self.streamed and piece not in found and self.holding(piece) is None:
                    found.append(piece)
        return found

    def place_for(self, piece: int, num_bytes: int, position: int) -> Slot | None:
        """An empty place, else that of the piece used last of all, if later than this one."""
        own = next((slot for slot in self.slots if slot.reserved == piece), None)
        if own is not None:
            return own
        fitting = [s for s in self.slots if s.reserved is None and s.memory.numel() >= num_bytes]
        empty = next((slot for slot in fitting if slot.piece is None), None)
        if empty is not None:
            return empty
        mine = self.next_use(piece, position)
        latest = max(fitting, key=lambda slot: self.next_use(slot.piece, position), default=None)  # type: ignore[arg-type]
        if latest is None or self.next_use(latest.piece, position) <= max(mine, position):  # type: ignore[arg-type]
            return None
        return latest


def make_slots(
    device: Device,
    name: str,
    layout: Layout,
    sizes: Sequence[int],
    streamed: frozenset[int],
    *,
    num_slots: int,
) -> list[Slot]:
    """Equal places for the usual pieces, one each for those half as large again as the usual."""
    if not streamed:
        return []
    ordered = sorted(sizes[piece] for piece in streamed)
    usual = ordered[len(ordered) // 2]
    large = [piece for piece in sorted(streamed) if sizes[piece] > 1.5 * usual]
    rest = [sizes[piece] for piece in streamed if piece not in large]
    slots = [Slot(device.arena.region(f"{name} slot", sizes[piece]), reserved=piece) for piece in large]
    count = min(num_slots, len(rest))
    slots.extend(Slot(device.arena.region(f"{name} slot", max(rest))) for _ in range(count))
    return slots


def least_slots(layout: Layout, streamed: frozenset[int]) -> int:
    """Places one unit needs at once."""
    pieces: list[Piece] = list(layout.pieces)
    return max(
        (sum(p.index in streamed for p in pieces if shard in p.shards) for shard in range(layout.num_shards)),
        default=0,
    )

"""The order of a trial's units, and which of its pieces stream through places on the device.

The order is known and comes again every step, so the next use of every piece is known too.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadmaster.shards.model.profile import Profile
from loadmaster.shards.plan.layout import Layout, Piece
from loadmaster.shards.spec.trial import Trial

_LARGE = 1.5  # times the usual piece: it has a place of its own


def unit_order(num_shards: int, num_forwards: int = 1) -> list[tuple[str, int]]:
    """F0 ... L ... B0; with several forward passes F0 ... L F0 ... L ... B0."""
    last = num_shards - 1
    forward = [*(("F", shard) for shard in range(last)), ("L", last)]
    return [*forward * num_forwards, *(("B", shard) for shard in reversed(range(last)))]


def list_units(layout: Layout, num_forwards: int = 1) -> list[tuple[str, int]]:
    """The units of a step of a chain; by call, of one micro-batch, whose forward and backward follow."""
    if layout.calls is None:
        return unit_order(layout.num_shards, num_forwards)
    return order_calls(layout.calls)


def order_calls(forward: Sequence[int], backward: Sequence[int] | None = None) -> list[tuple[str, int]]:
    """Calls as they come, and back in reverse."""
    again = forward if backward is None else backward
    return [*(("F", shard) for shard in forward), *(("B", shard) for shard in reversed(again))]


def count_forwards(trial: Trial, facts: Profile) -> int:
    """Forward passes of a step: one for all micro-batches, or one for each where random numbers are drawn.

    A plain loop draws for a whole micro-batch before it draws for the next one. By call, each micro-batch
    goes forward and backward by itself.
    """
    if facts.calls is not None:
        return trial.accumulate
    return trial.accumulate if facts.draws and not trial.counted_rng else 1


@dataclass(eq=False)
class UnitOrder:
    """The cyclic order of one trial's units, and where in it each streamed piece is used."""

    layout: Layout
    streamed: frozenset[int]
    num_forwards: int = 1
    units: list[tuple[str, int]] = field(default_factory=list)
    uses: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Where in the order each piece is used."""
        self.units = self.units or list_units(self.layout, self.num_forwards)
        for position in range(len(self.units)):
            for piece in self.pieces(position):
                if piece in self.streamed:
                    self.uses.setdefault(piece, []).append(position)

    def __len__(self) -> int:
        """Units of a step."""
        return len(self.units)

    def next_use(self, piece: int, position: int) -> int:
        """The first use at or after a position, counted over the end of a step; far off if there is none."""
        uses = self.uses.get(piece)
        if uses is None:  # its calls were left out
            return position + 2 * len(self.units)
        index = bisect_left(uses, position)
        return uses[index] if index < len(uses) else uses[0] + len(self.units)

    def pieces(self, position: int) -> list[int]:
        """Streamed pieces of a unit."""
        _, shard = self.units[position]
        rest = () if self.layout.rest is None else (self.layout.rest,)
        return [piece for piece in (*self.layout.pieces_of[shard], *rest) if piece in self.streamed]


def split_sizes(sizes: Sequence[int], streamed: frozenset[int]) -> tuple[list[int], list[int]]:
    """Streamed pieces much larger than the usual one, largest first; and the others."""
    if not streamed:
        return [], []
    ordered = sorted(sizes[piece] for piece in streamed)
    usual = ordered[len(ordered) // 2]
    large = [piece for piece in sorted(streamed) if sizes[piece] > _LARGE * usual]
    rest = [piece for piece in sorted(streamed) if sizes[piece] <= _LARGE * usual]
    return sorted(large, key=lambda piece: (-sizes[piece], piece)), rest


def least_slots(layout: Layout, streamed: frozenset[int]) -> int:
    """Places one unit needs at once."""
    pieces: list[Piece] = list(layout.pieces)
    return max(
        (sum(p.index in streamed for p in pieces if shard in p.shards) for shard in range(layout.num_shards)),
        default=0,
    )

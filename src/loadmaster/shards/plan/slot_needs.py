"""How many device slots and rings a trial needs, and of what size."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadmaster.shards.device.arena import align_bytes
from loadmaster.shards.model.profile import Profile
from loadmaster.shards.plan.layout import Layout
from loadmaster.shards.plan.unit_order import split_sizes


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one trial, or several in turn, need of places."""

    large: tuple[int, ...] = ()  # bytes, largest first
    usual_bytes: int = 0
    num_usual: int = 0
    ring_bytes: int = 0
    num_rings: int = 0
    flight_bytes: int = 0  # gradients on their way down, or to an update that runs aside
    boundary_bytes: int = 0  # what shards hand on, kept from forward to backward

    def join(self, other: "MemoryNeed") -> "MemoryNeed":
        """Enough for either."""
        longest = max(len(self.large), len(other.large))
        mine, theirs = ((*each.large, *[0] * (longest - len(each.large))) for each in (self, other))
        return MemoryNeed(
            tuple(max(pair) for pair in zip(mine, theirs, strict=True)),
            *(
                max(getattr(self, name), getattr(other, name))
                for name in (
                    "usual_bytes",
                    "num_usual",
                    "ring_bytes",
                    "num_rings",
                    "flight_bytes",
                    "boundary_bytes",
                )
            ),
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots alone."""
        return sum(align_bytes(size) for size in self.large) + self.num_usual * align_bytes(self.usual_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions, and of gradients on their way."""
        rings = self.num_rings * align_bytes(self.ring_bytes) if self.ring_bytes else 0
        return self.slot_bytes + rings + align_bytes(self.boundary_bytes) + self.flight_bytes


def compute_memory_need(
    sizes: Sequence[int],
    streamed: frozenset[int],
    *,
    num_slots: int,
    ring_bytes: int,
    num_rings: int,
    flight_bytes: int,
    boundary_bytes: int = 0,
) -> MemoryNeed:
    """Equal places for the usual pieces, one each for those half as large again as the usual."""
    large, rest = split_sizes(sizes, streamed)
    return MemoryNeed(
        tuple(sizes[piece] for piece in large),
        max((sizes[piece] for piece in rest), default=0),
        min(num_slots, len(rest)),
        ring_bytes,
        num_rings if ring_bytes else 0,
        flight_bytes,
        boundary_bytes,
    )


def boundary_bytes(facts: Profile, layout: Layout, *, micro_batches: int) -> int:
    """Bytes of all boundaries of a step; by call, autograd keeps them."""
    if layout.calls is not None:
        return 0
    ends = [high - 1 for _, high in layout.cuts[:-1]]
    return micro_batches * sum(align_bytes(facts.output_bytes[end]) for end in ends)


SHARED = ("slots", "rings", "belts", "boundaries", "gradients")  # regions of no trial in particular

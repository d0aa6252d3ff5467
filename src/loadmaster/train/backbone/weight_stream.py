"""A stream of weights that never change: places on a device, filled ahead over a known order of units.

A piece much larger than the others has a place of its own and stays in it. Of the others, the one used again
last makes room; nothing is written back.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loadmaster.core.errors import RunError
from loadmaster.shards.device.arena import Region
from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.plan.host_store import HostPiece

_LARGE = 1.5  # times the usual piece
_NEVER = 1 << 60


@dataclass(eq=False)
class _Place:
    region: Region
    own: int | None = None  # the piece it is kept for
    piece: int | None = None
    ready: Event | None = None
    free: Event | None = None


def large_pieces(sizes: Mapping[int, int]) -> list[int]:
    """Pieces that get a place of their own."""
    ordered = sorted(sizes.values())
    usual = ordered[len(ordered) // 2] if ordered else 0
    return [piece for piece, size in sizes.items() if size > _LARGE * usual]


def stream_bytes(sizes: Mapping[int, int], num_places: int) -> int:
    """Device memory of a stream."""
    large = large_pieces(sizes)
    rest = [size for piece, size in sizes.items() if piece not in large]
    return sum(sizes[piece] for piece in large) + min(num_places, len(rest)) * max(rest, default=0)


class WeightStream:
    """Streams pieces through places of one device; `order` names the pieces of each unit of a step."""

    def __init__(
        self,
        device: Device,
        hosts: Mapping[int, HostPiece],
        order: Sequence[Sequence[int]],
        *,
        num_places: int,
        name: str,
    ) -> None:
        self._device, self._hosts, self._name = device, hosts, name
        self._order = [[piece for piece in unit if piece in hosts] for unit in order]
        self._uses: dict[int, list[int]] = {piece: [] for piece in hosts}
        for position, unit in enumerate(self._order):
            for piece in unit:
                self._uses[piece].append(position)
        sizes = {piece: host.up.numel() for piece, host in hosts.items()}
        large = large_pieces(sizes)
        rest = [size for piece, size in sizes.items() if piece not in large]
        usual = sorted(
            (piece for piece in hosts if piece not in large), key=lambda piece: self._uses[piece][:1]
        )
        self._turn = {piece: turn for turn, piece in enumerate(usual)}
        self._places: list[_Place] = []
        self.loads = self.up_bytes = 0
        wanted: list[tuple[int, int | None]] = [(sizes[piece], piece) for piece in large]
        wanted += [(max(rest), None)] * min(num_places, len(rest))
        try:
            for size, own in wanted:
                self._places.append(_Place(device.arena.region("frozen weights", size), own))
        except BaseException:
            self.close()
            raise

    def take(self, position: int) -> dict[int, list[torch.Tensor]]:
        """The pieces of a unit, as units read them; compute waits for them, the next ones are sent for."""
        found = {}
        for piece in self._order[position]:
            place = self._find_place(piece) or self._load(piece, position)
            if place is None:
                raise RunError(
                    f"{self._device.name}: no place for {self._hosts[piece].piece.name} of the weight stream"
                )
            found[piece] = place
        self._ahead(position)
        self._device.hold(*(place.ready for place in found.values()))
        return {
            piece: [spot.view(place.region.memory) for spot in self._hosts[piece].up_places]
            for piece, place in found.items()
        }

    def finish_unit(self, position: int) -> None:
        """What has been told to compute is all that reads the unit's pieces."""
        reached = self._device.mark()
        for piece in self._order[position]:
            place = self._find_place(piece)
            if place is not None:
                place.free = reached
        self._ahead(position + 1)

    def close(self) -> None:
        """Give the places back, once nothing copies into them."""
        for place in self._places:
            if place.ready is not None:
                place.ready.wait()
            self._device.arena.give_back(place.region)
        self._places.clear()

    def _ahead(self, position: int) -> None:
        """Send for what comes next, until a place would have to be taken from what comes sooner."""
        for step in range(len(self._order)):
            for piece in self._order[(position + step) % len(self._order)]:
                if self._find_place(piece) is None and self._load(piece, position) is None:
                    return

    def _find_place(self, piece: int) -> _Place | None:
        return next((place for place in self._places if place.piece == piece), None)

    def _next_use(self, piece: int, position: int) -> int:
        """The first use at or after a position, counted over the end of a step."""
        uses, length = self._uses[piece], len(self._order)
        turn, position = divmod(position, length)
        index = bisect_left(uses, position)
        return turn * length + (uses[index] if index < len(uses) else uses[0] + length)

    def _load(self, piece: int, position: int) -> _Place | None:
        place = self._choose_place(piece, position)
        if place is None:
            return None
        host = self._hosts[piece]
        copy = Copy(place.region.memory[: host.up.numel()], host.up)
        label = f"{self._name} load {host.piece.name}"
        place.ready = self._device.up([copy], after=[place.free], label=label)
        place.piece = piece
        self.loads += 1
        self.up_bytes += host.up.numel()
        return place

    def _choose_place(self, piece: int, position: int) -> _Place | None:
        """Its own place; else its turn's, so that it stands at the same address at every step; else any."""
        own = next((place for place in self._places if place.own == piece), None)
        if own is not None:
            return own
        common = [place for place in self._places if place.own is None]
        if not common:
            return None
        usual = common[self._turn[piece] % len(common)]
        latest = max(common, key=lambda place: self._free_until(place, position))
        wanted = self._next_use(piece, position)
        for place in (usual, latest):
            if self._free_until(place, position) > wanted:
                return place
        return None

    def _free_until(self, place: _Place, position: int) -> int:
        """When what stands in a place is used again; an empty one stays free."""
        return _NEVER if place.piece is None else self._next_use(place.piece, position)

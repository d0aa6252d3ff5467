"""What the trials on a device share: slots for pieces, and rings for optimizer state.

The trial whose turn it is, and the one that follows, say in what order pieces are used; what leaves for a
piece is what is used again last. The pieces of all others may leave at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes
from loadmaster.shards.device.arena import Region
from loadmaster.shards.device.streams import Device, Event
from loadmaster.shards.plan.layout import Place
from loadmaster.shards.plan.slot_needs import MemoryNeed
from loadmaster.shards.plan.unit_order import UnitOrder

_FAR = 1 << 60


class Owner(Protocol):
    """A trial's weights, as slots see them."""

    order: UnitOrder
    position: int  # the unit that runs, or len(order) at the end of a step
    rank: dict[int, int]  # [large piece] which of the large slots is its own


@dataclass(eq=False)
class DeviceSlot:
    """Room for one piece."""

    region: Region
    rank: int | None = None  # of a large slot
    owner: Owner | None = None
    piece: int | None = None  # the piece in it, None = nothing of use
    ready: Event | None = None  # its bytes have arrived
    free: Event | None = None  # its last reader is done
    num_readers: int = 0  # that have it now: nothing else may come in
    views: dict[Any, list[torch.Tensor]] = field(default_factory=dict)  # [layout of a piece]

    @property
    def memory(self) -> torch.Tensor:
        """Flat bytes."""
        return self.region.memory

    def get_views(self, layout: Any, places: Sequence[Place]) -> list[torch.Tensor]:
        """A piece's parameters as they lie here; made once for all pieces that are laid out alike."""
        if layout not in self.views:
            self.views[layout] = [place.view(self.memory) for place in places]
        return self.views[layout]

    def clear(self) -> None:
        """What stands here is of no more use."""
        self.owner = self.piece = None
        self.num_readers = 0


@dataclass(eq=False)
class Ring:
    """One place for optimizer state that passes through."""

    region: Region
    free: Event | None = None
    views: dict[Any, list[dict[str, torch.Tensor]]] = field(default_factory=dict)  # [layout of a chunk]

    def get_views(self, layout: Any, places: Sequence[dict[str, Place]]) -> list[dict[str, torch.Tensor]]:
        """The tensors of a chunk as they lie here; made once for all pieces that are laid out alike."""
        if layout not in self.views:
            memory = self.region.memory
            self.views[layout] = [{key: p.view(memory) for key, p in each.items()} for each in places]
        return self.views[layout]


@dataclass(eq=False)
class DeviceSlots:
    """Slots and rings of one device."""

    device: Device
    need: MemoryNeed = field(default_factory=MemoryNeed)
    slots: list[DeviceSlot] = field(default_factory=list)
    rings: list[Ring] = field(default_factory=list)
    boundaries: Region | None = None
    running: Owner | None = None
    following: Owner | None = None
    _users: dict[int, MemoryNeed] = field(default_factory=dict)  # [id of an executor]
    _turn: int = 0
    _flying: list[tuple[Event, list[torch.Tensor], int]] = field(default_factory=list)

    def join(self, user: Any, need: MemoryNeed) -> None:
        """Make room for one more trial; slots grow where it needs larger ones."""
        self._resize(self.need.join(need))
        self._users[id(user)] = need

    def leave(self, user: Any, owner: Owner | None) -> None:
        """A trial is gone; what only it needed is given back."""
        self._users.pop(id(user), None)
        for slot in self.slots:
            if slot.owner is owner:
                slot.clear()
        self.running = None if self.running is owner else self.running
        self.following = None if self.following is owner else self.following
        wanted = MemoryNeed()
        for need in self._users.values():
            wanted = wanted.join(need)
        self._resize(wanted)

    def set_turn(self, owner: Owner, follower: Owner | None) -> None:
        """Whose step it is, and whose is next."""
        self.running, self.following = owner, follower

    def distance(self, owner: Owner | None, piece: int | None) -> int:
        """Units until a piece is used."""
        if owner is None or piece is None or self.running is None:
            return _FAR
        ahead = len(self.running.order) - self.running.position
        if owner is self.running:
            away = owner.order.next_use(piece, owner.position) - owner.position
            return away if away < ahead or self.following is None else away + len(self.following.order)
        if owner is self.following:
            return ahead + owner.order.next_use(piece, 0)
        return _FAR

    def find_slot(self, owner: Owner, piece: int) -> DeviceSlot | None:
        """The slot a piece stands in."""
        return next((slot for slot in self.slots if slot.piece == piece and slot.owner is owner), None)

    def choose_slot(self, owner: Owner, piece: int, *, now: bool = False) -> DeviceSlot | None:
        """An empty slot, else that of the piece used last of all, if later than this one or it is due `now`.

        What is being read stays.
        """
        rank = owner.rank.get(piece)
        fitting = [slot for slot in self.slots if slot.rank == rank and not slot.num_readers]
        empty = next((slot for slot in fitting if slot.piece is None), None)
        if empty is not None or not fitting:
            return empty
        latest = max(fitting, key=lambda slot: self.distance(slot.owner, slot.piece))
        later = now or self.distance(latest.owner, latest.piece) > self.distance(owner, piece)
        return latest if later else None

    def list_wanted(self, depth: int) -> list[tuple[Owner, int]]:
        """Pieces of the unit that runs and the next ones, soonest first, that stand nowhere yet."""
        running = self.running
        if running is None:
            return []
        found: list[tuple[Owner, int]] = []
        for at in range(running.position, running.position + depth + 1):
            over = at >= len(running.order)
            owner = self.following if over and self.following is not None else running
            for piece in owner.order.pieces((at - len(running.order) if over else at) % len(owner.order)):
                if (owner, piece) not in found and self.find_slot(owner, piece) is None:
                    found.append((owner, piece))
        return found

    def ring(self) -> Ring:
        """The next ring place in turn."""
        self._turn += 1
        return self.rings[self._turn % len(self.rings)]

    def hold_in_flight(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """Keep tensors until an event; where too much is under way, wait for the oldest."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.release_landed()
        self._flying.append((event, tensors, size))
        while len(self._flying) > 1 and sum(each[2] for each in self._flying) > self.need.flight_bytes:
            self._flying.pop(0)[0].wait()
            self.release_landed()  # what came later may have landed meanwhile

    def release_landed(self) -> None:
        """Let go of what has arrived."""
        self._flying = [each for each in self._flying if not each[0].done()]

    def settle(self) -> None:
        """Wait for all that flies."""
        while self._flying:
            self._flying.pop(0)[0].wait()

    def _resize(self, need: MemoryNeed) -> None:
        """Give all regions back and take new ones, if any must change; nothing where they would not fit."""
        arena = self.device.arena
        free = arena.cap_bytes - arena.used_bytes + self.need.num_bytes
        if need.num_bytes > free:
            raise DeviceMemoryError(
                f"{self.device.name}: slots for shards need {format_bytes(need.num_bytes)}, but"
                f" {format_bytes(free)} of {format_bytes(arena.cap_bytes)} is free; raise memory_cap, or cut"
                " into smaller blocks"
            )
        if need == self.need:
            return
        before = self.need
        self._give_back()
        try:
            self._take(need)
        except DeviceMemoryError:  # the allocator has less than was counted: as it was, for who stands there
            self._give_back()
            self._take(before)
            raise

    def _take(self, need: MemoryNeed) -> None:
        arena, self.need = self.device.arena, need
        arena.book("gradients", need.flight_bytes)
        for rank, size in enumerate(need.large):
            if size:
                self.slots.append(DeviceSlot(arena.region("slots", size), rank=rank))
        for _ in range(need.num_usual):
            self.slots.append(DeviceSlot(arena.region("slots", need.usual_bytes)))
        for _ in range(need.num_rings):
            self.rings.append(Ring(arena.region("rings", need.ring_bytes)))
        if need.boundary_bytes:
            self.boundaries = arena.region("boundaries", need.boundary_bytes)

    def _give_back(self) -> None:
        for slot in self.slots:
            for event in (slot.ready, slot.free):
                if event is not None:
                    event.wait()
            slot.views.clear()
            self.device.arena.give_back(slot.region)
        for ring in self.rings:
            if ring.free is not None:
                ring.free.wait()
            ring.views.clear()
            self.device.arena.give_back(ring.region)
        if self.boundaries is not None:
            with self.device.computing():
                self.device.mark().wait()
            self.device.arena.give_back(self.boundaries)
        self.device.arena.release("gradients", self.need.flight_bytes)
        self.slots, self.rings, self.boundaries = [], [], None


def get_device_slots(device: Device) -> DeviceSlots:
    """The slots of a device, made when first asked for."""
    if device.slots is None:
        device.slots = DeviceSlots(device)
    found: DeviceSlots = device.slots
    return found

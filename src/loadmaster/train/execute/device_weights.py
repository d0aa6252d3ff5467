"""A trial's weights on a device: pinned pieces that stay, others that come before a unit needs them."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.plan.shard_plan import unit_bytes
from loadmaster.shards.plan.unit_order import UnitOrder, count_forwards, split_sizes
from loadmaster.train.execute.device_slots import DeviceSlot, DeviceSlots
from loadmaster.train.execute.device_updates import PinnedPiece
from loadmaster.train.execute.execution_config import (
    ExecutionConfig,
    TransferLedger,
    is_host_event,
    wait_briefly,
)
from loadmaster.train.execute.trial_state import TrialState


class NoSlotError(RunError):
    """Every place is being read."""


class DeviceWeights:
    """The pieces of one trial, as units of one device read them."""

    def __init__(
        self,
        state: TrialState,
        device: Device,
        device_slots: DeviceSlots,
        config: ExecutionConfig,
        ledger: TransferLedger,
    ) -> None:
        self._state, self._device, self._device_slots = state, device, device_slots
        self._config, self._ledger = config, ledger
        streamed = find_streamed(config)
        self.order = UnitOrder(state.layout, streamed, count_forwards(state.trial, state.facts))
        self.position = 0
        self._layouts = [
            tuple((place.offset_bytes, place.shape, place.dtype) for place in host.up_places)
            for host in state.pieces
        ]
        large, _ = split_sizes([host.up.numel() for host in state.pieces], streamed)
        self.rank = {piece: rank for rank, piece in enumerate(large)}
        self.ready: dict[int, Event] = {}  # the host copy of a piece is whole
        self.pinned: dict[int, PinnedPiece] = {}
        for host in state.pieces:
            if config.placement[host.piece.index] == "pinned":
                name = f"{state.trial.name} pinned"
                self.pinned[host.piece.index] = PinnedPiece(host, device, ledger, name=name)

    @contextmanager
    def lend(self, shard: int) -> Iterator[dict[int, torch.Tensor]]:
        """The parameters of a shard for one unit, loading what is missing; then look ahead."""
        self._device_slots.release_landed()
        leaves, used = self._get_leaves(shard)
        self.prefetch()
        yield leaves
        self.free(used)
        self.position += 1

    @contextmanager
    def lend_to_evaluate(self, shard: int) -> Iterator[dict[int, torch.Tensor]]:
        """The same as in a forward pass: what this shard follows is used again last."""
        self.position = shard
        leaves, used = self._get_leaves(shard)
        yield leaves
        self.free(used)

    def unit_bytes(self, shard: int, kind: str) -> int:
        """Device memory a unit takes beside weights and boundaries."""
        state = self._state
        return unit_bytes(state.facts, state.layout, state.sizes, self._config.placement, shard, kind)

    def free(self, used: list[DeviceSlot]) -> None:
        """What has been told to compute is all that reads these slots."""
        if not used:
            return
        done = self._device.mark()
        for slot in used:
            slot.free = done
            slot.num_readers = max(0, slot.num_readers - 1)

    def _get_leaves(self, shard: int) -> tuple[dict[int, torch.Tensor], list[DeviceSlot]]:
        """The parameters of a shard as leaves on the device, and the slots they stand in."""
        pieces = self._state.layout.pieces_of[shard]
        views, used = self.get_views(pieces)
        found: dict[int, torch.Tensor] = {}
        for piece in pieces:
            host = self._state.pieces[piece]
            for position, number in enumerate(host.piece.parameters):
                found[number] = views[number].detach().requires_grad_(host.trainable[position])
        return found, used

    def get_views(self, pieces: Iterable[int]) -> tuple[dict[int, torch.Tensor], list[DeviceSlot]]:
        """Weights of some pieces by parameter, once compute may read them, and the slots they stand in."""
        found: dict[int, torch.Tensor] = {}
        used: list[DeviceSlot] = []
        for piece in pieces:
            host = self._state.pieces[piece]
            if piece in self.pinned:
                views = self.pinned[piece].compute_views()
            else:
                try:
                    slot = self._await_slot(piece)
                except NoSlotError:
                    self.free(used)
                    raise
                used.append(slot)
                slot.num_readers += 1
                views = slot.get_views(self._layouts[piece], host.up_places)
            found.update(zip(host.piece.parameters, views, strict=True))
        return found, used

    def find_slot(self, piece: int) -> DeviceSlot | None:
        """The slot a piece stands in."""
        return self._device_slots.find_slot(self, piece)

    def is_soon(self, piece: int) -> bool:
        """Whether a piece is used so soon that it may as well stay."""
        return self._device_slots.distance(self, piece) <= self._config.depth

    def prefetch(self) -> None:
        """Load what the next units need and can have by now, the following trial's too."""
        for owner, piece in self._device_slots.list_wanted(self._config.depth):
            weights: Any = owner
            if weights.awaits_host(piece):
                continue
            if weights.load(piece) is None:
                return

    def awaits_host(self, piece: int) -> bool:
        """Whether the host is still to update a piece."""
        pending = self.ready.get(piece)
        return pending is not None and is_host_event(pending) and not pending.done()

    def copy_weight(self, piece: int, position: int) -> torch.Tensor:
        """One weight of a piece as units read it, in memory of its own beside the slots."""
        host = self._state.pieces[piece]
        if piece in self.pinned:
            return self.pinned[piece].compute_views()[position].clone()
        self._await_update(piece)
        source = host.up_places[position].view(host.up)
        made = torch.empty_like(source, device=self._device.torch_device)
        name = self._state.chain.parameter_name[host.piece.parameters[position]]
        label = f"{self._state.trial.name} load {name}"
        after = [self._device.mark(), self.ready.get(piece)]
        self._device.hold(self._device.up([Copy(made, source)], after=after, label=label))
        self._ledger.up_bytes += source.nbytes
        self._ledger.loads += 1
        return made

    def load(self, piece: int, *, now: bool = False) -> DeviceSlot | None:
        """Bring a piece to a place, if one is to be had; one that is wanted `now` need not wait its turn."""
        slot = self._device_slots.choose_slot(self, piece, now=now)
        if slot is None:
            return None
        host = self._state.pieces[piece]
        label = f"{self._state.trial.name} load {host.piece.name}"
        copy = Copy(slot.memory[: host.up.numel()], host.up)
        slot.ready = self._device.up([copy], after=[slot.free, self.ready.get(piece)], label=label)
        slot.owner, slot.piece = self, piece
        self._ledger.up_bytes += host.up.numel()
        self._ledger.loads += 1
        return slot

    def close(self) -> None:
        """Give pinned pieces' memory back."""
        for piece in self.pinned.values():
            piece.close()

    def _await_slot(self, piece: int) -> DeviceSlot:
        """The slot that holds a piece, once compute may read it."""
        slot = self.find_slot(piece)
        if slot is None:
            self._await_update(piece)
            slot = self.find_slot(piece) or self.load(piece, now=True)
            if slot is None:
                name = self._state.pieces[piece].piece.name
                raise NoSlotError(
                    f"{self._device.name}: no slot for piece {piece} ({name}): all are being read; num_slots"
                    " is too small"
                )
        self._device.hold(slot.ready)
        return slot

    def _await_update(self, piece: int) -> None:
        """Wait for the host's update of a piece; meanwhile load what else is ready."""
        pending = self.ready.get(piece)
        if pending is None or not is_host_event(pending):
            return
        began = time.perf_counter()
        while not pending.done():
            self.prefetch()
            wait_briefly(pending)
        pending.wait()
        self._ledger.waited_s += time.perf_counter() - began


def find_streamed(config: ExecutionConfig) -> frozenset[int]:
    """Pieces that come and go."""
    return frozenset(piece for piece, where in enumerate(config.placement) if where != "pinned")

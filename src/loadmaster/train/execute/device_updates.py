"""Updates on the device: of pieces that stay there, and of pieces whose state streams through a ring.

    for chunk in piece:   H2D master, state -> ring place;  COMP step;  D2H master, state, copy -> slab

A chunk is whole parameters. The compute copy is also written into the slot the weights stand in, so a piece
used again at the turn of a step need not be loaded.
"""

from collections.abc import Mapping, Sequence

import torch

from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.model.optimizer_state import Hyper
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.shards.plan.layout import Packer
from loadmaster.shards.plan.ring_chunks import COPY, MASTER, Chunk, make_chunks
from loadmaster.train.execute.device_slots import DeviceSlot, DeviceSlots
from loadmaster.train.execute.execution_config import TransferLedger
from loadmaster.train.execute.optimizer_step import UpdateEntry, apply_step
from loadmaster.train.execute.trial_state import TrialState


class StreamedUpdate:
    """Optimizer steps on the device of pieces whose state lives on the host."""

    def __init__(
        self,
        state: TrialState,
        device: Device,
        ledger: TransferLedger,
        device_slots: DeviceSlots,
        *,
        num_bytes: int,
    ) -> None:
        self._state, self._device, self._ledger, self._device_slots = state, device, ledger, device_slots
        self._limit_bytes = num_bytes
        self._chunks: dict[tuple[int, tuple[int, ...], bool], list[Chunk]] = {}

    def update(
        self,
        host: HostPiece,
        groups: Sequence[int],
        grads: Mapping[int, torch.Tensor],
        hyper: Hyper,
        slot: DeviceSlot | None,
        *,
        after: Event | None,
    ) -> Event:
        """Step a piece; the event says when the host copy is whole."""
        landed = after
        computed = self._device.mark()
        label = f"{self._state.trial.name} state {host.piece.name}"
        for chunk in self._chunks_of(host, sorted(grads)):
            ring = self._device_slots.ring()
            memory, views = ring.region.memory, ring.get_views(chunk.layout, chunk.places)
            self._ledger.up_bytes += chunk.up_bytes
            copies = chunk.brought(memory)
            # The newest load waits for a unit to free its place; state goes before it, and after the others.
            free = [ring.free, after, self._device.latest("up", back=1)]
            brought = self._device.up(copies, after=free, label=label, lane=1)
            with self._device.aside(computed, brought):
                entries = [
                    UpdateEntry(
                        host,
                        p,
                        groups[p],
                        v[MASTER],
                        grads[p].to(v[MASTER].dtype),
                        {k: v[k] for k in host.state[p]},
                    )
                    for p, v in zip(chunk.positions, views, strict=True)
                ]
                apply_step(self._state.optimizer, entries, hyper)
                self._copy_out(host, chunk.positions, views, slot)
            self._ledger.down_bytes += chunk.down_bytes
            stepped = [self._device.mark(aside=True), self._device.latest("down")]
            landed = ring.free = self._device.down(
                chunk.list_copies_home(memory), after=stepped, label=label, lane=1
            )
        assert landed is not None
        return landed

    def _chunks_of(self, host: HostPiece, positions: Sequence[int]) -> list[Chunk]:
        """Made once for the first step, which brings no state, and once for all others."""
        whole = all(host.started[position] for position in positions)
        key = (host.piece.index, tuple(positions), whole)
        if key not in self._chunks or not whole:
            self._chunks[key] = make_chunks(host, positions, self._limit_bytes)
        return self._chunks[key]

    @staticmethod
    def _copy_out(
        host: HostPiece,
        positions: Sequence[int],
        views: list[dict[str, torch.Tensor]],
        slot: DeviceSlot | None,
    ) -> None:
        """The new weights as units read them: for the host, and where they stand on the device."""
        for position, view in zip(positions, views, strict=True):
            if COPY in view:
                view[COPY].copy_(view[MASTER])
            if slot is not None:
                host.up_places[position].view(slot.memory).copy_(view.get(COPY, view[MASTER]))


class PinnedPiece:
    """A piece that stays on the device with its optimizer state; home only when asked."""

    def __init__(self, host: HostPiece, device: Device, ledger: TransferLedger, *, name: str) -> None:
        self.host, self._device, self._ledger = host, device, ledger
        packer = Packer()
        self._master = [packer.place(view.shape, view.dtype) for view in host.master]
        self._state = [
            {key: packer.place(view.shape, view.dtype) for key, view in states.items()}
            for states in host.state
        ]
        self._region = device.arena.region(name, packer.end_bytes)
        self._dirty = False
        memory = self._region.memory
        self.master = [place.view(memory) for place in self._master]
        self.state = [{key: place.view(memory) for key, place in each.items()} for each in self._state]
        copies = [Copy(view, master) for view, master in zip(self.master, host.master, strict=True)]
        for position, states in enumerate(self.state):
            if host.started[position]:
                copies.extend(Copy(view, host.state[position][key]) for key, view in states.items())
        ledger.up_bytes += sum(tree_bytes(copy.source) for copy in copies)
        ledger.loads += 1
        with device.computing():
            device.hold(device.up(copies, after=[device.mark()], label=f"pin {host.piece.name}"))

    def compute_views(self) -> list[torch.Tensor]:
        """The parameters as units read them; narrow ones are cast now and live for one unit."""
        return [
            view.to(copy.dtype) if apart else view
            for view, copy, apart in zip(self.master, self.host.compute, self.host.separate, strict=True)
        ]

    def update(
        self,
        template: torch.optim.Optimizer,
        groups: Sequence[int],
        grads: Mapping[int, torch.Tensor],
        hyper: Hyper,
    ) -> None:
        """Step the piece where it stands."""
        entries = [
            UpdateEntry(
                self.host, p, groups[p], self.master[p], grads[p].to(self.master[p].dtype), self.state[p]
            )
            for p in sorted(grads)
        ]
        apply_step(template, entries, hyper)
        self._dirty = True

    def write_back(self) -> None:
        """Bring master, state and compute copy home."""
        if not self._dirty:
            return
        copies = [Copy(master, view) for view, master in zip(self.master, self.host.master, strict=True)]
        for position, states in enumerate(self.state):
            copies.extend(Copy(self.host.state[position][key], view) for key, view in states.items())
        self._ledger.down_bytes += sum(tree_bytes(copy.target) for copy in copies)
        self._device.down(copies, after=[self._device.mark()], label=f"unpin {self.host.piece.name}").wait()
        for position, apart in enumerate(self.host.separate):
            if apart:
                self.host.compute[position].copy_(self.host.master[position])
        self._dirty = False

    def close(self) -> None:
        """Give the memory back."""
        self.master, self.state = [], []
        self._device.arena.give_back(self._region)

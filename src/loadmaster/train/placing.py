"""Updates on the device: of pieces that stay there, and of pieces whose state streams through a ring.

    for chunk in piece:   H2D master, state -> ring place;  COMP step;  D2H master, state, copy -> slab

A chunk is whole parameters. The compute copy is also written into the slot the weights stand in, so a piece
used again at the turn of a step need not be loaded.
"""

from collections.abc import Mapping, Sequence

import torch

from loadmaster.core.errors import RunError
from loadmaster.core.units import format_bytes
from loadmaster.train.layout import Packer, Place
from loadmaster.train.places import Places, Slot
from loadmaster.train.profile import tree_bytes
from loadmaster.train.setting import Ledger
from loadmaster.train.state import TrialState
from loadmaster.train.states import Hyper
from loadmaster.train.store import HostPiece
from loadmaster.train.streams import Copy, Device, Event
from loadmaster.train.update import Entry, apply


def chunk_places(host: HostPiece, positions: Sequence[int]) -> tuple[list[dict[str, Place]], int]:
    """Where master (''), state and compute copy ('=') of parameters lie in a ring place, and its bytes."""
    packer = Packer()
    found = []
    for position in positions:
        master = host.master[position]
        places = {"": packer.place(master.shape, master.dtype)}
        for key, view in host.state[position].items():
            places[key] = packer.place(view.shape, view.dtype)
        if host.separate[position]:
            places["="] = packer.place(master.shape, host.compute[position].dtype)
        found.append(places)
    return found, packer.end_bytes


def chunks(host: HostPiece, positions: Sequence[int], limit_bytes: int) -> list[list[int]]:
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


class StreamedUpdate:
    """Optimizer steps on the device of pieces whose state lives on the host."""

    def __init__(
        self, state: TrialState, device: Device, ledger: Ledger, places: Places, *, num_bytes: int
    ) -> None:
        self._state, self._device, self._ledger, self._places = state, device, ledger, places
        self._limit_bytes = num_bytes

    def update(
        self,
        host: HostPiece,
        groups: Sequence[int],
        grads: Mapping[int, torch.Tensor],
        hyper: Hyper,
        slot: Slot | None,
        *,
        after: Event | None,
    ) -> Event:
        """Step a piece; the event says when the host copy is whole."""
        landed = after
        computed = self._device.mark()
        for positions in chunks(host, sorted(grads), self._limit_bytes):
            ring = self._places.ring()
            places, _ = chunk_places(host, positions)
            views = [{key: place.view(ring.region.memory) for key, place in each.items()} for each in places]
            brought = self._bring(host, positions, views, [ring.free, after])
            with self._device.aside(computed, brought):
                entries = [
                    Entry(
                        host, p, groups[p], v[""], grads[p].to(v[""].dtype), {k: v[k] for k in host.state[p]}
                    )
                    for p, v in zip(positions, views, strict=True)
                ]
                apply(self._state.optimizer, entries, hyper)
                self._copy_out(host, positions, views, slot)
            landed = ring.free = self._send(host, positions, views)
        assert landed is not None
        return landed

    def _bring(
        self,
        host: HostPiece,
        positions: Sequence[int],
        views: list[dict[str, torch.Tensor]],
        after: list[Event | None],
    ) -> Event:
        copies = []
        for position, view in zip(positions, views, strict=True):
            copies.append(Copy(view[""], host.master[position]))
            if host.started[position]:
                copies.extend(Copy(view[key], state) for key, state in host.state[position].items())
        self._ledger.up_bytes += sum(tree_bytes(copy.source) for copy in copies)
        label = f"{self._state.trial.name} state {host.piece.name}"
        return self._device.up(copies, after=after, label=label, lane=1)

    @staticmethod
    def _copy_out(
        host: HostPiece, positions: Sequence[int], views: list[dict[str, torch.Tensor]], slot: Slot | None
    ) -> None:
        """The new weights as units read them: for the host, and where they stand on the device."""
        for position, view in zip(positions, views, strict=True):
            if "=" in view:
                view["="].copy_(view[""])
            if slot is not None:
                host.up_places[position].view(slot.memory).copy_(view.get("=", view[""]))

    def _send(self, host: HostPiece, positions: Sequence[int], views: list[dict[str, torch.Tensor]]) -> Event:
        copies = []
        for position, view in zip(positions, views, strict=True):
            copies.append(Copy(host.master[position], view[""]))
            copies.extend(Copy(state, view[key]) for key, state in host.state[position].items())
            if "=" in view:
                copies.append(Copy(host.compute[position], view["="]))
        self._ledger.down_bytes += sum(tree_bytes(copy.target) for copy in copies)
        label = f"{self._state.trial.name} state {host.piece.name}"
        return self._device.down(copies, after=[self._device.mark(aside=True)], label=label, lane=1)


class PinnedPiece:
    """A piece that stays on the device with its optimizer state; home only when asked."""

    def __init__(self, host: HostPiece, device: Device, ledger: Ledger, *, name: str) -> None:
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
            Entry(self.host, p, groups[p], self.master[p], grads[p].to(self.master[p].dtype), self.state[p])
            for p in sorted(grads)
        ]
        apply(template, entries, hyper)
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

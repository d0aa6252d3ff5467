"""The executor: a trial's steps on a device, unit by unit, weights arriving ahead, gradients leaving behind.

Everything is issued in order by the caller's thread; order between streams comes from events. What the caller
waits for is a weight whose update on the host is not done, and the loss at the end of a step.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.train import randomness
from loadmaster.train.arena import Booked
from loadmaster.train.data import moved, next_batches
from loadmaster.train.gradients import Gradients
from loadmaster.train.partition import unit_bytes
from loadmaster.train.placing import PinnedPiece, StreamedUpdate
from loadmaster.train.profile import tree_bytes
from loadmaster.train.setting import Ledger, Setting, StepFacts, on_host, pause, since
from loadmaster.train.slots import Slot, Slots, make_slots
from loadmaster.train.state import TrialState
from loadmaster.train.states import Hyper, hyper_of
from loadmaster.train.streams import Copy, Device, Event
from loadmaster.train.units import Kept, Moment, Units
from loadmaster.train.update import HostUpdate
from loadmaster.train.updater import HostUpdater


@dataclass(eq=False)
class Session:
    """One trial on one device, until it is closed; its state is whole in host memory only after `settle`."""

    state: TrialState
    device: Device
    setting: Setting
    updater: HostUpdater
    sequence: Iterator[int]
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        """Take regions, pin slabs, bring pinned pieces up; all or nothing."""
        before = self.device.arena.mark()
        try:
            self._enter()
        except BaseException:
            for host in self.state.pieces:
                self.device.unpin(host.slab)
            self.device.arena.rewind(before)
            raise

    def _enter(self) -> None:
        state, device, setting = self.state, self.device, self.setting
        name = state.trial.name
        self.units = Units(state.trial, state.chain, state.layout.cuts, device.torch_device)
        self.grads = Gradients(state, device.torch_device)
        self.pinned: dict[int, PinnedPiece] = {}
        self.ready: dict[int, Event] = {}  # the host copy of a piece is whole
        self.pending: list[tuple[Event, list[torch.Tensor]]] = []  # gradients on their way down
        self.position = 0
        self._boundaries = Booked(device.arena, "boundaries")
        self._losses = torch.zeros(state.trial.accumulate, pin_memory=device.torch_device.type == "cuda")
        for host in state.pieces:
            device.pin(host.slab)
        streamed = frozenset(
            p.piece.index for p in state.pieces if setting.placement[p.piece.index] != "pinned"
        )
        sizes = [host.up.numel() for host in state.pieces]
        made = make_slots(device, name, state.layout, sizes, streamed, num_slots=setting.num_slots)
        self.slots = Slots(state.layout, streamed, made, setting.depth)
        self.ring = StreamedUpdate(
            state, device, self.ledger, num_bytes=setting.ring_bytes, num_rings=setting.num_rings
        )
        self.host_updates = {
            index: HostUpdate(
                state.optimizer, state.pieces[index], state.groups(index), num_threads=setting.num_threads
            )
            for index, where in enumerate(setting.placement)
            if where == "host"
        }
        for host in state.pieces:
            if setting.placement[host.piece.index] == "pinned":
                self.pinned[host.piece.index] = PinnedPiece(host, device, self.ledger)

    def step(self) -> StepFacts | None:
        """One optimizer step; None where the data is at its end."""
        state, where = self.state, self.device.torch_device
        with self._own_randomness(), self.device.computing(), self.units.buffers_bound():
            batches = next_batches(state, where)
            if not batches:
                return None
            if not state.trial.counted_rng:
                return self._run(batches)
            with randomness.kept(where):  # the data's draws go on as if no block had drawn
                return self._run(batches)

    def _run(self, batches: list[Any]) -> StepFacts:
        state, trial = self.state, self.state.trial
        hyper = hyper_of(state.optimizer)
        before = Ledger(self.ledger.up_bytes, self.ledger.down_bytes, self.ledger.loads, self.ledger.waited_s)
        self.turn = next(self.sequence)
        moments = [Moment(state.step, number, len(batches)) for number in range(len(batches))]
        inputs = [moved(batch[0], self.device.torch_device) for batch in batches]
        targets = [moved(batch[1], self.device.torch_device) for batch in batches]
        num_tokens = state.facts.num_tokens * len(batches)
        scale = state.scaler.scale if trial.precision == "fp16" else 1.0
        losses = self._sweep(inputs, targets, moments, hyper, scale)
        if trial.deferred:
            self._deferred(hyper, scale)
        if not state.checked:
            self.grads.check_all_seen()
            state.checked = True
        if state.schedule is not None:
            state.schedule.step()
        state.step += 1
        loss = sum(each / len(losses) for each in losses)
        return StepFacts(loss, num_tokens, since(before, self.ledger))

    def _sweep(
        self, values: list[Any], targets: list[Any], moments: list[Moment], hyper: Hyper, scale: float
    ) -> list[float]:
        """All units of a step, a shard visiting every micro-batch before it leaves."""
        last = self.state.layout.num_shards - 1
        kept: list[list[Kept]] = []
        for shard in range(last):
            with self._unit("F", shard):
                outs = [self.units.forward(shard, value, m) for value, m in zip(values, moments, strict=True)]
            kept.append([keep for _, keep in outs])
            values = [out for out, _ in outs]
            self._boundaries.push(sum(tree_bytes(value) for value in values))
        losses = []
        slopes: list[Any] = []
        with self._unit("L", last):
            for value, target, moment in zip(values, targets, moments, strict=True):
                loss, slope = self.units.last(value, target, moment, scale=scale)
                self.grads.take(last, moment)
                losses.append(loss)
                slopes.append(slope)
        del values
        landed = self._send_losses(losses)
        self._finish(last, hyper)
        for shard in reversed(range(last)):
            with self._unit("B", shard):
                for number, moment in enumerate(moments):
                    slopes[number] = self.units.backward(shard, kept[shard][number], slopes[number], moment)
                    self.grads.take(shard, moment)
            self._boundaries.pop()
            kept[shard].clear()
            self._finish(shard, hyper)
        self._boundaries.clear()
        landed.wait()
        return self._losses[: len(losses)].tolist()

    def _send_losses(self, losses: list[torch.Tensor]) -> Event:
        """Losses go down by themselves: reading them must not wait for the backward pass."""
        copies = [Copy(box, loss.float()) for box, loss in zip(self._losses, losses, strict=False)]
        landed = self.device.down(copies, after=[self.device.mark()], label=f"{self.state.trial.name} loss")
        self.pending.append((landed, [copy.source for copy in copies]))
        return landed

    def predict(self, inputs: Any) -> Any:
        """Outputs of the model for some inputs, shard by shard, without gradients."""
        value = moved(inputs, self.device.torch_device)
        for shard in range(self.state.layout.num_shards):
            self.position = shard  # as in a forward pass: what this shard follows is used again last
            leaves: dict[int, torch.Tensor] = {}
            used: list[Slot] = []
            for piece in self.state.layout.pieces_of[shard]:
                leaves |= self._leaves(piece, used)
            self.units.bind(shard, leaves)
            value = self.units.evaluate(shard, value)
            self.units.unbind(shard)
            done = self.device.mark()
            for slot in used:
                slot.free = done
        self.position = 0
        return value

    @contextmanager
    def _unit(self, kind: str, shard: int) -> Iterator[None]:
        """Bind the shard's weights, loading what is missing; afterwards look ahead."""
        position = self.position
        leaves: dict[int, torch.Tensor] = {}
        used: list[Slot] = []
        for piece in self.state.layout.pieces_of[shard]:
            leaves |= self._leaves(piece, used)
        self._prefetch(position)
        self.units.bind(shard, leaves)
        self.grads.watch(shard, leaves)
        saved = unit_bytes(self.state.facts, self.state.layout, self.state.sizes, shard, kind)
        label = f"{self.state.trial.name} {kind}{shard}"
        with self.device.arena.hold("activations", saved), self.device.span("compute", label):
            yield
        self.units.unbind(shard)
        done = self.device.mark()
        for slot in used:
            slot.free = done
        self.position = (position + 1) % len(self.slots.order)

    def _leaves(self, piece: int, used: list[Slot]) -> dict[int, torch.Tensor]:
        """The parameters of a piece as leaves on the device."""
        host = self.state.pieces[piece]
        if piece in self.pinned:
            views = self.pinned[piece].compute_views()
        else:
            slot = self._arrived(piece)
            used.append(slot)
            views = [place.view(slot.memory) for place in host.up_places]
        return {
            number: view.detach().requires_grad_(host.trainable[position])
            for position, (number, view) in enumerate(zip(host.piece.parameters, views, strict=True))
        }

    def _arrived(self, piece: int) -> Slot:
        """The slot that holds a piece, once compute may read it."""
        slot = self.slots.holding(piece)
        if slot is None:
            self._await_update(piece)
            slot = self._load(piece)
            if slot is None:
                raise RunError(f"{self.device.name}: no slot for piece {piece}; num_slots is too small")
        self.device.hold(slot.ready)
        return slot

    def _await_update(self, piece: int) -> None:
        """Wait for the host's update of a piece; meanwhile load what else is ready."""
        pending = self.ready.get(piece)
        if pending is None or not on_host(pending):
            return
        began = time.perf_counter()
        while not pending.done():
            self._prefetch(self.position)
            pause(pending)
        pending.wait()
        self.ledger.waited_s += time.perf_counter() - began

    def _prefetch(self, position: int) -> None:
        """Load what the next units need and can have by now."""
        for piece in self.slots.wanted(position):
            pending = self.ready.get(piece)
            if pending is not None and on_host(pending) and not pending.done():
                continue
            if self._load(piece) is None:
                return

    def _load(self, piece: int) -> Slot | None:
        host = self.state.pieces[piece]
        slot = self.slots.place_for(piece, host.up.numel(), self.position)
        if slot is None:
            return None
        label = f"{self.state.trial.name} load {host.piece.name}"
        copy = Copy(slot.memory[: host.up.numel()], host.up)
        slot.ready = self.device.up([copy], after=[slot.free, self.ready.get(piece)], label=label)
        slot.piece = piece
        self.ledger.up_bytes += host.up.numel()
        self.ledger.loads += 1
        return slot

    def _finish(self, shard: int, hyper: Hyper) -> None:
        """What is due once a shard's backward is done: update, or send the gradient to where that happens."""
        self.pending = [(event, tensors) for event, tensors in self.pending if not event.done()]
        for index in self.state.layout.pieces_of[shard]:
            host = self.state.pieces[index]
            if host.piece.shards[0] != shard or not any(host.trainable):
                continue
            grads = self.grads.collect(index)
            if self.state.trial.deferred:
                self.grads.note_norms(index, grads, self._scale())
                self._land(index, grads)
            elif self.setting.placement[index] == "host":
                self._updateon_host(index, self._land(index, grads), sorted(grads), hyper, ())
            else:
                self._update_on_device(index, grads, hyper)

    def _scale(self) -> float:
        return self.state.scaler.scale if self.state.trial.precision == "fp16" else 1.0

    def _land(self, index: int, grads: dict[int, torch.Tensor]) -> Event:
        """Send gradients down; they stay alive until they have landed."""
        host = self.state.pieces[index]
        views = host.grads
        copies = [Copy(views[position], grad) for position, grad in grads.items()]
        label = f"{self.state.trial.name} grads {host.piece.name}"
        landed = self.device.down(copies, after=[self.device.mark()], label=label)
        self.ledger.down_bytes += sum(tree_bytes(copy.target) for copy in copies)
        self.pending.append((landed, list(grads.values())))
        return landed

    def _updateon_host(
        self,
        index: int,
        landed: Event | None,
        positions: Sequence[int],
        hyper: Hyper,
        factors: Sequence[float],
    ) -> None:
        host, update = self.state.pieces[index], self.host_updates[index]
        step = self.state.step + 1

        def work() -> None:
            update.step(positions, hyper, factors)
            host.step = step

        urgency = (self.turn, host.piece.shards[0])
        self.ready[index] = self.updater.submit(work, landed=landed, urgency=urgency)
        slot = self.slots.holding(index)
        if slot is not None:  # what stands on the device is now the past
            slot.piece = None

    def _update_on_device(self, index: int, grads: dict[int, torch.Tensor], hyper: Hyper) -> None:
        host, groups = self.state.pieces[index], self.state.groups(index)
        if index in self.pinned:
            with self.device.span("compute", f"{self.state.trial.name} update {host.piece.name}"):
                self.pinned[index].update(self.state.optimizer, groups, grads, hyper)
            return
        slot = self.slots.holding(index)
        soon = self.slots.next_use(index, self.position) - self.position <= self.setting.depth
        if slot is not None and not soon:  # it will have left before it is wanted again
            slot.piece = None
        kept = slot if soon else None
        self.ready[index] = self.ring.update(host, groups, grads, hyper, kept, after=self.ready.get(index))
        updated = self.device.mark(aside=True)
        self.pending.append((updated, list(grads.values())))
        if kept is not None:
            kept.ready = kept.free = updated

    def _deferred(self, hyper: Hyper, scale: float) -> None:
        """The update sweep of clipping and loss scaling, lowest shard first: the next step wants it first."""
        state = self.state
        factors, overflow = self.grads.factors(scale)
        if state.trial.precision == "fp16":
            state.scaler.update(overflow=overflow)
        if overflow:
            self.grads.forget()
            return
        for event, _ in self.pending:
            event.wait()
        for index in sorted(self.grads.noted, key=lambda piece: state.pieces[piece].piece.shards[0]):
            positions = self.grads.noted[index]
            if self.setting.placement[index] == "host":
                self._updateon_host(index, None, positions, hyper, factors)
            else:
                self._update_on_device(index, self._raised(index, positions, factors), hyper)
        self.grads.forget()

    def _raised(
        self, index: int, positions: Sequence[int], factors: Sequence[float]
    ) -> dict[int, torch.Tensor]:
        """Landed gradients back on the device, with their factors."""
        host = self.state.pieces[index]
        landed = host.grads
        raised = {p: torch.empty_like(landed[p], device=self.device.torch_device) for p in positions}
        copies = [Copy(raised[p], landed[p]) for p in positions]
        after = [self.device.mark()]
        self.device.hold(
            self.device.up(copies, after=after, label=f"{self.state.trial.name} grads {host.piece.name}")
        )
        self.ledger.up_bytes += sum(tree_bytes(copy.source) for copy in copies)
        return {p: self.grads.widened(grad, host.master[p].dtype, factors) for p, grad in raised.items()}

    def settle(self) -> None:
        """Bring every update and pinned piece home: then host memory is the whole truth."""
        with self.device.computing():
            for piece in self.pinned.values():
                piece.write_back()
            self.device.mark().wait()
        for event in list(self.ready.values()):
            event.wait()
        for event, _ in self.pending:
            event.wait()
        self.pending.clear()
        for buffer, copy in zip(self.state.chain.buffers, self.units.buffers, strict=True):
            buffer.copy_(copy)

    def close(self) -> None:
        """Give regions back."""
        self._boundaries.clear()
        self.settle()
        for slot in self.slots.slots:
            self.device.arena.give_back(slot.region)
        for piece in self.pinned.values():
            piece.close()
        self.ring.close()
        for host in self.state.pieces:
            self.device.unpin(host.slab)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        where = self.device.torch_device
        with randomness.kept(where):
            randomness.install(self.state.generators, where)
            try:
                yield
            finally:
                self.state.generators = randomness.current(where)

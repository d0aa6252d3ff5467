"""The executor: a trial's steps on a device, unit by unit, weights arriving ahead, gradients leaving behind.

Everything is issued in order by the caller's thread; order between streams comes from events. What the caller
waits for is a weight whose update on the host is not done, and the loss at the end of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.device.update_thread import HostUpdater
from loadmaster.shards.model.optimizer_state import Hyper, copy_hyper
from loadmaster.shards.model.profile import num_tokens, tree_bytes
from loadmaster.shards.plan.shard_plan import flight_bytes, unit_bytes, update_bytes
from loadmaster.shards.plan.slot_needs import MemoryNeed, boundary_bytes, compute_memory_need
from loadmaster.shards.spec.engine import mean_loss
from loadmaster.train.execute.boundaries import Boundaries
from loadmaster.train.execute.device_slots import get_places
from loadmaster.train.execute.device_updates import StreamedUpdate
from loadmaster.train.execute.device_weights import Weights, find_streamed
from loadmaster.train.execute.execution_config import Setting, StepFacts, TransferLedger, subtract_ledgers
from loadmaster.train.execute.gradients import Gradients
from loadmaster.train.execute.micro_batches import move_to_device, next_batches
from loadmaster.train.execute.optimizer_step import HostUpdate
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.execute.units import ForwardRecord, MicroBatch, Units


@dataclass(eq=False)
class Session:
    """One trial on one device, until it is closed; its state is whole in host memory only after `settle`."""

    state: TrialState
    device: Device
    setting: Setting
    updater: HostUpdater
    sequence: Iterator[int]
    ledger: TransferLedger = field(default_factory=TransferLedger)
    rehearsing: Callable[[int, dict[int, torch.Tensor]], None] | None = None

    def __post_init__(self) -> None:
        """Take regions, pin slabs for as long as the trial is held, bring pieces up; all or nothing."""
        self.places = get_places(self.device)
        self.places.join(self, self._need())
        before = self.device.arena.mark()
        try:
            self._enter()
        except BaseException:
            self.device.arena.rewind(before)
            self.places.leave(self, None)
            raise
        self._told = TransferLedger()

    def _enter(self) -> None:
        state, device, setting = self.state, self.device, self.setting
        self.units = Units(state.trial, state.chain, state.layout.cuts, device.torch_device)
        self.grads = Gradients(state, device.torch_device)
        self._boundaries = Boundaries(device.arena, f"{state.trial.name} boundaries")
        pinned = device.torch_device.type == "cuda"
        self._losses = torch.zeros(state.trial.accumulate, dtype=torch.float64, pin_memory=pinned)
        for host in state.pieces:
            device.pin(host.slab)
        self.ring = StreamedUpdate(state, device, self.ledger, self.places, num_bytes=setting.ring_bytes)
        self.host_updates = {
            index: HostUpdate(
                state.optimizer, state.pieces[index], state.groups(index), num_threads=setting.num_threads
            )
            for index, where in enumerate(setting.placement)
            if where == "host"
        }
        self.weights = Weights(state, device, self.places, setting, self.ledger)

    def _need(self) -> MemoryNeed:
        state, setting = self.state, self.setting
        streamed = find_streamed(setting)
        return compute_memory_need(
            [host.up.numel() for host in state.pieces],
            streamed,
            num_slots=setting.num_slots,
            ring_bytes=setting.ring_bytes,
            num_rings=setting.num_rings,
            flight_bytes=flight_bytes(
                state.layout, state.sizes, streamed, setting.num_in_flight, ring_bytes=setting.ring_bytes
            ),
            boundary_bytes=boundary_bytes(state.facts, state.layout, micro_batches=state.trial.accumulate),
        )

    def step(self, follower: "Session | None" = None) -> StepFacts | None:
        """One optimizer step, None where the data is at its end; the follower's weights come at its end."""
        state, where = self.state, self.device.torch_device
        self.places.set_turn(self.weights, None if follower is None else follower.weights)
        self.weights.position = 0
        with self._own_randomness(), self.device.computing(), self.units.bind_buffers():
            batches = next_batches(state, where)
            if not batches:
                return None
            if not state.trial.counted_rng:
                return self._run(batches)
            with randomness.preserve_generators(where):  # the data's draws go on as if no block had drawn
                return self._run(batches)

    def _run(self, batches: list[Any]) -> StepFacts:
        state, trial = self.state, self.state.trial
        hyper = copy_hyper(state.optimizer)
        self.turn = next(self.sequence)
        moments = [MicroBatch(state.step, number, len(batches)) for number in range(len(batches))]
        inputs = [move_to_device(batch[0], self.device.torch_device) for batch in batches]
        targets = [move_to_device(batch[1], self.device.torch_device) for batch in batches]
        count = sum(num_tokens(each) for each in inputs)
        scale = state.scaler.scale if trial.precision == "fp16" else 1.0
        losses = self._sweep(inputs, targets, moments, hyper, scale)
        if trial.deferred:
            self._run_deferred_updates(hyper, scale)
        if not state.checked:
            self.grads.check_all_seen()
            state.checked = True
        if state.schedule is not None:
            state.schedule.step()
        state.step += 1
        before, self._told = self._told, replace(self.ledger)
        return StepFacts(mean_loss(losses), count, subtract_ledgers(before, self._told))

    def _sweep(
        self, values: list[Any], targets: list[Any], moments: list[MicroBatch], hyper: Hyper, scale: float
    ) -> list[float]:
        """All units of a step, a shard visiting every micro-batch before it leaves."""
        last = self.state.layout.num_shards - 1
        kept: list[list[ForwardRecord]] = []
        for shard in range(last):
            with self._bind_unit("F", shard):
                outs = [self.units.forward(shard, value, m) for value, m in zip(values, moments, strict=True)]
            kept.append([keep for _, keep in outs])
            values = self._boundaries.push([out for out, _ in outs], self.places.boundaries)
            del outs
        losses = []
        slopes: list[Any] = []
        with self._bind_unit("L", last):
            for value, target, moment in zip(values, targets, moments, strict=True):
                loss, slope = self.units.last(value, target, moment, scale=scale)
                self.grads.take(last, moment)
                losses.append(loss)
                slopes.append(slope)
        del values
        landed = self._send_losses(losses)
        self._finish(last, hyper)
        self.device.gather()  # compute is busy for a while
        for shard in reversed(range(last)):
            with self._bind_unit("B", shard):
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
        copies = [Copy(box, loss.double()) for box, loss in zip(self._losses, losses, strict=False)]
        landed = self.device.down(copies, after=[self.device.mark()], label=f"{self.state.trial.name} loss")
        self.places.hold_in_flight(landed, [copy.source for copy in copies])
        return landed

    def predict(self, inputs: Any) -> Any:
        """Outputs of the model for some inputs, shard by shard, without gradients."""
        self.places.set_turn(self.weights, None)
        value = move_to_device(inputs, self.device.torch_device)
        for shard in range(self.state.layout.num_shards):
            self.weights.position = shard  # as in a forward pass: what this shard follows is used again last
            leaves, used = self.weights.get_leaves(shard)
            self.units.bind(shard, leaves)
            value = self.units.evaluate(shard, value)
            self.units.unbind(shard)
            done = self.device.mark()
            for slot in used:
                slot.free = done
        self.weights.position = 0
        return value

    @contextmanager
    def _bind_unit(self, kind: str, shard: int) -> Iterator[None]:
        """Bind the shard's weights, loading what is missing; afterwards look ahead."""
        self.places.release_landed()
        leaves, used = self.weights.get_leaves(shard)
        self.weights.prefetch()
        self.units.bind(shard, leaves)
        self.grads.watch(shard, leaves)
        state = self.state
        held = unit_bytes(state.facts, state.layout, state.sizes, self.setting.placement, shard, kind)
        name = state.trial.name
        try:
            with (
                self.device.arena.hold(f"{name} activations", held),
                self.device.span("compute", f"{name} {kind}{shard}"),
            ):
                yield
        finally:  # after a failure too: nothing may hold on to a place that is given back
            self.units.unbind(shard)
        done = self.device.mark()
        for slot in used:
            slot.free = done
        self.weights.position += 1

    def _finish(self, shard: int, hyper: Hyper) -> None:
        """What is due once a shard's backward is done: update, or send the gradient to where that happens."""
        for index in self.state.layout.pieces_of[shard]:
            host = self.state.pieces[index]
            if host.piece.shards[0] != shard or not any(host.trainable):
                continue
            grads = self.grads.collect(index)
            if self.rehearsing is not None:
                self.rehearsing(index, grads)
            elif self.state.trial.deferred:
                self.grads.note_norms(index, grads, self._scale())
                self._send_grads(index, grads)
            elif self.setting.placement[index] == "host":
                self._update_on_host(index, self._send_grads(index, grads), sorted(grads), hyper, ())
            else:
                self._update_on_device(index, grads, hyper)

    def rehearse(self, batches: list[Any], then: Any = None) -> float:
        """The units of a step with all they take of the device, and nothing done: no update, no draw kept.

        Whether a step fits is known before the first one changes anything. `then` gets all gradients.
        """
        state, where = self.state, self.device.torch_device
        with self.device.computing():  # which writes them
            kept = [buffer.clone() for buffer in self.units.buffers]
        told, grads = replace(self.ledger), self.grads
        self.places.set_turn(self.weights, None)
        self.weights.position = 0
        self.grads, self.rehearsing = Gradients(state, where), then or self._rehearse_update
        try:
            with randomness.preserve_generators(where), self.device.computing(), self.units.bind_buffers():
                randomness.restore_generators(state.generators, where)
                moments = [MicroBatch(state.step, number, len(batches)) for number in range(len(batches))]
                inputs = [move_to_device(each[0], where) for each in batches]
                targets = [move_to_device(each[1], where) for each in batches]
                losses = self._sweep(inputs, targets, moments, copy_hyper(state.optimizer), self._scale())
                return mean_loss(losses)
        finally:
            with self.device.computing():  # after a failure too
                for buffer, before in zip(self.units.buffers, kept, strict=True):
                    buffer.copy_(before)
                self.device.mark().wait()
            self._boundaries.clear()
            self.grads, self.rehearsing = grads, None
            for slot in self.places.slots:
                if slot.owner is self.weights:
                    slot.clear()
            for name in ("up_bytes", "down_bytes", "loads", "waited_s"):
                setattr(self.ledger, name, getattr(told, name))

    def _rehearse_update(self, index: int, grads: dict[int, torch.Tensor]) -> None:
        """The memory of an update, without it."""
        host = self.state.pieces[index]
        where = self.setting.placement[index]
        if where == "host" or self.state.trial.deferred:
            self._send_grads(index, grads)
            return
        computed = self.device.mark()
        with nullcontext() if where == "pinned" else self.device.aside(computed):
            wide = {p: grad.to(host.master[p].dtype) for p, grad in grads.items()}
            if any(self.state.sizes.start_bytes):
                wide |= {-1 - p: torch.empty_like(grad) for p, grad in wide.items()}
        if where != "pinned":
            self.places.hold_in_flight(self.device.mark(aside=True), list(grads.values()))

    def _scale(self) -> float:
        return self.state.scaler.scale if self.state.trial.precision == "fp16" else 1.0

    def _send_grads(self, index: int, grads: dict[int, torch.Tensor]) -> Event:
        """Send gradients down; they stay alive until they have landed."""
        host = self.state.pieces[index]
        views = host.grads
        copies = [Copy(views[position], grad) for position, grad in grads.items()]
        label = f"{self.state.trial.name} grads {host.piece.name}"
        landed = self.device.down(copies, after=[self.device.mark()], label=label)
        self.ledger.down_bytes += sum(tree_bytes(copy.target) for copy in copies)
        self.places.hold_in_flight(landed, list(grads.values()))
        return landed

    def _update_on_host(
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
        label = f"{self.state.trial.name} update {host.piece.name}"
        self.weights.ready[index] = self.updater.submit(work, landed=landed, urgency=urgency, label=label)
        slot = self.weights.find_slot(index)
        if slot is not None:  # what stands on the device is now the past
            slot.clear()

    def _update_on_device(self, index: int, grads: dict[int, torch.Tensor], hyper: Hyper) -> None:
        host, groups, weights = self.state.pieces[index], self.state.groups(index), self.weights
        if index in weights.pinned:
            name = self.state.trial.name
            held = update_bytes(
                self.state.sizes, host.piece.parameters, deferred=self.state.trial.deferred, on_device=True
            )
            with (
                self.device.arena.hold(f"{name} update", held),
                self.device.span("compute", f"{name} update {host.piece.name}"),
            ):
                weights.pinned[index].update(self.state.optimizer, groups, grads, hyper)
            return
        slot = weights.find_slot(index)
        kept = slot if weights.is_soon(index) else None
        if slot is not None and kept is None:  # it will have left before it is wanted again
            slot.clear()
        weights.ready[index] = self.ring.update(
            host, groups, grads, hyper, kept, after=weights.ready.get(index)
        )
        updated = self.device.mark(aside=True)
        if kept is not None:
            kept.ready = kept.free = updated
        self.places.hold_in_flight(updated, list(grads.values()))

    def _run_deferred_updates(self, hyper: Hyper, scale: float) -> None:
        """The update sweep of clipping and loss scaling, lowest shard first: the next step wants it first."""
        state = self.state
        factors, overflow = self.grads.factors(scale)
        if state.trial.precision == "fp16":
            state.scaler.update(overflow=overflow)
        if overflow:
            self.grads.forget()
            return
        self.places.settle()
        for index in sorted(self.grads.noted, key=lambda piece: state.pieces[piece].piece.shards[0]):
            positions = self.grads.noted[index]
            if self.setting.placement[index] == "host":
                self._update_on_host(index, None, positions, hyper, factors)
            else:
                self._update_on_device(index, self._fetch_grads(index, positions, factors), hyper)
        self.grads.forget()

    def _fetch_grads(
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
        return {p: self.grads.widen_grad(grad, host.master[p].dtype, factors) for p, grad in raised.items()}

    def settle(self) -> None:
        """Bring every update and pinned piece home: then host memory is the whole truth."""
        with self.device.computing():
            for piece in self.weights.pinned.values():
                piece.write_back()
            self.device.mark().wait()
        for event in list(self.weights.ready.values()):
            event.wait()
        self.places.settle()
        for buffer, copy in zip(self.state.chain.buffers, self.units.buffers, strict=True):
            buffer.copy_(copy)

    def close(self) -> None:
        """Give regions back, also after a step that failed."""
        self._boundaries.clear()
        try:
            self.settle()
        finally:
            self.weights.close()
            self.places.leave(self, self.weights)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        where = self.device.torch_device
        with randomness.preserve_generators(where):
            randomness.restore_generators(self.state.generators, where)
            try:
                yield
            finally:
                self.state.generators = randomness.capture_generators(where)

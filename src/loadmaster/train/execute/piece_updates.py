"""What becomes of the gradients of a trial by itself: an update on the host, on the device, or at the end."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.device.update_thread import HostUpdater
from loadmaster.shards.model.optimizer_state import Hyper
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.shards.plan.shard_plan import update_bytes
from loadmaster.train.execute.device_slots import DeviceSlots
from loadmaster.train.execute.device_updates import StreamedUpdate
from loadmaster.train.execute.device_weights import DeviceWeights
from loadmaster.train.execute.execution_config import ExecutionConfig, TransferLedger
from loadmaster.train.execute.gradients import Gradients
from loadmaster.train.execute.optimizer_step import HostUpdate
from loadmaster.train.execute.trial_state import TrialState

Grads = dict[int, torch.Tensor]  # of a piece, by position


class PieceUpdates:
    """Updates of one trial's pieces, each where its placement says."""

    def __init__(
        self,
        state: TrialState,
        device: Device,
        config: ExecutionConfig,
        *,
        weights: DeviceWeights,
        device_slots: DeviceSlots,
        ledger: TransferLedger,
        updater: HostUpdater,
        sequence: Iterator[int],
    ) -> None:
        self._state, self._device, self._config = state, device, config
        self._weights, self._device_slots, self._ledger = weights, device_slots, ledger
        self._updater, self._sequence, self._turn = updater, sequence, 0
        self._kept: dict[int, Event] = {}  # sums of micro-batches, on their way to the host or there
        self._ring = StreamedUpdate(state, device, ledger, device_slots, num_bytes=config.ring_bytes)
        self._host_updates = {
            index: HostUpdate(
                state.optimizer, state.pieces[index], state.groups(index), num_threads=config.num_threads
            )
            for index, where in enumerate(config.placement)
            if where == "host"
        }

    def begin(self) -> None:
        """A step begins: its updates on the host come after those of steps before it, of any trial."""
        self._turn = next(self._sequence)

    def wants(self, piece: int) -> bool:
        """Whether the optimizer has any parameter of a piece."""
        return any(self._state.pieces[piece].trainable)

    def take(self, piece: int, grads: Grads, hyper: Hyper) -> None:
        """Update a piece, or send its gradients to where that happens."""
        if self._state.trial.deferred:
            self._send_grads(piece, grads)
        elif self._config.placement[piece] == "host":
            self._update_on_host(piece, self._send_grads(piece, grads), sorted(grads), hyper, ())
        else:
            self._update_on_device(piece, grads, hyper)

    def finish(self, gradients: Gradients, hyper: Hyper, scale: float) -> None:
        """The update sweep of clipping and loss scaling, lowest shard first: the next step wants it first."""
        state = self._state
        if not state.trial.deferred:
            return
        factors, overflow = gradients.factors(scale)
        if state.trial.precision == "fp16":
            state.scaler.update(overflow=overflow)
        if overflow:
            gradients.forget()
            return
        self._device_slots.settle()
        for index in sorted(gradients.noted, key=lambda piece: state.pieces[piece].piece.shards[0]):
            positions = gradients.noted[index]
            if self._config.placement[index] == "host":
                self._update_on_host(index, None, positions, hyper, factors)
            else:
                self._update_on_device(index, self._fetch_grads(index, positions, factors), hyper)
        gradients.forget()

    def hold_until(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """Keep tensors until an event; where too much is under way, wait for the oldest."""
        self._device_slots.hold_in_flight(event, tensors)

    def keep(self, piece: int, grads: Grads) -> None:
        """Sums of gradients wait in host memory for the next micro-batch."""
        self._kept[piece] = self._send_grads(piece, grads)

    def recall(self, piece: int, positions: Sequence[int]) -> Grads:
        """Sums that wait in host memory, on the device again."""
        self._kept.pop(piece).wait()
        return self._fetch_grads(piece, positions, ())

    def rehearse(self, piece: int, grads: Grads) -> None:
        """The memory of an update, without it."""
        host = self._state.pieces[piece]
        where = self._config.placement[piece]
        if where == "host" or self._state.trial.deferred:
            self._send_grads(piece, grads)
            return
        computed = self._device.mark()
        with nullcontext() if where == "pinned" else self._device.aside(computed):
            wide = {p: grad.to(host.master[p].dtype) for p, grad in grads.items()}
            if any(self._state.sizes.start_bytes):
                wide |= {-1 - p: torch.empty_like(grad) for p, grad in wide.items()}
        if where != "pinned":
            self.hold_until(self._device.mark(aside=True), list(grads.values()))

    def _send_grads(self, index: int, grads: Grads) -> Event:
        """Send gradients down; they stay alive until they have landed."""
        host = self._state.pieces[index]
        views = host.grads
        copies = [Copy(views[position], grad) for position, grad in grads.items()]
        label = f"{self._state.trial.name} grads {host.piece.name}"
        landed = self._device.down(copies, after=[self._device.mark()], label=label)
        self._ledger.down_bytes += sum(tree_bytes(copy.target) for copy in copies)
        self.hold_until(landed, list(grads.values()))
        return landed

    def _update_on_host(
        self,
        index: int,
        landed: Event | None,
        positions: Sequence[int],
        hyper: Hyper,
        factors: Sequence[float],
    ) -> None:
        host, update = self._state.pieces[index], self._host_updates[index]
        step = self._state.step + 1

        def work() -> None:
            update.step(positions, hyper, factors)
            host.step = step

        urgency = (self._turn, host.piece.shards[0])
        label = f"{self._state.trial.name} update {host.piece.name}"
        self._weights.ready[index] = self._updater.submit(work, landed=landed, urgency=urgency, label=label)
        slot = self._weights.find_slot(index)
        if slot is not None:  # what stands on the device is now the past
            slot.clear()

    def _update_on_device(self, index: int, grads: Grads, hyper: Hyper) -> None:
        state, weights = self._state, self._weights
        host, groups = state.pieces[index], state.groups(index)
        if index in weights.pinned:
            name = state.trial.name
            held = update_bytes(
                state.sizes, host.piece.parameters, deferred=state.trial.deferred, on_device=True
            )
            with (
                self._device.arena.hold(f"{name} update", held),
                self._device.span("compute", f"{name} update {host.piece.name}"),
            ):
                weights.pinned[index].update(state.optimizer, groups, grads, hyper)
            return
        slot = weights.find_slot(index)
        kept = slot if weights.is_soon(index) else None
        if slot is not None and kept is None:  # it will have left before it is wanted again
            slot.clear()
        weights.ready[index] = self._ring.update(
            host, groups, grads, hyper, kept, after=weights.ready.get(index)
        )
        updated = self._device.mark(aside=True)
        if kept is not None:
            kept.ready = kept.free = updated
        self.hold_until(updated, list(grads.values()))

    def _fetch_grads(self, index: int, positions: Sequence[int], factors: Sequence[float]) -> Grads:
        """Landed gradients back on the device, with their factors."""
        host = self._state.pieces[index]
        landed = host.grads
        raised = {p: torch.empty_like(landed[p], device=self._device.torch_device) for p in positions}
        copies = [Copy(raised[p], landed[p]) for p in positions]
        label = f"{self._state.trial.name} grads {host.piece.name}"
        self._device.hold(self._device.up(copies, after=[self._device.mark()], label=label))
        self._ledger.up_bytes += sum(tree_bytes(copy.source) for copy in copies)
        return {p: Gradients.widen_grad(grad, host.master[p].dtype, factors) for p, grad in raised.items()}

"""A trial by itself on a device: weights arrive ahead of their units, gradients leave behind them.

What the caller waits for is a weight whose update on the host is not done, and the loss at the end of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Device
from loadmaster.shards.device.update_thread import HostUpdater
from loadmaster.shards.plan.shard_plan import flight_bytes
from loadmaster.shards.plan.slot_needs import MemoryNeed, boundary_bytes, compute_memory_need
from loadmaster.shards.plan.unit_order import unit_order
from loadmaster.train.execute.boundaries import Boundaries
from loadmaster.train.execute.device_slots import get_device_slots
from loadmaster.train.execute.device_weights import DeviceWeights, find_streamed
from loadmaster.train.execute.execution_config import (
    ExecutionConfig,
    StepFacts,
    TransferLedger,
    subtract_ledgers,
)
from loadmaster.train.execute.micro_batches import next_batches
from loadmaster.train.execute.piece_updates import PieceUpdates
from loadmaster.train.execute.step_executor import StepExecutor
from loadmaster.train.execute.trial_state import TrialState


class ShardExecutor(StepExecutor):
    """One trial on one device, until it is closed; its state is whole in host memory only after `settle`."""

    weights: DeviceWeights
    updates: PieceUpdates

    def __init__(
        self,
        state: TrialState,
        device: Device,
        config: ExecutionConfig,
        updater: HostUpdater,
        sequence: Iterator[int],
    ) -> None:
        """Take regions, pin slabs for as long as the trial is held, bring pieces up; all or nothing."""
        self.ledger, self._told = TransferLedger(), TransferLedger()
        self.device_slots = get_device_slots(device)
        self.device_slots.join(self, _need(state, config))
        before = device.arena.mark()
        try:
            super().__init__(state, device)
            self.boundaries = Boundaries(self.device_slots, f"{state.trial.name} boundaries")
            for host in state.pieces:
                device.pin(host.slab)
            self.weights = DeviceWeights(state, device, self.device_slots, config, self.ledger)
            self.updates = PieceUpdates(
                state,
                device,
                config,
                weights=self.weights,
                device_slots=self.device_slots,
                ledger=self.ledger,
                updater=updater,
                sequence=sequence,
            )
        except BaseException:
            device.arena.rewind(before)
            self.device_slots.leave(self, None)
            raise

    def step(self, follower: "ShardExecutor | None" = None) -> StepFacts | None:
        """One optimizer step, None where the data is at its end; the follower's weights come at its end."""
        state, where = self.state, self.device.torch_device
        self.device_slots.set_turn(self.weights, None if follower is None else follower.weights)
        self.weights.position = 0
        with self._own_randomness(), self.device.computing(), self.units.bind_buffers():
            batches = next_batches(state, where)
            if not batches:
                return None
            if not state.trial.counted_rng:
                return self._step(batches)
            with randomness.preserve_generators(where):  # the data's draws go on as if no block had drawn
                return self._step(batches)

    def _step(self, batches: list[Any]) -> StepFacts:
        self.take_batches(batches)
        self.updates.begin()
        self._run_units()
        loss = self.end()
        before, self._told = self._told, replace(self.ledger)
        return StepFacts(loss, self.num_tokens, subtract_ledgers(before, self._told))

    def _run_units(self) -> None:
        num_shards = self.state.layout.num_shards
        # A step with fewer micro-batches (at the end of an epoch) begins later in the order.
        self.weights.position = (self._most_forwards - self.num_forwards) * num_shards
        for kind, shard in unit_order(num_shards, self.num_forwards):
            self.run_unit(kind, shard)
            if kind == "L":
                self.device.gather()  # compute is busy for a while

    def predict(self, inputs: Any) -> Any:
        """Outputs of the model for some inputs, shard by shard, without gradients."""
        self.device_slots.set_turn(self.weights, None)
        value = super().predict(inputs)
        self.weights.position = 0
        return value

    def rehearse(self, batches: list[Any], then: Any = None) -> float:
        """The units of a step with all they take of the device, and nothing done: no update, no draw kept.

        Whether a step fits is known before the first one changes anything. `then` gets all gradients.
        """
        where, told = self.device.torch_device, replace(self.ledger)
        self.device_slots.set_turn(self.weights, None)
        self.weights.position = 0
        try:
            with (
                randomness.preserve_generators(where),
                self.device.computing(),
                self.rehearsing(then or self.updates.rehearse),
                self.units.bind_buffers(),
            ):
                randomness.restore_generators(self.state.generators, where)
                self.take_batches(batches)
                self._run_units()
                return self.await_loss()
        finally:
            with self.device.computing():  # which puts the buffers back
                self.device.mark().wait()
            for slot in self.device_slots.slots:
                if slot.owner is self.weights:
                    slot.clear()
            for name in ("up_bytes", "down_bytes", "loads", "waited_s"):
                setattr(self.ledger, name, getattr(told, name))

    def settle(self) -> None:
        """Bring every update and pinned piece home: then host memory is the whole truth."""
        with self.device.computing():
            for piece in self.weights.pinned.values():
                piece.write_back()
            self.device.mark().wait()
        for event in list(self.weights.ready.values()):
            event.wait()
        self.device_slots.settle()
        self.settle_buffers()

    def close(self) -> None:
        """Give regions back, also after a step that failed."""
        self.clear()
        try:
            self.settle()
        finally:
            self.weights.close()
            self.device_slots.leave(self, self.weights)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        where = self.device.torch_device
        with randomness.preserve_generators(where):
            randomness.restore_generators(self.state.generators, where)
            try:
                yield
            finally:
                self.state.generators = randomness.capture_generators(where)


def _need(state: TrialState, config: ExecutionConfig) -> MemoryNeed:
    """What a trial needs of the slots that trials on a device share."""
    streamed = find_streamed(config)
    return compute_memory_need(
        [host.up.numel() for host in state.pieces],
        streamed,
        num_slots=config.num_slots,
        ring_bytes=config.ring_bytes,
        num_rings=config.num_rings,
        flight_bytes=flight_bytes(
            state.layout, state.sizes, streamed, config.num_in_flight, ring_bytes=config.ring_bytes
        ),
        boundary_bytes=boundary_bytes(state.facts, state.layout, micro_batches=state.trial.accumulate),
    )

"""One trial of a group on a device: its adapters stay there, its batch visits each frozen shard in turn.

Other trials run between its units, so its buffers and generators are put in place for each of them. Units may
be replayed from a tape instead of run (`cuda_graphs.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from loadmaster.modules import randomness
from loadmaster.shards.device.arena import BookingStack
from loadmaster.shards.device.streams import Device
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.train.backbone.activation_offload import ActivationOffload
from loadmaster.train.backbone.adapter import Adapter
from loadmaster.train.backbone.adapter_updates import AdapterUpdates
from loadmaster.train.backbone.adapter_weights import AdapterWeights, lowest_trained_shard
from loadmaster.train.backbone.cuda_graphs import UnitTape
from loadmaster.train.backbone.frozen_weights import is_frozen
from loadmaster.train.execute.execution_config import TransferLedger
from loadmaster.train.execute.micro_batches import next_batches
from loadmaster.train.execute.step_executor import StepExecutor
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.execute.units import ForwardRecord


class GroupMemberExecutor(StepExecutor):
    """A trial's part of group steps on one device; `begin`, then units as the group says, then `end`."""

    weights: AdapterWeights
    boundaries: ActivationOffload
    updates: AdapterUpdates

    def __init__(
        self,
        state: TrialState,
        device: Device,
        *,
        shared: Sequence[HostPiece],
        on_device: bool,
        pool: Any = None,
    ) -> None:
        """`pool`: memory of recorded units, where there are to be any."""
        super().__init__(state, device, lowest=lowest_trained_shard(state))
        name = state.trial.name
        self.ledger = TransferLedger()
        self._told = (0, 0)
        self._adapters: dict[int, Adapter] = {}
        self.weights = AdapterWeights(state, device, self._adapters, shared=shared)
        self.boundaries = ActivationOffload(
            device, f"{name} boundaries", on_device=on_device, lowest=self.lowest
        )
        self.updates = AdapterUpdates(state, device, self._adapters)
        self._resident = BookingStack(device.arena, f"{name} batch")
        self.tape = UnitTape(self.units, device, pool, name=name) if pool is not None else None
        try:
            self._book_buffers()
            for host in state.pieces:
                if not is_frozen(host.piece, state.chain):
                    self._adapters[host.piece.index] = Adapter(
                        host, device, self.ledger, name=f"{name} adapters"
                    )
        except BaseException:
            self.close()
            raise

    def begin(self) -> bool:
        """Take the step's batches; False where training is over."""
        with self._own_randomness(drawn=True):
            batches = next_batches(self.state, self.device.torch_device)
        if not batches:
            return False
        self.take_batches(batches)
        self._resident.push(tree_bytes((self._values, self._targets)))
        if self.tape is not None:
            self.tape.begin()
        return True

    def rehearse(
        self,
        batches: list[Any],
        run: Callable[[], None],
        then: Callable[[int, dict[int, torch.Tensor]], None],
    ) -> float:
        """A step on these batches that leaves nothing behind; `run` runs its units, `then` gets gradients."""
        state, kept = self.state, self.boundaries
        before = state.peeked, state.generators, self.tape, kept.up_bytes, kept.down_bytes
        state.peeked, self.tape = batches, None
        try:
            with self.rehearsing(lambda piece, grads: self.updates.take(piece, grads, [])):
                run()
                for index, grads in self.updates.waiting.items():
                    then(index, grads)
                return self.await_loss()
        finally:
            state.peeked, state.generators, self.tape, kept.up_bytes, kept.down_bytes = before

    def moved_bytes(self) -> tuple[int, int]:
        """Up and down since last asked: adapters and boundaries."""
        kept = self.boundaries
        now = (self.ledger.up_bytes + kept.up_bytes, self.ledger.down_bytes + kept.down_bytes)
        told, self._told = self._told, now
        return now[0] - told[0], now[1] - told[1]

    def settle(self) -> None:
        """Bring adapters and buffers home."""
        with self.device.computing():
            for adapter in self._adapters.values():
                adapter.write_back()
            self.device.mark().wait()
        self.settle_buffers()

    def clear(self) -> None:
        """Let go of what a step holds; buffers stay."""
        super().clear()
        self.updates.clear()
        self._resident.clear()
        self._book_buffers()

    def close(self) -> None:
        """Give the memory back; nothing is brought home."""
        self.clear()
        if self.tape is not None:
            self.tape.close()
        self._resident.clear()
        for adapter in self._adapters.values():
            adapter.close()
        self._adapters.clear()

    def _book_buffers(self) -> None:
        size = sum(buffer.nbytes for buffer in self.units.buffers)
        if size:
            self._resident.push(size)

    def _compute_forward(self, shard: int) -> tuple[list[Any], list[ForwardRecord], bool]:
        """From the tape, where the unit is recorded."""
        if self.tape is None:
            return super()._compute_forward(shard)
        value = self._values[0]
        with self._book_unit("F", shard):
            addresses = self.weights.frozen_addresses(shard)
            out = self.tape.forward(shard, value, addresses, lambda: self._bind(shard))
        if out is not None:
            return [out], [ForwardRecord(value, None, {})], True
        values, records, stays = super()._compute_forward(shard)
        self.tape.note_input(shard, value)
        self.tape.note_input(shard + 1, values[0])
        return values, records, stays

    def _compute_backward(self, shard: int, records: list[ForwardRecord]) -> None:
        """From the tape, where the unit is recorded; it knows nothing of parameters that shards share."""
        layout = self.state.layout
        numbers = [n for piece in layout.pieces_of[shard] for n in layout.pieces[piece].parameters]
        found = None
        if self.tape is not None and not any(map(self.grads.is_tied, numbers)):
            with self._book_unit("B", shard):
                addresses = self.weights.frozen_addresses(shard)
                found = self.tape.backward(
                    shard, records[0].value, self._slopes[0], addresses, lambda: self._bind(shard)
                )
        if found is None:
            super()._compute_backward(shard, records)
            return
        self._slopes[0], grads = found
        self.grads.put(grads)

    @contextmanager
    def _bind(self, shard: int) -> Iterator[dict[int, torch.Tensor]]:
        """Weights and buffers of this trial, for a unit that is recorded."""
        leaves = self.weights.get_leaves(shard)
        self.units.bind(shard, leaves)
        try:
            with self.units.bind_buffers():
                yield leaves
        finally:
            self.units.unbind(shard)

    @contextmanager
    def _own_context(self, kind: str, shard: int) -> Iterator[None]:
        """Buffers and generators of this trial, for as long as one of its units runs."""
        drawn = not self.state.trial.counted_rng
        others = kind == "L" or self.units.draws_others(shard)
        with self.units.bind_buffers(), self._own_randomness(drawn=drawn, others=others):
            yield

    @contextmanager
    def _own_randomness(self, *, drawn: bool, others: bool = True) -> Iterator[None]:
        """This trial's generators; `drawn`: they go on from there. `others`: Python's and NumPy's, too."""
        where, state = self.device.torch_device, self.state
        mine = state.generators
        randomness.restore_generators(mine if others else replace(mine, others=None), where)
        yield
        if drawn:
            now = randomness.capture_generators(where, others=others)
            state.generators = now if others else replace(now, others=mine.others)

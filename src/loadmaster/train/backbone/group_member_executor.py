"""One trial of a group on a device: its adapters stay there, its batch visits each frozen shard in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from loadmaster.modules import randomness
from loadmaster.shards.device.arena import BookingStack
from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.model.optimizer_state import copy_hyper
from loadmaster.shards.model.profile import num_tokens, tree_bytes
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.shards.spec.engine import mean_loss
from loadmaster.train.backbone.activation_offload import Shelf
from loadmaster.train.backbone.adapter import Adapter
from loadmaster.train.backbone.cuda_graphs import UnitTape
from loadmaster.train.backbone.frozen_weights import is_frozen
from loadmaster.train.backbone.weight_stream import Belt
from loadmaster.train.execute.execution_config import TransferLedger
from loadmaster.train.execute.gradients import Gradients
from loadmaster.train.execute.micro_batches import move_to_device, next_batches
from loadmaster.train.execute.optimizer_step import apply_step
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.execute.units import ForwardRecord, MicroBatch, Units


class Member:
    """A trial's part of group steps on one device; `begin`, then visits of shards, then `end`."""

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
        self.state, self._device = state, device
        mine = [piece.index for piece in state.layout.pieces if is_frozen(piece, state.chain)]
        self._shared = {own: host.piece.index for own, host in zip(mine, shared, strict=True)}
        self.ledger = TransferLedger()
        self._told = (0, 0)
        self.num_tokens = 0  # of this step
        self.units = Units(state.trial, state.chain, state.layout.cuts, device.torch_device)
        self.grads = Gradients(state, device.torch_device)
        self._adapters: dict[int, Adapter] = {}
        self._waiting: dict[int, dict[int, torch.Tensor]] = {}  # gradients of this step, until its end
        self._shelf = Shelf(device, f"{state.trial.name} boundaries", on_device=on_device)
        self._resident = BookingStack(device.arena, f"{state.trial.name} batch")
        self.tape = UnitTape(self.units, device, pool, name=state.trial.name) if pool is not None else None
        self.lowest = lowest_trained_shard(state)
        pinned = device.torch_device.type == "cuda"
        self._losses = torch.zeros(state.trial.accumulate, dtype=torch.float64, pin_memory=pinned)
        try:
            self._book_buffers()
            for host in state.pieces:
                if not is_frozen(host.piece, state.chain):
                    name = f"{state.trial.name} adapters"
                    self._adapters[host.piece.index] = Adapter(host, device, self.ledger, name=name)
        except BaseException:
            self.close()
            raise

    def begin(self) -> bool:
        """Take the step's batches; False where training is over."""
        state, where = self.state, self._device.torch_device
        with self._own_randomness(drawn=True):
            batches = next_batches(state, where)
        if not batches:
            return False
        self._hyper = copy_hyper(state.optimizer)
        self._moments = [MicroBatch(state.step, number, len(batches)) for number in range(len(batches))]
        self._values = [move_to_device(batch[0], where) for batch in batches]
        self._targets = [move_to_device(batch[1], where) for batch in batches]
        self.num_tokens = sum(num_tokens(each) for each in self._values)
        self._resident.push(tree_bytes((self._values, self._targets)))
        self._kept: list[list[ForwardRecord]] = []
        self._slopes: list[Any] = []
        self._scale = state.scaler.scale if state.trial.precision == "fp16" else 1.0
        if self.tape is not None:
            self.tape.begin()
        return True

    def forward(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> None:
        """F of every micro-batch; what backward needs is put on the shelf."""
        out = self._replay_forward(shard, frozen)
        if out is not None:
            self._kept.append([ForwardRecord(self._values[0], None, {})])
            self._values = [out]
        else:
            with self._visit(shard, "F", frozen):
                outs = [
                    self.units.forward(shard, value, moment)
                    for value, moment in zip(self._values, self._moments, strict=True)
                ]
            if self.tape is not None:
                self.tape.note_input(shard, self._values[0])
                self.tape.note_input(shard + 1, outs[0][0])
            self._kept.append([kept for _, kept in outs])
            self._values = [out for out, _ in outs]
        if shard + 1 < len(self.units.cuts):
            self._shelf.note(shard + 1, self._values, stays=out is not None)

    def _replay_forward(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> Any:
        if self.tape is None:
            return None
        with self._standing(shard, "F"):
            return self.tape.forward(
                shard,
                self._values[0],
                self._frozen_addresses(shard, frozen),
                lambda: self._bound(shard, frozen),
            )

    def lay_down(self, shard: int) -> None:
        """The input of a shard that has been run is wanted again only by its backward, if it has one."""
        if shard < self.lowest:
            self._kept[shard].clear()
        if shard == 0:
            return
        for kept in self._kept[shard]:
            kept.value = None
        if shard < self.lowest:
            self._shelf.drop(shard)
        else:
            self._shelf.lay_down(shard)

    def reach_for(self, shard: int) -> None:
        """Bring the input of a shard back, ahead of its backward."""
        if shard > max(0, self.lowest - 1):
            self._shelf.reach_for(shard)

    def last(self, frozen: Mapping[int, list[torch.Tensor]]) -> None:
        """L: losses and the first slopes."""
        shard = len(self.units.cuts) - 1
        losses = []
        with self._visit(shard, "L", frozen):
            for value, target, moment in zip(self._values, self._targets, self._moments, strict=True):
                loss, slope = self.units.last(value, target, moment, scale=self._scale)
                self.grads.take(shard, moment)
                losses.append(loss)
                self._slopes.append(slope)
        self._values, self._targets = [], []
        if shard > 0:
            self._shelf.drop(shard)
        copies = [Copy(box, loss.double()) for box, loss in zip(self._losses, losses, strict=False)]
        label = f"{self.state.trial.name} loss"
        self._landed: Event = self._device.down(copies, after=[self._device.mark()], label=label)
        self._sent = [copy.source for copy in copies]
        self._finish(shard)

    def backward(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> None:
        """B of every micro-batch, unless nothing at or below the shard is trained."""
        if shard < self.lowest:
            return
        if shard > 0:
            for kept, value in zip(self._kept[shard], self._shelf.take_input(shard), strict=True):
                kept.value = value
        if not self._replay_backward(shard, frozen):
            self._backward(shard, frozen)
        self._kept[shard].clear()
        if shard > 0:
            self._shelf.drop(shard)
        self._finish(shard)

    def _backward(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> None:
        with self._visit(shard, "B", frozen):
            for number, moment in enumerate(self._moments):
                kept = self._kept[shard][number]
                self._slopes[number] = self.units.backward(shard, kept, self._slopes[number], moment)
                self.grads.take(shard, moment)

    def _replay_backward(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> bool:
        """Whether the tape did it; it knows nothing of parameters that shards share."""
        numbers = [
            n for p in self.state.layout.pieces_of[shard] for n in self.state.layout.pieces[p].parameters
        ]
        if self.tape is None or any(map(self.grads.is_tied, numbers)):
            return False
        with self._standing(shard, "B"):
            found = self.tape.backward(
                shard,
                self._kept[shard][0].value,
                self._slopes[0],
                self._frozen_addresses(shard, frozen),
                lambda: self._bound(shard, frozen),
            )
        if found is None:
            return False
        self._slopes[0], grads = found
        self.grads.put(grads)
        return True

    def end(self) -> float:
        """What is due after the last visit; gives the loss."""
        state = self.state
        if not state.checked:
            self.grads.check_all_seen()
            state.checked = True
        self._update()
        if state.schedule is not None:
            state.schedule.step()
        state.step += 1
        self._landed.wait()
        losses = self._losses[: len(self._moments)].tolist()
        self._clear()
        return mean_loss(losses)

    @contextmanager
    def rehearsing(self, batches: list[Any]) -> Iterator[None]:
        """A step on these batches that leaves nothing behind; it is not ended, but `finish_rehearsal`."""
        state, shelf = self.state, self._shelf
        before = state.peeked, state.generators, self.grads, self.tape, shelf.up_bytes, shelf.down_bytes
        buffers = [buffer.clone() for buffer in self.units.buffers]
        state.peeked, self.grads, self.tape = batches, Gradients(state, self._device.torch_device), None
        try:
            yield
        finally:
            self._waiting = {}
            self._clear()
            state.peeked, state.generators, self.grads, self.tape, shelf.up_bytes, shelf.down_bytes = before
            for buffer, kept in zip(self.units.buffers, buffers, strict=True):
                buffer.copy_(kept)

    def finish_rehearsal(self, then: Callable[[int, dict[int, torch.Tensor]], None]) -> float:
        """The gradients and the loss of a step that is not taken."""
        for index, grads in self._waiting.items():
            then(index, grads)
        self._landed.wait()
        return mean_loss(self._losses[: len(self._moments)].tolist())

    def predict(self, inputs: Any, belt: Belt) -> Any:
        """The outputs for some inputs, without gradients; the belt goes as in a forward pass."""
        value = move_to_device(inputs, self._device.torch_device)
        for shard in range(len(self.units.cuts)):
            leaves = self._leaves(shard, belt.take(shard))
            self.units.bind(shard, leaves)
            try:
                with self._device.arena.hold(
                    f"{self.state.trial.name} activations", visit_bytes(self.state, shard, "F")
                ):
                    value = self.units.evaluate(shard, value)
            finally:
                self.units.unbind(shard)
            belt.done(shard)
        return value

    def moved_bytes(self) -> tuple[int, int]:
        """Up and down since last asked: adapters and boundaries."""
        now = (self.ledger.up_bytes + self._shelf.up_bytes, self.ledger.down_bytes + self._shelf.down_bytes)
        told, self._told = self._told, now
        return now[0] - told[0], now[1] - told[1]

    def settle(self) -> None:
        """Bring adapters and buffers home."""
        with self._device.computing():
            for adapter in self._adapters.values():
                adapter.write_back()
            self._device.mark().wait()
        for buffer, copy in zip(self.state.chain.buffers, self.units.buffers, strict=True):
            buffer.copy_(copy)

    def close(self) -> None:
        """Give the memory back; nothing is brought home."""
        self._clear()
        if self.tape is not None:
            self.tape.close()
        self._resident.clear()
        for adapter in self._adapters.values():
            adapter.close()
        self._adapters.clear()

    def _clear(self) -> None:
        self._kept, self._slopes, self._values, self._targets = [], [], [], []
        self._shelf.clear()
        self._resident.clear()
        self._book_buffers()

    def _book_buffers(self) -> None:
        size = sum(buffer.nbytes for buffer in self.units.buffers)
        if size:
            self._resident.push(size)

    @contextmanager
    def _visit(self, shard: int, kind: str, frozen: Mapping[int, list[torch.Tensor]]) -> Iterator[None]:
        """Weights, buffers and generators of this trial, for as long as it stands in a shard."""
        with self._bound(shard, frozen) as leaves:
            self.grads.watch(shard, leaves)
            drawn = not self.state.trial.counted_rng
            others = kind == "L" or self.units.draws_others(shard)
            with self._own_randomness(drawn=drawn, others=others), self._standing(shard, kind):
                yield

    @contextmanager
    def _bound(
        self, shard: int, frozen: Mapping[int, list[torch.Tensor]]
    ) -> Iterator[dict[int, torch.Tensor]]:
        leaves = self._leaves(shard, frozen)
        self.units.bind(shard, leaves)
        try:
            with self.units.bind_buffers():
                yield leaves
        finally:
            self.units.unbind(shard)

    @contextmanager
    def _standing(self, shard: int, kind: str) -> Iterator[None]:
        """The memory of a visit, and its span."""
        name, size = self.state.trial.name, visit_bytes(self.state, shard, kind)
        with (
            self._device.arena.hold(f"{name} activations", size),
            self._device.span("compute", f"{name} {kind}{shard}"),
        ):
            yield

    def _frozen_addresses(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> tuple[int, ...]:
        """Where the frozen weights of a shard stand."""
        pieces = (index for index in self.state.layout.pieces_of[shard] if index in self._shared)
        return tuple(frozen[self._shared[index]][0].data_ptr() for index in pieces)

    def _leaves(self, shard: int, frozen: Mapping[int, list[torch.Tensor]]) -> dict[int, torch.Tensor]:
        leaves = {}
        for index in self.state.layout.pieces_of[shard]:
            adapter = self._adapters.get(index)
            views = frozen[self._shared[index]] if adapter is None else adapter.compute_views()
            for number, view in zip(self.state.layout.pieces[index].parameters, views, strict=True):
                leaves[number] = view if adapter is None else view.detach().requires_grad_()
        return leaves

    def _finish(self, shard: int) -> None:
        """Keep the gradients that are whole; one step of the optimizer takes them all at the end."""
        for index in self.state.layout.pieces_of[shard]:
            adapter = self._adapters.get(index)
            if adapter is None or adapter.host.piece.shards[0] != shard:
                continue
            grads = self.grads.collect(index)
            if self.state.trial.deferred:
                self.grads.note_norms(index, grads, self._scale)
            self._waiting[index] = grads
            self._resident.push(max(1, tree_bytes(grads)))

    def _update(self) -> None:
        state, factors, overflow = self.state, (), False
        if state.trial.deferred:
            factors, overflow = self.grads.factors(self._scale)  # type: ignore[assignment]
            self.grads.forget()
        if state.trial.precision == "fp16":
            state.scaler.update(overflow=overflow)
        waiting, self._waiting = self._waiting, {}
        if overflow:
            return
        entries = []
        for index, grads in waiting.items():
            adapter = self._adapters[index]
            masters = adapter.host.master
            wide = {p: self.grads.widen_grad(grad, masters[p].dtype, factors) for p, grad in grads.items()}
            entries.extend(adapter.entries(state.groups(index), wide))
        if entries:
            apply_step(state.optimizer, entries, self._hyper)
        for index in waiting:
            self._adapters[index].refresh()

    @contextmanager
    def _own_randomness(self, *, drawn: bool, others: bool = True) -> Iterator[None]:
        """This trial's generators; `drawn`: they go on from there. `others`: Python's and NumPy's, too."""
        where, state = self._device.torch_device, self.state
        mine = state.generators
        randomness.restore_generators(mine if others else replace(mine, others=None), where)
        yield
        if drawn:
            now = randomness.capture_generators(where, others=others)
            state.generators = now if others else replace(now, others=mine.others)


def lowest_trained_shard(state: Any) -> int:
    """The first shard with something to train: backward need not go below."""
    return int(min(p.shards[0] for p in state.layout.pieces if not is_frozen(p, state.chain)))


def visit_bytes(state: Any, shard: int, kind: str) -> int:
    """Device memory a visit takes beside weights and boundaries."""
    low, high = state.layout.cuts[shard]
    facts = state.facts
    if kind == "F":
        return 2 * int(max(facts.output_bytes[low:high]))
    numbers = [n for piece in state.layout.pieces_of[shard] for n in state.layout.pieces[piece].parameters]
    grads = sum(state.sizes.grad_bytes[n] for n in numbers)
    return int(1.25 * sum(facts.saved_bytes[low:high])) + 2 * int(facts.output_bytes[high - 1]) + int(grads)

"""One trial's step on a device, unit by unit: the same for a trial by itself and for each trial of a group.

    take_batches -> F 0 ... F n-2 -> L n-1 -> B n-2 ... B 0 -> end        (units: `units.py`)

A shard visits every micro-batch before it leaves. Everything is issued in order by the caller's thread; order
between streams comes from events. What is not the same stands behind three protocols: where the weights of a
shard come from, where boundaries are kept from forward to backward, what becomes of finished gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from loadmaster.core.errors import RunError
from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.model.optimizer_state import Hyper, copy_hyper
from loadmaster.shards.model.profile import num_tokens
from loadmaster.shards.plan.unit_order import count_forwards
from loadmaster.shards.spec.engine import mean_loss
from loadmaster.train.execute.gradients import Gradients
from loadmaster.train.execute.micro_batches import move_to_device
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.execute.units import ForwardRecord, MicroBatch, Units

Leaves = dict[int, torch.Tensor]  # by parameter
Grads = dict[int, torch.Tensor]  # of a piece, by position


class ShardWeights(Protocol):
    """Where the weights of a shard come from."""

    def lend(self, shard: int) -> AbstractContextManager[Leaves]:
        """The parameters of a shard as leaves on the device, for one unit of a step."""
        ...

    def lend_to_evaluate(self, shard: int) -> AbstractContextManager[Leaves]:
        """The same for an evaluation, which goes through all shards once."""
        ...

    def unit_bytes(self, shard: int, kind: str) -> int:
        """Device memory a unit takes beside weights and boundaries."""
        ...


class BoundaryStore(Protocol):
    """Where the inputs of shards are kept from forward to backward."""

    def keep(self, shard: int, values: list[Any], *, stays: bool) -> list[Any]:
        """The inputs of a shard as it is to read them; `stays`: their memory is booked elsewhere."""
        ...

    def recall(self, shard: int, records: list[ForwardRecord]) -> None:
        """The inputs of a shard are wanted again, by its backward."""
        ...

    def leave(self, kind: str, shard: int, records: list[ForwardRecord]) -> None:
        """A unit that read the inputs of a shard is over."""
        ...

    def clear(self) -> None:
        """Nothing is wanted any more, after a step or a failure."""
        ...


class GradientUpdates(Protocol):
    """What becomes of gradients that are finished."""

    def wants(self, piece: int) -> bool:
        """Whether there is anything to train in a piece."""
        ...

    def take(self, piece: int, grads: Grads, hyper: Hyper) -> None:
        """The gradients of a piece are whole."""
        ...

    def finish(self, gradients: Gradients, hyper: Hyper, scale: float) -> None:
        """All gradients of a step have been taken."""
        ...

    def hold_until(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """Keep tensors that a copy reads."""
        ...


class StepExecutor:
    """The units of one trial's step; who makes one gives it its `weights`, `boundaries` and `updates`."""

    weights: ShardWeights
    boundaries: BoundaryStore
    updates: GradientUpdates

    def __init__(self, state: TrialState, device: Device, *, lowest: int = 0) -> None:
        """`lowest`: the first shard with anything to train; backward does not go below."""
        self.state, self.device, self.lowest = state, device, lowest
        self.units = Units(state.trial, state.chain, state.layout.cuts, device.torch_device)
        self.grads = Gradients(state, device.torch_device)
        pinned = device.torch_device.type == "cuda"
        self._losses = torch.zeros(state.trial.accumulate, dtype=torch.float64, pin_memory=pinned)
        self._rehearsing: Callable[[int, Grads], None] | None = None
        self.num_tokens = 0  # of this step
        self._values: list[Any] = []  # inputs of the shard that runs next, of each micro-batch
        self._targets: list[Any] = []
        self._kept: list[list[ForwardRecord]] = []  # [shard][micro-batch]
        self._slopes: list[Any] = []  # gradients of the input of the shard that ran backward last
        self._most_forwards = count_forwards(state.trial, state.facts)
        self._passes: list[list[int]] = []  # micro-batches of the forward passes that are still to come
        self._now: list[int] = []  # micro-batches of this forward pass

    def take_batches(self, batches: list[Any]) -> None:
        """Begin a step on these micro-batches."""
        state, where = self.state, self.device.torch_device
        self._forget_step()
        self._hyper = copy_hyper(state.optimizer)
        self._moments = [MicroBatch(state.step, number, len(batches)) for number in range(len(batches))]
        self._inputs = [move_to_device(batch[0], where) for batch in batches]
        self._targets = [move_to_device(batch[1], where) for batch in batches]
        self.num_tokens = sum(num_tokens(each) for each in self._inputs)
        numbers = range(len(batches))
        self._passes = [[number] for number in numbers] if self._most_forwards > 1 else [list(numbers)]
        self.num_forwards = len(self._passes)
        self._kept = [[] for _ in range(state.layout.num_shards)]
        self._begin_pass()
        self._scale = state.scaler.scale if state.trial.precision == "fp16" else 1.0

    def _begin_pass(self) -> None:
        """The inputs of the next micro-batches, for the first shard."""
        self._now = self._passes.pop(0)
        self._values = [self._inputs[number] for number in self._now]
        for number in self._now:
            self._inputs[number] = None

    def run_unit(self, kind: str, shard: int) -> None:
        """F, L or B of a shard for every micro-batch."""
        if kind == "F":
            self._forward(shard)
        elif kind == "L":
            self._last(shard)
        else:
            self._backward(shard)

    def end(self) -> float:
        """What is due after the last unit of a step; gives the loss."""
        state = self.state
        if not state.checked:
            self.grads.check_all_seen()
            state.checked = True
        self.updates.finish(self.grads, self._hyper, self._scale)
        if state.schedule is not None:
            state.schedule.step()
        state.step += 1
        loss = self.await_loss()
        self.clear()
        return loss

    def await_loss(self) -> float:
        """The loss of the step, once it has landed."""
        self._landed.wait()
        return mean_loss(self._losses[: len(self._moments)].tolist())

    def predict(self, inputs: Any) -> Any:
        """Outputs of the model for some inputs, shard by shard, without gradients."""
        value = move_to_device(inputs, self.device.torch_device)
        for shard in range(self.state.layout.num_shards):
            with self.weights.lend_to_evaluate(shard) as leaves:
                self.units.bind(shard, leaves)
                try:
                    value = self.units.evaluate(shard, value)
                finally:
                    self.units.unbind(shard)
        return value

    @contextmanager
    def rehearsing(self, then: Callable[[int, Grads], None]) -> Iterator[None]:
        """The units of a step and nothing done: no update, no buffer changed. `then` gets all gradients."""
        buffers, grads = [buffer.clone() for buffer in self.units.buffers], self.grads
        self.grads, self._rehearsing = Gradients(self.state, self.device.torch_device), then
        try:
            yield
        finally:  # after a failure too
            for buffer, before in zip(self.units.buffers, buffers, strict=True):
                buffer.copy_(before)
            self.clear()
            self.grads, self._rehearsing = grads, None

    def settle_buffers(self) -> None:
        """Bring the model's buffers home."""
        for buffer, copy in zip(self.state.chain.buffers, self.units.buffers, strict=True):
            buffer.copy_(copy)

    def clear(self) -> None:
        """Let go of what a step holds, also of one that failed."""
        self._forget_step()
        self.boundaries.clear()

    def _forget_step(self) -> None:
        self._values, self._inputs, self._targets, self._kept, self._slopes = [], [], [], [], []
        self._losses_of_step: list[torch.Tensor] = []

    def _forward(self, shard: int) -> None:
        values, records, stays = self._compute_forward(shard)
        self._values = self.boundaries.keep(shard + 1, values, stays=stays)
        if shard < self.lowest:
            records.clear()
        self._kept[shard].extend(records)
        self.boundaries.leave("F", shard, records)

    def _compute_forward(self, shard: int) -> tuple[list[Any], list[ForwardRecord], bool]:
        """Outputs, what backward needs, and whether the outputs stand in memory of their own that stays."""
        with self._run("F", shard), self._watch_draws():
            outs = [
                self.units.forward(shard, value, moment)
                for value, moment in zip(self._values, self._get_moments(), strict=True)
            ]
        return [out for out, _ in outs], [record for _, record in outs], False

    def _last(self, shard: int) -> None:
        with self._run("L", shard), self._watch_draws():
            for value, moment in zip(self._values, self._get_moments(), strict=True):
                target = self._targets[moment.micro_batch]
                loss, slope = self.units.last(value, target, moment, scale=self._scale)
                self.grads.take(shard, moment)
                self._losses_of_step.append(loss)
                self._slopes.append(slope)
        self.boundaries.leave("L", shard, [])
        if self._passes:
            self._begin_pass()
            return
        self._values, self._inputs, self._targets = [], [], []
        self._send_losses(self._losses_of_step)
        self._finish(shard)

    @contextmanager
    def _watch_draws(self) -> Iterator[None]:
        """A model that was not seen to draw is passed once for all micro-batches: it must not draw later."""
        if self._most_forwards > 1 or len(self._now) == 1 or self.state.trial.counted_rng:
            yield
            return
        where = self.device.torch_device
        before = randomness.capture_generators(where, others=False)
        yield
        if not randomness.is_same_generators(before, randomness.capture_generators(where, others=False)):
            name = self.state.trial.name
            raise RunError(
                f"trial {name!r} draws random numbers that it did not draw when it was planned, and it"
                " accumulates:"
                " they would be drawn in another order than in a plain loop; draw in every step, or give it"
                " rng='counter'"
            )

    def _get_moments(self) -> list[MicroBatch]:
        return [self._moments[number] for number in self._now]

    def _send_losses(self, losses: list[torch.Tensor]) -> None:
        """Losses go down by themselves: reading them must not wait for the backward pass."""
        copies = [Copy(box, loss.double()) for box, loss in zip(self._losses, losses, strict=False)]
        label = f"{self.state.trial.name} loss"
        self._landed = self.device.down(copies, after=[self.device.mark()], label=label)
        self.updates.hold_until(self._landed, [copy.source for copy in copies])

    def _backward(self, shard: int) -> None:
        """B, unless nothing at or below the shard is trained."""
        if shard < self.lowest:
            return
        records = self._kept[shard]
        self.boundaries.recall(shard, records)
        self._compute_backward(shard, records)
        records.clear()
        self.boundaries.leave("B", shard, records)
        self._finish(shard)

    def _compute_backward(self, shard: int, records: list[ForwardRecord]) -> None:
        with self._run("B", shard):
            for number, moment in enumerate(self._moments):
                slopes = self.units.backward(shard, records[number], self._slopes[number], moment)
                self._slopes[number] = slopes
                self.grads.take(shard, moment)

    def _finish(self, shard: int) -> None:
        """What is due once a shard's backward is done: its gradients are whole, but for those it shares."""
        layout = self.state.layout
        for index in layout.pieces_of[shard]:
            if layout.pieces[index].shards[0] != shard or not self.updates.wants(index):
                continue
            grads = self.grads.collect(index)
            if self._rehearsing is not None:
                self._rehearsing(index, grads)
                continue
            if self.state.trial.deferred:
                self.grads.note_norms(index, grads, self._scale)
            self.updates.take(index, grads, self._hyper)

    @contextmanager
    def _run(self, kind: str, shard: int) -> Iterator[None]:
        """The shard's weights in place, and its memory booked, for as long as a unit runs."""
        with self.weights.lend(shard) as leaves:
            self.units.bind(shard, leaves)
            try:
                self.grads.watch(shard, leaves)
                with self._own_context(kind, shard), self._book_unit(kind, shard):
                    yield
            finally:  # after a failure too: nothing may hold on to memory that is given back
                self.units.unbind(shard)

    def _own_context(self, kind: str, shard: int) -> AbstractContextManager[Any]:
        """Buffers and generators of the trial, where others run between its units."""
        return nullcontext()

    @contextmanager
    def _book_unit(self, kind: str, shard: int) -> Iterator[None]:
        """The memory of a unit, and its span."""
        name = self.state.trial.name
        with (
            self.device.arena.hold(f"{name} activations", self.weights.unit_bytes(shard, kind)),
            self.device.span("compute", f"{name} {kind}{shard}"),
        ):
            yield

"""A trial whose model runs its own forward: weights come around each call of a shard, and again in backward.

    forward    call: bring, run under hooks of saved tensors, drop        (what is saved: `call_records`)
    backward   first saved tensor of a call: leave the call before, bring this one's weights
               a call is left: its shard's gradients are whole once none of its calls is open: update

Autograd runs the nodes of later calls first, so backward is the forward in reverse. The *rest* (weights that
are read outside of calls) stands on the device for the whole step. Where all weights stay on the device and
nothing is to run again, nothing stands around the calls at all.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.modules.module_calls import is_checkpointing, stand_around
from loadmaster.shards.device.streams import Device
from loadmaster.shards.device.update_thread import HostUpdater
from loadmaster.shards.model.blocks import call_block
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.shards.plan.shard_plan import call_activation_bytes
from loadmaster.shards.plan.unit_order import UnitOrder, order_calls
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, compute_loss
from loadmaster.train.execute.call_records import (
    CallRecord,
    CallWatch,
    WeightHandle,
    WeightRanges,
    Witness,
    keep_saved,
    note_call,
    raise_unequal,
    refuse_unpacking,
)
from loadmaster.train.execute.device_slots import DeviceSlot
from loadmaster.train.execute.device_weights import NoSlotError, find_streamed
from loadmaster.train.execute.execution_config import ExecutionConfig
from loadmaster.train.execute.lent_parameters import LentParameters
from loadmaster.train.execute.micro_batches import move_to_device
from loadmaster.train.execute.shard_executor import ShardExecutor
from loadmaster.train.execute.step_executor import Grads
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.execute.units import MicroBatch

_BESIDE = "weights beside the slots"


class CallExecutor(ShardExecutor):
    """One trial on one device, whose own forward is run."""

    def __init__(
        self,
        state: TrialState,
        device: Device,
        config: ExecutionConfig,
        updater: HostUpdater,
        sequence: Iterator[int],
    ) -> None:
        """As any trial comes to a device; then stand around the calls of its shards."""
        super().__init__(state, device, config, updater, sequence)
        layout = state.layout
        count = layout.num_shards
        self._streamed = find_streamed(config)
        self._again = config.recompute or (False,) * count
        separate = any(any(host.separate) for host in state.pieces)
        self._stays = not self._streamed and not any(self._again) and not separate
        self._piece_of = {n: piece.index for piece in layout.pieces for n in piece.parameters}
        self._dtype = COMPUTE_DTYPE[state.trial.precision]
        again = replace(layout, recompute=tuple(self._again))
        self._activation_bytes = call_activation_bytes(_facts(state), again, state.sizes, config.placement)
        self._stands = [bool(p) or r for p, r in zip(layout.pieces_of, self._again, strict=True)]
        self._watches = [CallWatch(block) for block in state.chain.blocks]
        self._lent = LentParameters(state.trial, state.chain, self._make_standins(), self._bring_one)
        self._lent_bytes = 0  # of weights that were brought for who read them outside of their calls
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._running: list[int] = []  # shards whose call runs
        self._active = False
        self._summed: dict[int, tuple[int, ...]] = {}  # [piece] positions whose sums wait on the host
        self._log: list[int] = []  # shards in the order of this micro-batch's calls
        self._records: list[CallRecord] = []  # of those with a graph
        self._open: list[int] = []  # [shard] calls whose backward is still to come
        self._done: set[int] = set()  # pieces whose gradients have been taken
        self._late: set[int] = set()  # pieces whose gradients are whole only when backward is over
        self._hidden: list[int] = []  # [shard] calls whose graph is made in backward (checkpoints)
        self._doubts: list[tuple[str, torch.Tensor]] = []  # on a GPU: whether a call gave other numbers
        self._doubts_before: list[tuple[str, torch.Tensor]] = []  # of the step before
        self._is_remaking = False  # a call runs again
        self._goes_back = False  # calls within calls, or in other threads: backward may go to and fro
        self._entered: CallRecord | None = None  # whose backward runs
        self._views: dict[int, torch.Tensor] = {}  # its weights
        self._used: list[DeviceSlot] = []
        self._moment: MicroBatch | None = None  # whose backward pass runs
        self._undo: list[Callable[[], None]] = []
        if not self._stays:
            self._undo.append(stand_around(state.chain.blocks, self._run_call))
        for number, parameter in enumerate(state.chain.parameters):
            if parameter.requires_grad:
                hook = self._make_grad_hook(number)
                self._undo.append(parameter.register_post_accumulate_grad_hook(hook).remove)

    # One step

    def _run_units(self) -> None:
        name, follower = self.state.trial.name, self.device_slots.following
        losses: list[torch.Tensor] = []
        last = len(self._moments) - 1
        largest = max(tree_bytes(each) for each in self._inputs)
        planned = max(1, self.state.facts.input_bytes)  # a longer batch than was seen takes more
        held = int(self._activation_bytes * max(1.0, largest / planned))
        with self._in_place(), self.device.arena.hold(f"{name} activations", held):
            for moment in self._moments:
                number = moment.micro_batch
                self.device_slots.following = follower if number == last else None
                loss, scaled = self._forward_all(moment)
                losses.append(loss)
                if number == last:
                    self._send_losses(losses)
                    self.device.gather()
                self._backward_all(scaled, moment)
        self.units.sync_buffers(0)

    def end(self) -> float:
        """As for any trial; then see what calls of the step before gave, which a GPU has told by now."""
        loss = super().end()
        earlier, self._doubts_before = self._doubts_before, self._doubts
        self._doubts = []
        self._require_equal(earlier)
        return loss

    @staticmethod
    def _require_equal(doubts: list[tuple[str, torch.Tensor]]) -> None:
        if doubts and bool(torch.stack([doubt for _, doubt in doubts]).any()):
            raise_unequal(next(name for name, doubt in doubts if bool(doubt)))

    def _begin_pass(self) -> None:
        """Each micro-batch goes forward and backward by itself."""

    def _forward_all(self, moment: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own forward and the loss, as it is told and as it goes backward."""
        trial, number = self.state.trial, moment.micro_batch
        inputs, targets = self._inputs[number], self._targets[number]
        self._inputs[number] = self._targets[number] = None
        self._forget_calls()
        self.weights.position = 0
        with (
            self.device.span("compute", f"{trial.name} forward"),
            torch.autocast(self.device.torch_device.type, dtype=self._dtype, enabled=self._dtype is not None),
        ):
            out = call_block(self.state.chain.model, inputs, first=True)
            loss = compute_loss(trial, out, targets)
            del out
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise RunError(f"trial {trial.name!r}: loss must give one number; take its mean")
        loss = loss.reshape(())
        share = loss / moment.num_micro_batches if moment.num_micro_batches > 1 else loss
        return loss.detach(), share * self._scale if self._scale != 1.0 else share

    def _backward_all(self, loss: torch.Tensor, moment: MicroBatch) -> None:
        trial = self.state.trial
        self._moment = moment
        self._open = list(self._hidden)
        for record in self._records:
            self._open[record.shard] += 1
        self._set_order(self._log, [record.shard for record in self._records])
        forward = len(self._log)
        for at, record in enumerate(reversed(self._records)):
            record.position = forward + at
        self.weights.position = forward
        self._done = set()
        if not loss.requires_grad:
            raise RunError(f"trial {trial.name!r}: its loss depends on no parameter that is trained")
        with self.device.span("compute", f"{trial.name} backward"):
            loss.backward()
            self._leave_call()
            self._open = [0] * self.state.layout.num_shards
            self._late = set()
            for piece in self.state.layout.pieces:
                self._finish_piece(piece.index)
        for record in self._records:
            record.let_go()
        self._forget_calls()
        self._done = set()
        self._entered, self._moment = None, None
        self._views, self._used = {}, []

    def _forget_calls(self) -> None:
        """Before a micro-batch, and after it."""
        self._log, self._records, self._open = [], [], []
        self._hidden = [0] * self.state.layout.num_shards
        self._late, self._goes_back = set(), False
        self._lent.drop_brought()
        self._release_brought()

    def predict(self, inputs: Any) -> Any:
        """The model's own output, without gradients; nothing is kept."""
        self.device_slots.set_turn(self.weights, None)
        self.weights.position = 0
        self._forget_calls()
        value = move_to_device(inputs, self.device.torch_device)
        where = self.device.torch_device.type
        with (
            self._in_place(),
            torch.no_grad(),
            torch.autocast(where, dtype=self._dtype, enabled=self._dtype is not None),
        ):
            out = call_block(self.state.chain.model, value, first=True)
        self.weights.position = 0
        return out

    def rehearse(self, batches: list[Any], then: Any = None) -> float:
        """The same as any trial's; afterwards the host's tensors are back in their place."""
        try:
            return super().rehearse(batches, then)
        finally:
            self._lent.put_back()

    def settle(self) -> None:
        """Everything home; the model then holds the host's tensors."""
        self._lent.put_back()
        super().settle()
        doubts = self._doubts_before + self._doubts
        self._doubts_before, self._doubts = [], []
        self._require_equal(doubts)

    def clear(self) -> None:
        """Let go of what a step holds, also of one that failed."""
        for record in getattr(self, "_records", ()):
            record.let_go()
        super().clear()

    def close(self) -> None:
        """Leave the model as it was given."""
        for undo in self._undo:
            undo()
        self._undo = []
        self._lent.put_back()
        super().close()

    # Weights

    def _make_standins(self) -> list[torch.Tensor]:
        """What a parameter holds while its weights are away: not a number, whoever reads it."""
        where, found = self.device.torch_device, []
        known: dict[torch.dtype, torch.Tensor] = {}
        for parameter, dtype in zip(
            self.state.chain.parameters, self.state.layout.compute_dtype, strict=True
        ):
            if dtype not in known:
                value = float("nan") if dtype.is_floating_point else 0
                known[dtype] = torch.full((), value, dtype=dtype, device=where)
            found.append(known[dtype].expand(parameter.shape))
        return found

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The model's parameters hold the device's tensors: the rest its weights, shards nothing yet."""
        if self._lent.take_place() and self._stays:
            for piece in self.weights.pinned:
                self._lent.bind_whole(self.weights.get_views([piece])[0])
        rest = self.state.layout.rest
        views: dict[int, torch.Tensor] = {}
        used: list[DeviceSlot] = []
        if rest is not None and not self._stays:
            views, used = self.weights.get_views([rest])
        self._active = True
        try:
            with self._lent.open_pass(views), self.state.chain.switched():  # backward runs calls again
                yield
        finally:
            self._active = False
            self._release_brought()
            self.weights.free(used)

    def _bring_one(self, number: int) -> torch.Tensor:
        """A weight for who reads it outside of its calls; its gradients are then whole at the end."""
        index, name = self._piece_of[number], self.state.chain.parameter_name[number]
        changed = index in self._done and self.updates.wants(index) and not self.state.trial.deferred
        if changed and self._moment is not None and self._rehearsing is None and _is_last(self._moment):
            raise RunError(
                f"parameter {name!r} of trial {self.state.trial.name!r} was read in the backward pass after"
                " it had been stepped; give Trial(clip_norm=...), with which all are stepped at the end"
            )
        self._late.add(index)
        return self._copy_beside(number)

    def _copy_shard(self, shard: int) -> dict[int, torch.Tensor]:
        layout = self.state.layout
        numbers = [number for index in layout.pieces_of[shard] for number in layout.pieces[index].parameters]
        return {number: self._copy_beside(number) for number in numbers}

    def _copy_beside(self, number: int) -> torch.Tensor:
        """A weight in memory of its own, until the micro-batch is over."""
        index = self._piece_of[number]
        position = self.state.layout.pieces[index].parameters.index(number)
        size = self.state.pieces[index].up_places[position].num_bytes
        self.device.arena.book(f"{self.state.trial.name} {_BESIDE}", size)
        self._lent_bytes += size
        with self._lock:
            return self.weights.copy_weight(index, position)

    def _release_brought(self) -> None:
        size, self._lent_bytes = self._lent_bytes, 0
        if size:
            self.device.arena.release(f"{self.state.trial.name} {_BESIDE}", size)

    @contextmanager
    def _bring(self, shard: int) -> Iterator[dict[int, torch.Tensor]]:
        """The weights of a shard in the place of its parameters, for one run."""
        views, used = self._fetch(shard)
        self._lent.bind(views)
        try:
            yield views
        finally:
            self._lent.unbind(views)
            self.weights.free(used)

    def _fetch(self, shard: int) -> tuple[dict[int, torch.Tensor], list[DeviceSlot]]:
        self.device_slots.release_landed()
        with torch.inference_mode(False):  # views are kept: they serve ordinary code, too
            try:
                views, used = self.weights.get_views(self.state.layout.pieces_of[shard])
            except NoSlotError:  # calls within calls have them all
                views, used = self._copy_shard(shard), []
        self.weights.prefetch()
        return views, used

    def _set_order(self, forward: list[int], backward: list[int]) -> None:
        """What comes next, as far as is known."""
        units = order_calls(forward, backward)
        if self.weights.order.units != units:
            self.weights.order = UnitOrder(self.state.layout, self._streamed, units=units)

    def _find_position(self, shard: int) -> None:
        """A call comes: where it stands in the order that was expected, or else beside it."""
        order, at = self.weights.order, self.weights.position
        units = order.units
        ahead = [unit for unit in units[at:] if unit[0] == "F"]
        if ("F", shard) in ahead:
            self.weights.position = at + ahead.index(("F", shard))
            return
        given = [*units[:at], ("F", shard), *units[at:]]
        self.weights.order = UnitOrder(self.state.layout, self._streamed, units=given)

    # Forward

    def _run_call(self, shard: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a shard's module."""
        if not self._active or shard in self._running or not self._stands[shard]:
            return original(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # saved tensors have no hooks there
            for index in self.state.layout.pieces_of[shard]:
                for number in self.state.layout.pieces[index].parameters:
                    self._lent.keep(number)
            return original(*args, **kwargs)
        if self._is_remaking:  # within a call that runs again: what this one saved is kept by its own record
            hooks = torch.autograd.graph.saved_tensors_hooks(keep_saved, refuse_unpacking)
            with self._bring(shard), hooks:
                return original(*args, **kwargs)
        if self._moment is not None:
            self._leave_call()
        elsewhere = threading.get_ident() != self._thread and self._moment is None
        with self._lock, self.device.computing() if elsewhere else nullcontext():
            self._goes_back |= elsewhere or bool(self._running)
            if self._moment is None:
                self._find_position(shard)
            self._running.append(shard)
            try:
                with self._bring(shard) as views:
                    if torch.is_grad_enabled():
                        out = self._call_with_graph(shard, views, original, args, kwargs)
                    else:
                        self._hidden[shard] += self._moment is None and is_checkpointing()
                        out = original(*args, **kwargs)
            finally:
                self._running.remove(shard)
            if self._moment is None:
                self._log.append(shard)
                self.weights.position += 1
            return out

    def _call_with_graph(
        self, shard: int, views: dict[int, torch.Tensor], original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        in_backward = self._moment is not None  # a checkpoint of the model's own makes its graph now
        again = self._again[shard] and not in_backward and not self._goes_back
        again = again and not self._watches[shard].has_hooks()
        record = CallRecord(shard, self._name(shard), self.weights.position if in_backward else -1, again)
        self._records.append(record)
        if in_backward and self._hidden[shard]:
            self._hidden[shard] -= 1  # its place in the count of open calls is this one's
        elif in_backward:
            self._open[shard] += 1
            self._late.update(self.state.layout.pieces_of[shard])
        if record.is_again:
            note_call(record, original, args, kwargs, self.device.torch_device)
            after = self._watches[shard].before(record)
            hooks = self._make_again_hooks(record, WeightRanges(views))
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                out = original(*args, **kwargs)
            after()
            if record.witness is not None:
                record.witness.settle()
            return out
        with torch.autograd.graph.saved_tensors_hooks(*self._make_keep_hooks(record, WeightRanges(views))):
            return original(*args, **kwargs)

    def _make_keep_hooks(self, record: CallRecord, ranges: WeightRanges) -> tuple[Any, Any]:
        find = ranges.find

        def pack(tensor: torch.Tensor) -> Any:
            return find(tensor) or keep_saved(tensor)

        def unpack(kept: Any) -> torch.Tensor:
            if self._moment is None and type(kept) is not WeightHandle:
                return kept  # gradients taken inside of a forward, of what stays
            if self._entered is not record:
                self._enter_call(record)
            return kept.view(self._views[kept.number]) if type(kept) is WeightHandle else kept

        return pack, unpack

    def _make_again_hooks(self, record: CallRecord, ranges: WeightRanges) -> tuple[Any, Any]:
        saved, witness = record.saved, Witness(self._watches[record.shard].find_buffers())
        record.witness = witness

        def pack(tensor: torch.Tensor) -> int:
            witness.look(len(saved), tensor, ranges)
            saved.append((tensor.shape, tensor.dtype))
            return len(saved) - 1

        def unpack(at: int) -> torch.Tensor:
            if self._entered is not record:
                self._enter_call(record)
            assert record.made is not None, "it ran again when it was entered"
            kept = record.made[at]
            return kept.view(self._views[kept.number]) if type(kept) is WeightHandle else kept

        return pack, unpack

    def _name(self, shard: int) -> str:
        return self.state.chain.block_name[shard]

    # Backward

    def _enter_call(self, record: CallRecord) -> None:
        """Backward comes to another call."""
        if self._moment is None:
            raise RunError(
                f"gradients were asked of {record.name!r} inside of a forward, which was not so when the step"
                " was planned; take them in every forward, or raise memory_cap so that all weights stay"
            )
        self._leave_call()
        if record.over:
            raise RunError(
                f"the backward pass came back to a call of {record.name!r} that it had left: it runs twice"
                " (retain_graph), or in an order that shards do not follow; give Trial(blocks=...)"
            )
        self.weights.position = max(self.weights.position, record.position)
        self._entered = record
        self._views, self._used = self._fetch(record.shard)
        if record.is_again and record.made is None:
            with self._lock:
                self._lent.bind(self._views)
                self._running.append(record.shard)
                self._is_remaking = True
                try:
                    doubt = record.make_again(WeightRanges(self._views), self.device.torch_device)
                    if doubt is not None:
                        self._doubts.append((record.name, doubt))
                finally:
                    self._is_remaking = False
                    self._running.remove(record.shard)
                    self._lent.unbind(self._views)

    def _leave_call(self) -> None:
        """The backward of a call is over; so may be that of its shard."""
        record, self._entered = self._entered, None
        if record is None:
            return
        self.weights.free(self._used)
        self._views, self._used = {}, []
        if self._goes_back:  # it may be come back to
            return
        record.let_go()
        self._open[record.shard] -= 1
        pieces = self.state.layout.pieces
        for index in self.state.layout.pieces_of[record.shard]:
            if not any(self._open[shard] for shard in pieces[index].shards):
                self._finish_piece(index)

    def _make_grad_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        piece = self._piece_of[number]
        is_stepped = self.state.group_of[number] >= 0

        def hook(parameter: torch.Tensor) -> None:
            if not self._active:
                return
            if not is_stepped:  # the optimizer does not have it
                parameter.grad = None
                return
            if piece in self._done:
                raise RunError(
                    f"parameter {self.state.chain.parameter_name[number]!r} got a gradient after those of its"
                    " shard had been taken; give Trial(blocks=...)"
                )
            grad, parameter.grad = parameter.grad, None
            assert grad is not None, "the hook runs when there is one"
            self.grads.put({number: grad})

        return hook

    def _finish_piece(self, index: int) -> None:
        """The gradients of a piece are whole for this micro-batch; after the last one, for the step."""
        if index in self._done or index in self._late:
            return
        self._done.add(index)
        if not self.updates.wants(index) or self._moment is None:
            return
        grads = self.grads.collect(index)
        if self.state.trial.accumulate > 1:
            grads = self._sum_up(index, grads)
        if not grads or not _is_last(self._moment):
            return
        if self._rehearsing is not None:
            self._rehearsing(index, grads)
            return
        if self.state.trial.deferred:
            self.grads.note_norms(index, grads, self._scale)
        self.updates.take(index, grads, self._hyper)

    def _sum_up(self, index: int, grads: Grads) -> Grads:
        """Add the gradients of a micro-batch to those before it, which wait in host memory."""
        assert self._moment is not None, "backward runs"
        host = self.state.pieces[index]
        if self._moment.micro_batch == 0:
            self._summed.pop(index, None)
        grads = {p: grad.to(host.master[p].dtype) for p, grad in grads.items()}
        waiting = self._summed.get(index, ())
        if waiting:
            for position, earlier in self.updates.recall(index, waiting).items():
                now = grads.get(position)
                grads[position] = earlier if now is None else earlier.add_(now)
        if not _is_last(self._moment) and grads:
            self.updates.keep(index, grads)
            self._summed[index] = tuple(sorted(grads))
        return grads


def _is_last(moment: MicroBatch) -> bool:
    return moment.micro_batch == moment.num_micro_batches - 1


def _facts(state: TrialState) -> Any:
    calls = state.facts.calls
    assert calls is not None, "a model by call has its facts"
    return calls

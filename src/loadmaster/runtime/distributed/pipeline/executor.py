"""Executor: one rank's actions of a step, in the order of `core.pipelines.order`.

    1F2       receives are begun a little ahead, so that they arrive while an earlier micro-batch is computed
    1SEND_F2  goes out while the next one is computed; what was sent stays alive until it has left
    0B2       backward through the stage; gradients of weights add up over micro-batches
    0I2 0W2   the same in two parts: what the stage before waits for, then the gradients of weights

Random numbers: micro-batch m of step t starts from a seed of its own at the first stage. The state of the
generators goes along with the activations, so the stages draw what one process would draw after
`torch.manual_seed(micro_batch_seed(seed, t, m))`. A stage that is computed again starts from the state it
had, and leaves buffers as they are.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.core.pipelines.order import RECEIVES, Action, Work, rank_of
from loadmaster.modules.randomness import derive_seed
from loadmaster.runtime.distributed.pipeline.buffers import copy_buffers, own_buffers
from loadmaster.runtime.distributed.pipeline.deferred_weights import DeferredWeights
from loadmaster.runtime.distributed.pipeline.module_stages import ModuleStage
from loadmaster.runtime.distributed.pipeline.parcels import Layout, make_layout, pack, unpack
from loadmaster.runtime.distributed.pipeline.stages import Stage
from loadmaster.runtime.distributed.transports import Pending, Transport, Waits

_AHEAD = 2  # receives that are begun before their turn
_LENGTH_BYTES = 8
_CPU = torch.device("cpu")


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """What a plain loop gives `torch.manual_seed` before a micro-batch to draw what the pipeline draws."""
    return derive_seed(seed, step=step, micro_batch=micro_batch, block=0)


@dataclass(frozen=True, slots=True)
class Span:
    """One action on this rank's clock."""

    action: Action
    start_s: float
    end_s: float


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch as a rank sees it."""

    number: int  # over all replicas: decides its random numbers
    leaves: Sequence[Any]
    shape: Any  # equal where the same graph runs
    stages: Mapping[int, Stage | ModuleStage]
    draws_later: Sequence[bool]
    finish: Callable[[tuple[Any, ...]], Any]  # of what the last stage gives: the scaled loss, or an output
    varies: bool = False  # what crosses may differ from one micro-batch to the next: stages of modules
    result: Any = None


@dataclass(slots=True)
class _Kept:
    """What a stage keeps of a micro-batch until its backward pass."""

    received: list[Any]
    given: list[Any]
    wants: list[bool]
    generators: tuple[torch.Tensor, ...] | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # as the pass began
    deferred: DeferredWeights | None = None


@dataclass(slots=True)
class Executor:
    """One rank's work; layouts are kept from step to step."""

    transport: Transport
    waits: Waits
    where: torch.device
    ranks: Sequence[int]  # [P] the ranks of this pipeline in the run, by place
    place: int
    num_stages: int
    seed: int
    recompute: frozenset[int] = frozenset()
    context: Callable[[], Any] | None = None  # autocast
    synchronize: bool = False  # GPUs are waited for after every action, so that spans are true
    trained: Mapping[Any, Sequence[bool]] = field(default_factory=dict)
    before: Callable[[Action], None] | None = None
    spans: list[Span] = field(default_factory=list)
    sizes: list[tuple[str, int, int]] = field(
        default_factory=list
    )  # of the last step: work, stage, bytes sent
    arrivals: list[Span] = field(default_factory=list)  # of the last step: waits for what others sent
    _layouts: dict[Any, Layout] = field(default_factory=dict)
    _kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    _ready: dict[tuple[Work, int, int], tuple[list[Any], list[bool]]] = field(default_factory=dict)
    _coming: dict[Action, Pending] = field(default_factory=dict)
    _leaving: deque[Pending] = field(default_factory=deque)
    _batches: Sequence[MicroBatch] = ()
    _step: int = 0
    _waited_s: float = 0.0
    _sent: list[tuple[str, int, int]] = field(default_factory=list)
    _arrived: list[Span] = field(default_factory=list)
    _grad: bool = True

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[MicroBatch],
        step: int,
        *,
        grad: bool = True,
        finally_: Callable[[Action], None] | None = None,
    ) -> None:
        """One step; `finally_` does what is no work of a micro-batch: sums and updates."""
        self._batches, self._step, self._grad = batches, step, grad
        spans: list[Span] = []
        self._sent, self._arrived = [], []
        for at, action in enumerate(actions):
            if self.before is not None:
                self.before(action)
            self._begin_receives(actions, at)
            begun, self._waited_s = time.monotonic(), 0.0
            if action.work in (Work.REDUCE, Work.UPDATE):
                if finally_ is not None:
                    finally_(action)
            else:
                self._do(action)
            if self.synchronize and self.where.type == "cuda":
                torch.cuda.synchronize(self.where)
            spans.append(Span(action, begun + self._waited_s, time.monotonic()))  # waits come first
        while self._leaving:
            self._leaving.popleft().wait()
        self._kept.clear()
        self._ready.clear()
        if any(batch.varies for batch in batches):
            self._layouts.clear()
        self._batches = ()
        if grad:  # what was measured is of training steps
            self.spans, self.sizes, self.arrivals = spans, self._sent, self._arrived

    def _do(self, action: Action) -> None:
        match action.work:
            case Work.FORWARD:
                self._forward(action.stage, action.microbatch)
            case Work.BACKWARD:
                self._backward(action.stage, action.microbatch)
            case Work.BACKWARD_INPUT:
                self._backward(action.stage, action.microbatch, defer=True)
            case Work.BACKWARD_WEIGHT:
                kept = self._kept.pop((action.stage, action.microbatch))
                if kept.deferred is not None:
                    kept.deferred.add()
            case Work.SEND_FORWARD | Work.SEND_BACKWARD:
                self._send(action)
            case Work.RECEIVE_FORWARD | Work.RECEIVE_BACKWARD:
                pass  # begun before; waited for where it is needed

    # ---------------------------------------------------------------------------------- computation

    def _forward(self, stage: int, number: int) -> None:
        batch = self._batches[number]
        received, wants = self._take(Work.RECEIVE_FORWARD, stage, number) if stage else ([], [])
        module = batch.stages[stage]
        states = tuple(received[module.num_received :])
        received = [
            one.requires_grad_() if want else one
            for one, want in zip(received[: module.num_received], wants, strict=False)
        ]
        self._set_generators(stage, batch, states)
        again = stage in self.recompute and self._grad
        before = _generator_states(self.where) if again else None
        deferred = DeferredWeights()
        buffers = copy_buffers(module.holder, module.written) if self._grad else {}
        own = own_buffers(module.holder, buffers, keep=True)
        with torch.set_grad_enabled(self._grad and not again), deferred.watching(), self._entered(), own:
            given = list(module(*received, leaves=batch.leaves))
            if stage == self.num_stages - 1:
                result = None if again else batch.finish(tuple(given))  # again: in the backward pass
                batch.result = result
                given = [result] if isinstance(result, torch.Tensor) else []
        trained = list(self.trained.get((batch.shape, stage), ())) if again else []
        if again and batch.varies:
            trained = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in given]
        asks = trained if trained else [isinstance(t, torch.Tensor) and t.requires_grad for t in given]
        if self._grad:
            kept = _Kept(received, [] if again else given, asks, before, buffers if again else {}, deferred)
            self._kept[stage, number] = kept
        if stage < self.num_stages - 1:
            tensors = [_require_tensor(one, stage) for one in given]
            states = _generator_states(self.where) if batch.draws_later[stage] else ()
            out = [one.detach() for one in tensors] + list(states)
            flags = [ask and self._grad for ask in asks] + [False] * len(states)
            self._ready[Work.SEND_FORWARD, stage, number] = out, flags

    def _backward(self, stage: int, number: int, *, defer: bool = False) -> None:
        kept = self._kept[stage, number]
        batch = self._batches[number]
        given = kept.given
        if kept.generators is not None:
            given = self._compute_again(stage, batch, kept)
        if stage == self.num_stages - 1:
            pairs = [(given[0], None)] if given and given[0].requires_grad else []
        else:
            grads, _ = self._take(Work.RECEIVE_BACKWARD, stage, number)
            wanting = [one for one, want in zip(given, kept.wants, strict=True) if want]
            pairs = [
                (one, grad)
                for one, grad in zip(wanting, grads, strict=True)
                if grad is not None and one.requires_grad
            ]
        if pairs:
            hold = kept.deferred if defer and kept.deferred is not None else DeferredWeights()
            with hold.holding() if defer else hold.adding():
                torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
        if stage:
            grads = [one.grad for one in kept.received if one.requires_grad]
            self._ready[Work.SEND_BACKWARD, stage, number] = grads, [False] * len(grads)
        kept.given, kept.received, kept.generators, kept.buffers = [], [], None, {}
        if not defer:
            del self._kept[stage, number]

    def _compute_again(self, stage: int, batch: MicroBatch, kept: _Kept) -> list[Any]:
        """The forward pass once more, with the same random numbers; buffers are left as they are."""
        module = batch.stages[stage]
        assert kept.generators is not None, "asked of stages that are computed again"
        now = _generator_states(self.where)
        buffers = [(one, one.clone()) for one in module.buffers()]
        _restore(kept.generators, self.where)
        deferred = kept.deferred or DeferredWeights()
        own = own_buffers(module.holder, kept.buffers, keep=False)
        with torch.enable_grad(), deferred.watching(), self._entered(), own:
            given = list(module(*kept.received, leaves=batch.leaves))
            if stage == self.num_stages - 1:
                batch.result = batch.finish(tuple(given))
                given = [batch.result]
        for one, value in buffers:
            one.data.copy_(value)  # the backward pass would refuse an average that was written since
        _restore(now, self.where)
        return given

    def _entered(self) -> Any:
        return nullcontext() if self.context is None else self.context()

    def _set_generators(self, stage: int, batch: MicroBatch, states: Sequence[Any]) -> None:
        if stage == 0 or batch.varies:
            seed = micro_batch_seed(self.seed, self._step, batch.number)
            torch.default_generator.manual_seed(seed)
            if self.where.type == "cuda":
                torch.cuda.default_generators[self.where.index or 0].manual_seed(seed)
        elif states:
            _restore(tuple(one.cpu().clone() for one in states), self.where)  # torch reads past a view's end

    # ------------------------------------------------------------------------------------- transfers

    def _take(self, work: Work, stage: int, number: int) -> tuple[list[Any], list[bool]]:
        """What another stage made for this one: from its rank, or from this rank itself."""
        forward = work == Work.RECEIVE_FORWARD
        source = stage - 1 if forward else stage + 1
        sent = Work.SEND_FORWARD if forward else Work.SEND_BACKWARD
        if rank_of(source, len(self.ranks)) == self.place:
            tensors, wants = self._ready.pop((sent, source, number))
            return [one if one is None else one.detach() for one in tensors], wants
        action, begun = Action(work, stage, number), time.monotonic()
        pending = self._coming.pop(action, None)
        layout = self._layouts.get(self._key(action))
        if layout is None:
            layout = self._receive_layout(action)
        if pending is None:
            pending = self._begin(action, layout)
        tensors = unpack(pending.wait(), layout) if layout.num_bytes else [None] * len(layout.entries)
        self._arrived.append(Span(action, begun, time.monotonic()))
        self._waited_s += self._arrived[-1].end_s - begun
        return list(tensors), [one.wants_grad for one in layout.entries]

    def _begin_receives(self, actions: Sequence[Action], at: int) -> None:
        """Begin the next receives, in their order, whose layout is known."""
        begun = 0
        for action in actions[at:]:
            if action.work not in RECEIVES:
                continue
            if action not in self._coming:
                layout = self._layouts.get(self._key(action))
                if layout is None:
                    return
                self._coming[action] = self._begin(action, layout)
            begun += 1
            if begun >= _AHEAD:
                return

    def _begin(self, action: Action, layout: Layout) -> Pending:
        source = self._partner(action)
        if not layout.num_bytes:
            return _Nothing()
        return self.transport.receive(
            layout.num_bytes, self.ranks[source], self._tag(action), self._words(action, source)
        )

    def _send(self, action: Action) -> None:
        tensors, wants = self._ready.pop((action.work, action.stage, action.microbatch))
        to, key = self._partner(action), self._key(action)
        words = self._words(action, to)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = make_layout(tensors, wants)
            text = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
            length = torch.tensor([text.numel()], dtype=torch.int64).view(torch.uint8)
            for piece in (length, text):
                moved = piece.to(self.where)
                self._leaving.append(self.transport.send(moved, self.ranks[to], self._tag(action), words))
        self._sent.append((action.work.value, action.stage, layout.num_bytes))
        if layout.num_bytes:
            data = pack(tensors, layout, self.where)
            self._leaving.append(self.transport.send(data, self.ranks[to], self._tag(action), words))

    def _receive_layout(self, action: Action) -> Layout:
        source = self._partner(action)
        words, tag = self._words(action, source), self._tag(action)
        length = self.transport.receive(_LENGTH_BYTES, self.ranks[source], tag, words).wait()
        size = int(length.cpu().view(torch.int64)[0])
        text = self.transport.receive(size, self.ranks[source], tag, words).wait()
        layout = self._layouts[self._key(action)] = Layout.decode(bytes(text.cpu().numpy()))
        return layout

    def _key(self, action: Action) -> Any:
        batch = self._batches[action.microbatch]
        number = action.microbatch if batch.varies else None
        return action.work, action.stage, batch.shape, self._grad, number

    def _tag(self, action: Action) -> int:
        backward = action.work in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
        received = action.work in RECEIVES
        first = action.stage - (received and not backward) + (received and backward)  # who sends
        return (first * 2 + backward) * 2**16 + action.microbatch % 2**16

    def _partner(self, action: Action) -> int:
        ahead = action.work in (Work.SEND_FORWARD, Work.RECEIVE_BACKWARD)
        return rank_of(action.stage + (1 if ahead else -1), len(self.ranks))

    def _words(self, action: Action, partner: int) -> str:
        """'the activations of micro-batch 3 from rank 0 (stage 1)'."""
        backward = action.work in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
        what = "gradients" if backward else "activations"
        other = action.stage + (1 if action.work in (Work.SEND_FORWARD, Work.RECEIVE_BACKWARD) else -1)
        rank = self.ranks[partner]
        if action.work in RECEIVES:
            return f"the {what} of micro-batch {action.microbatch} from rank {rank} (stage {other})"
        return f"rank {rank} (stage {other}) to take the {what} of micro-batch {action.microbatch}"


class _Nothing:
    """A parcel without tensors."""

    def wait(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


def _require_tensor(value: Any, stage: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise RunError(
            f"stage {stage} gives a {type(value).__name__}, and only tensors go from stage to stage"
        )
    return value


def _generator_states(where: torch.device) -> tuple[torch.Tensor, ...]:
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(where)) if where.type == "cuda" else (host,)


def _restore(states: Sequence[torch.Tensor], where: torch.device) -> None:
    torch.set_rng_state(states[0])
    if where.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], where)

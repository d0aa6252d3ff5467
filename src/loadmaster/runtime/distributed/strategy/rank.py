"""Rank: all that one process of a strategy owns: its rows, its weights and their optimizer.

    step      1 take own rows   2 forward and backward, gradients meet meanwhile   3 wait for the sums
              4 clip over all weights   5 update   6 send weights (ps)   7 compare copies now and then

Gradients are those of one process that computes the whole batch: every rank's loss counts by its share of the
rows (or by `weight`), and gradients are summed. Random numbers of rank's rows come from a seed of their own.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from loadmaster.core.errors import GraphError, InputError
from loadmaster.core.raised import shorten_error
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.modules.loss import compute_loss
from loadmaster.modules.named_optimizers import make_optimizer
from loadmaster.modules.randomness import preserve_generators
from loadmaster.runtime.distributed.pipeline.batches import count_rows, split_batch
from loadmaster.runtime.distributed.pipeline.rank import (
    TrainOptions,
    find_own_loss,
    has_own_loss,
    release_weights,
    with_target,
)
from loadmaster.runtime.distributed.strategy.clock import Clock
from loadmaster.runtime.distributed.strategy.drift import Drift
from loadmaster.runtime.distributed.strategy.factors import FACTOR_OPS, Factors
from loadmaster.runtime.distributed.strategy.gradients import Gradients, sets_of_ranks
from loadmaster.runtime.distributed.strategy.layout import (
    Meeting,
    RowShare,
    StrategyLayout,
    layout_of_strategy,
    shares_of_ops,
)
from loadmaster.runtime.distributed.strategy.segmented_forward import SegmentedForward
from loadmaster.runtime.distributed.strategy.segments import (
    Read,
    build_segment,
    cut_segments,
    require_same_ops,
)
from loadmaster.runtime.distributed.strategy.whole_forward import WholeForward
from loadmaster.runtime.distributed.strategy.wire import Wire
from loadmaster.runtime.distributed.transports import Waits
from loadmaster.runtime.graph_engine.free_batch import make_input_pattern
from loadmaster.runtime.graph_engine.gpu_autocast import autocast_for_export
from loadmaster.runtime.graph_engine.op_facts import collect_facts, is_random
from loadmaster.runtime.graph_engine.program import Program, export_program

BUCKET_BYTES = 25 * 2**20
COMPARE_EVERY = 100  # steps
_LARGEST_CHECKED_BYTES = 2 * 2**30
_CLOSE, _CLOSE_IN_16_BITS = 1e-3, 3e-2

Forward = WholeForward | SegmentedForward


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """What only strategies have; in a launched run these travel to the workers."""

    weight: Callable[[Any, Any], float] | None = None  # of (batch, target) of some rows; None: their number
    compare_every: int = COMPARE_EVERY  # steps between comparisons of copies; 0 = never
    bucket_bytes: int = BUCKET_BYTES
    verify: bool | None = None  # the first loss against the plain model's; None: where weights are few


@dataclass(slots=True)
class StrategyRank:
    """One process's part."""

    answer: StrategyAnswer
    model: nn.Module
    options: TrainOptions
    extras: StrategyOptions
    rank: int
    where: torch.device
    waits: Waits
    layout: StrategyLayout = field(init=False)
    wire: Wire = field(init=False)
    clock: Clock = field(init=False)
    optimizer: Any = None
    scheduler: Any = None
    steps_done: int = 0
    notes: list[str] = field(default_factory=list)
    grad_norm: float | None = None
    sent: dict[str, int] = field(default_factory=dict)  # bytes of the last step, by what they were for
    drift: Drift = field(init=False)
    _readers: Mapping[str, frozenset[int]] = field(default_factory=dict)  # shares, of weights and buffers
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    _gradients: Gradients | None = None
    _factors: Factors | None = None
    _built: dict[Any, Forward] = field(default_factory=dict)
    _waiting: list[Callable[[], object]] = field(default_factory=list)
    _is_checked: bool = False
    _fresh: bool = True  # gradients begin again with the next step

    def __post_init__(self) -> None:
        """Everything that needs no batch."""
        self.layout = layout_of_strategy(self.answer)
        self.wire = Wire(self.rank, self.where, self.waits)
        self.clock = Clock(self.where)
        self.drift = Drift(self.wire, self.extras.compare_every)
        self.notes.extend(f"differs from one device: {one}" for one in self.answer.strategy.semantics)

    # -------------------------------------------------------------------------------------- steps

    def step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None, *, update: bool = True
    ) -> float:
        """One training step; gives the loss, the mean over the rows of the whole batch."""
        self._check_first(args, kwargs, target)
        self.model.train()
        forward = self._forward_for(args, kwargs, training=True)
        assert self._gradients is not None, "made with the first forward"
        gradients = self._gradients
        if self._fresh and self.options.optimizer is not None:
            for weight in gradients.weights.values():  # of ps, too, which others step
                weight.grad = None
        self.clock.spans.clear()
        self.wire.take_counts()
        gradients.begin(meet=update) if gradients.is_settled else gradients.learn()
        with preserve_generators(self.where):
            value = self._run(forward, args, kwargs, target, grad=True)
        last = forward.final_share
        with self.clock.span("REDUCE", last):
            if self._factors is not None:
                self._factors.finish()
            if not gradients.is_settled:
                gradients.settle_with_all()
            if update:
                gradients.finish()
        if update:
            with self.clock.span("UPDATE", last):
                self._update(gradients)
        self._fresh = update
        self.wire.flush()
        self.sent = self.wire.take_counts()
        self.steps_done += 1
        if update and self.drift.is_due(self.steps_done):
            self.drift.check(self.own_parameters(), self._meetings)
            self.wire.take_counts()
        return self._sum_losses(forward, value)

    def _update(self, gradients: Gradients) -> None:
        if self.options.clip is not None:
            self.grad_norm = gradients.clip(self.options.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.options.optimizer is not None:
            gradients.send_weights()

    def evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> float:
        """The loss of a batch in eval mode, without gradients."""
        self.model.eval()
        try:
            forward = self._forward_for(args, kwargs, training=False)
            with torch.no_grad(), preserve_generators(self.where):
                value = self._run(forward, args, kwargs, target, grad=False)
            self.wire.flush()
        finally:
            self.model.train()
        return self._sum_losses(forward, value)

    def predict(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, Any]] | None:
        """What the model gives for this rank's rows, in eval mode; None: other ranks give it."""
        self.model.eval()
        try:
            forward = self._forward_for(args, kwargs, training=False, outputs=True)
            with torch.no_grad(), preserve_generators(self.where), self._cast():
                found = forward.run(
                    self._parts_of(args, kwargs),
                    lambda out: out,
                    None,
                    grad=False,
                    step=self.steps_done,
                )
            self.wire.flush()
        finally:
            self.model.train()
        final = forward.final
        if self.rank not in final.ranks or (final.whole and self.rank != final.ranks[0]):
            return None
        first = final.bounds(self.rank)[0]
        return [(first, tree_map_only(torch.Tensor, lambda one: one.detach().cpu(), found))]

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Get ready for inputs like these, so that weights are known."""
        self.model.train()
        self._forward_for(args, kwargs, training=True)

    def _run(self, forward: Forward, args: Any, kwargs: Any, target: Any, *, grad: bool) -> Any:
        finish = self._make_finish(forward.final, args, kwargs, target)
        with self._cast():
            return forward.run(
                self._parts_of(args, kwargs),
                finish,
                self._factors if grad else None,
                grad=grad,
                step=self.steps_done,
            )

    def _cast(self) -> Any:
        cast = self.options.autocast
        return nullcontext() if cast is None else torch.autocast(self.where.type, dtype=cast)

    def _shares(self, rows: int) -> tuple[RowShare, ...]:
        return tuple(one.scaled(rows, self.layout.batch) for one in self.layout.shares)

    def _parts_of(self, args: Any, kwargs: Any) -> Callable[[int], Any]:
        """This rank's rows of the inputs for each share."""
        given = (tuple(args), dict(sorted(kwargs.items())))
        shares = self._shares(count_rows(given))

        def part(share: int) -> Any:
            return _rows_of(given, shares[share], self.rank)

        return part

    def _make_finish(self, final: RowShare, args: Any, kwargs: Any, target: Any) -> Callable[[Any], Any]:
        """From what the model gives for this rank's rows to its part of the loss."""
        given = (tuple(args), dict(sorted(kwargs.items())))
        loss, where = self.options.loss, self.where

        def finish(out: Any) -> torch.Tensor:
            weight = 1.0 if final.whole else self._weigh(final, given, target)
            own = target if final.whole else _rows_of((given, target), final, self.rank)[1]
            if isinstance(out, torch.Tensor) and out.numel() == 1 and loss is None:
                found = out
            else:
                if loss is None and not torch.is_grad_enabled() and not has_own_loss(out):
                    raise InputError(
                        "the model gives no loss of its own, so there is nothing to evaluate; pass loss= to"
                        " lm.launch"
                    )
                found = compute_loss(out, with_target(loss, own, where))
            if found.numel() != 1:
                raise GraphError(f"the model's loss has shape {tuple(found.shape)}; it must be one number")
            return found.reshape(()) * weight

        return finish

    def _weigh(self, final: RowShare, given: Any, target: Any) -> float:
        """This rank's share of the loss."""
        own = self.extras.weight
        if own is None:
            return final.rows[final.ranks.index(self.rank)] / sum(final.rows)
        parts = [_rows_of((given, target), final, rank) for rank in final.ranks]
        weights = [float(own(_as_batch(part), wanted)) for part, wanted in parts]
        if min(weights) < 0 or sum(weights) <= 0:
            raise InputError(
                f"weight gives {weights} for the parts of a batch; needs numbers >= 0, not all 0"
            )
        return weights[final.ranks.index(self.rank)] / sum(weights)

    def _sum_losses(self, forward: Forward, value: Any) -> float:
        """Over all ranks; every rank learns it, so every rank is done."""
        final = forward.final
        counts = self.rank in final.ranks and (not final.whole or self.rank == final.ranks[0])
        own = float(value.detach()) if counts and isinstance(value, torch.Tensor) else 0.0
        total = torch.tensor([own], dtype=torch.float64)
        return float(self.wire.sum_everywhere(total, "all ranks to finish the step"))

    # -------------------------------------------------------------------------------------- getting ready

    def _forward_for(self, args: Any, kwargs: Any, *, training: bool, outputs: bool = False) -> Forward:
        """The forward pass for inputs of this shape."""
        given = (tuple(args), dict(sorted(kwargs.items())))
        key = make_input_pattern(tree_leaves(given)), training, outputs
        found = self._built.get(key)
        if found is None:
            rows = count_rows(given)
            found = self._built[key] = (
                self._build_whole(rows)
                if len(self.layout.shares) == 1
                else self._build_segments(given, rows, training=training, outputs=outputs)
            )
        return found

    def _build_whole(self, rows: int) -> WholeForward:
        if not self._readers:
            names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
            self._settle(dict.fromkeys(names, frozenset({0})))
        share = self._shares(rows)[0]
        return WholeForward(self.model, share, self.rank, self.where, self.clock, self.options.seed)

    def _build_segments(self, given: Any, rows: int, *, training: bool, outputs: bool) -> SegmentedForward:
        layout, graph, strategy = self.layout, self.answer.problem.graph, self.answer.strategy
        shares = self._shares(rows)
        own = {share.rows[share.ranks.index(self.rank)] for share in shares if self.rank in share.ranks}
        least = min(min(share.rows) for share in shares)
        reads = {count: self._export(given, count, rows, training=training) for count in {rows, least, *own}}
        for count, read in reads.items():
            require_same_ops(reads[rows].program, read.program, count)
        program = reads[rows].program
        flat = list(next(node for node in program.graph.nodes if node.op == "output").args[0])
        chosen = None if outputs or self.options.loss is not None else find_own_loss(program, len(flat))
        cut = cut_segments(
            reads[rows],
            reads[least] if least != rows else None,
            graph,
            shares,
            shares_of_ops(strategy, layout),
            chosen,
        )
        if not self._readers:
            self._settle(cut.readers)
        factors = self._factors
        stages = {}
        for s, segment in enumerate(cut.segments):
            share = shares[segment.share]
            if self.rank in share.ranks:
                read = reads[share.rows[share.ranks.index(self.rank)]]
                with_factors = factors is not None and training and bool(factors.share)
                stages[s] = build_segment(
                    read,
                    segment,
                    self.model,
                    where=self.where,
                    instead=self._find_factor_op if with_factors else None,
                )
        ops = program.ops
        random = frozenset(
            s for s, segment in enumerate(cut.segments) if any(is_random(ops[at]) for at in segment.ops)
        )
        forms = {at: found for at, node in enumerate(ops) if (found := reads[rows].facts.forms.get(node))}
        return SegmentedForward(
            cut,
            stages,
            shares,
            rows,
            forms,
            program.unflatten_outputs,
            chosen,
            self.rank,
            self.where,
            self.wire,
            self.clock,
            self.options.seed,
            random,
        )

    def _find_factor_op(self, node: Any) -> Any:
        """What runs instead of a layer whose gradient is made from factors."""
        instead, at = FACTOR_OPS.get(node.target, (None, 0))
        weight = node.args[at] if instead is not None and at < len(node.args) else None
        slot = getattr(weight, "meta", {}).get("slot")
        known = self._factors is not None and slot is not None and slot.name in self._factors.share
        return instead if known else None

    def _export(self, given: Any, count: int, rows: int, *, training: bool) -> Read:
        part = given if count == rows else split_batch(given, [count, rows - count])[0]
        cast = self.options.autocast
        entered = nullcontext() if cast is None else torch.autocast(self.where.type, dtype=cast)
        try:
            with entered, autocast_for_export(for_gpu=self.where.type == "cuda"):
                program: Program = export_program(self.model, *part, training=training, grad=training)
        except Exception as problem:  # torch and the user's model may raise anything
            raise GraphError(
                "the strategy has groups on different devices or rows, for which the model's graph is cut,"
                f" and this model cannot be exported: {shorten_error(problem)}; use a strategy with one group"
            ) from problem
        return Read(program, collect_facts(program))

    def _settle(self, readers: Mapping[str, frozenset[int]]) -> None:
        """Once: own weights go to the device, others are let go, copies are made equal."""
        self._readers, layout = readers, self.layout
        tensors = self._all_tensors()
        own = {name for name, shares in readers.items() if self._holds(shares)}
        for name, tensor in tensors.items():
            if name in own:
                tensor.data = tensor.data.to(self.where)
        trained = [name for name, one in self.model.named_parameters() if one.requires_grad]
        self._meetings = {
            name: layout.meeting_of(name, sorted(readers[name])) for name in trained if name in readers
        }
        holders = {name: self._ranks_of(name) for name in readers}
        self.wire.make_groups([*sets_of_ranks(list(self._meetings.values())), *holders.values()])
        release_weights(self.model, {name for name in readers if name not in own})
        self._equalise(holders)
        weights = {name: one for name, one in self.own_parameters().items() if name in self._meetings}
        self._gradients = Gradients(self.wire, weights, self._meetings, self.extras.bucket_bytes)
        made = {name: one for name, one in weights.items() if self._meetings[name].factors}
        self._factors = Factors(
            self.wire,
            {name: layout.shares[min(readers[name])] for name in made},
            {id(one): name for name, one in made.items()},
        )
        if self.options.optimizer is not None:
            stepped = [one for name, one in weights.items() if self._meetings[name].steps(self.rank)]
            if stepped:
                self.optimizer = make_optimizer(self.options.optimizer, stepped)
                if self.options.scheduler is not None:
                    self.scheduler = self.options.scheduler(self.optimizer)
        waiting, self._waiting = self._waiting, []
        for way in waiting:
            way()

    def _holds(self, shares: frozenset[int]) -> bool:
        return any(self.rank in self.layout.shares[share].ranks for share in shares)

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        shares = self._readers.get(name, frozenset())
        return tuple(sorted({rank for share in shares for rank in self.layout.shares[share].ranks}))

    def _equalise(self, holders: Mapping[str, tuple[int, ...]]) -> None:
        """Copies of a weight or buffer take the values of the first rank that has it."""
        tensors = self._all_tensors()
        by_ranks: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name in sorted(holders):
            if len(holders[name]) > 1:
                by_ranks.setdefault((holders[name], tensors[name].dtype), []).append(name)
        for (ranks, _), names in sorted(by_ranks.items(), key=lambda one: (one[0][0], str(one[0][1]))):
            if self.rank in ranks:
                self.wire.make_equal([tensors[name].data for name in names], ranks)

    # -------------------------------------------------------------------------------------- the first loss

    def _check_first(self, args: Any, kwargs: Any, target: Any) -> None:
        """Once: the loss of the first batch in eval mode, by the strategy and by the plain model."""
        if self._is_checked:
            return
        self._is_checked = True
        size = sum(one.nbytes for one in self.model.parameters())
        asked = self.extras.verify
        if asked is False or self.layout.world == 1:
            return
        if (asked is None and size > _LARGEST_CHECKED_BYTES) or self._readers:
            self.notes.append("the first loss was not compared with the plain model's; pass verify=True")
            return
        told = torch.zeros(2, dtype=torch.float64)
        if self.rank == 0:
            value = self._plain_loss(args, kwargs, target)
            if value is not None:
                told[:] = torch.tensor([1.0, value], dtype=torch.float64)
        told = self.wire.sum_everywhere(told, "rank 0 to compute the plain model's loss")
        if not told[0]:
            self.notes.append("the model gives no loss in eval mode, so the first one was not compared")
            return
        waiting, self._waiting = self._waiting, []  # a checkpoint is read after the comparison
        self.prepare(args, kwargs)  # what training reads decides which rank has what
        expected, found = float(told[1]), self.evaluate(args, kwargs, target)
        for way in waiting:
            way()
        close = _CLOSE if self.options.autocast is None else _CLOSE_IN_16_BITS
        if not abs(found - expected) <= close * max(abs(expected), 1e-6):
            raise InputError(
                f"the loss of the first batch is {found:.6g} by this strategy and {expected:.6g} by the plain"
                " model, so training would not be the same: the loss of the whole batch must be the mean over"
                " its rows. If parts count by something else (tokens), pass weight=; if rows depend on one"
                " another, duplicate or place that group"
            )

    def _plain_loss(self, args: Any, kwargs: Any, target: Any) -> float | None:
        home = next((one.device for one in self.model.parameters()), torch.device("cpu"))
        args, kwargs, target = tree_map_only(torch.Tensor, lambda one: one.to(home), (args, kwargs, target))
        self.model.eval()
        cast = self.options.autocast
        entered = nullcontext() if cast is None else torch.autocast(home.type, dtype=cast)
        try:
            with torch.no_grad(), preserve_generators(home), entered:
                out = self.model(*args, **kwargs)
                if self.options.loss is None and not has_own_loss(out):
                    return None
                return float(compute_loss(out, with_target(self.options.loss, target, home)))
        except InputError:
            raise
        except Exception:  # a model may not run in eval mode
            return None
        finally:
            self.model.train()

    # -------------------------------------------------------------------------------------- what it holds

    def _all_tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Weights that this rank has, by their first name."""
        return {
            name: one
            for name, one in self.model.named_parameters()
            if self._holds(self._readers.get(name, frozenset()))
        }

    def saved_names(self) -> set[str]:
        """Weights and buffers that this rank writes to checkpoints: those it steps, or has first."""
        found = set()
        for name in self._all_tensors():
            ranks = self._ranks_of(name) or (0,)  # what no op reads is kept by rank 0
            owner = self._meetings[name].owner if name in self._meetings else ranks[0]
            if owner == self.rank:
                found.add(name)
        return found

    def held_names(self) -> set[str]:
        """Weights and buffers that this rank has."""
        return {name for name in self._all_tensors() if self.rank in (self._ranks_of(name) or (0,))}

    def clocked(self, on: bool) -> None:
        """Whether GPUs are waited for after every span."""
        self.clock.synchronize = on

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        """Work, share, 0, begin and end of each span of the last step."""
        return [(one.work, one.share, 0, one.start_s, one.end_s) for one in self.clock.spans]

    def sent_sizes(self) -> list[tuple[str, int, int]]:
        """What it was for, 0 and bytes of what was sent in the last step."""
        return [(why, 0, size) for why, size in sorted(self.sent.items())]

    def plan_digest(self) -> str:
        """Of the strategy that is run."""
        return self.answer.digest

    def after_settling(self, way: Callable[[], object]) -> None:
        """Do something as soon as this rank has its weights."""
        if self._readers:
            way()
        else:
            self._waiting.append(way)


def _rows_of(given: Any, share: RowShare, rank: int) -> Any:
    """A rank's rows of a batch."""
    if share.whole:
        return given
    begin, end = share.bounds(rank)
    total = sum(share.rows)
    counts = [one for one in (begin, end - begin, total - end) if one]
    return split_batch(given, counts)[1 if begin else 0]


def _as_batch(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """A batch as the user gave it."""
    args, kwargs = given
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 else args

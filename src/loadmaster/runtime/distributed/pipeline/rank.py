"""Rank: all that one process of a pipeline owns: its stages, their optimizer, and its part of every step.

    step      1 split the batch   2 forward and backward of every micro-batch, in the order of the plan
              3 sum gradients over replicas and tied copies   4 clip over all stages   5 update

Gradients are those of one process that runs the micro-batches one after the other, each loss weighted by its
share of the rows. Batch norm sees micro-batches; each replica keeps running averages of its own.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointError

from loadmaster.core.errors import GraphError, InputError, PlanError, RunError
from loadmaster.core.pipelines.order import Action, Order, Work
from loadmaster.core.placement import Placement
from loadmaster.core.raised import shorten_error
from loadmaster.modules.loss import compute_loss
from loadmaster.modules.named_optimizers import make_optimizer
from loadmaster.runtime.distributed.pipeline.batches import count_rows, split_batch
from loadmaster.runtime.distributed.pipeline.executor import Executor, MicroBatch, Span
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout, layout_of
from loadmaster.runtime.distributed.pipeline.module_cut import ModuleCut, cut_modules
from loadmaster.runtime.distributed.pipeline.module_stages import ModuleStage
from loadmaster.runtime.distributed.pipeline.stage_cut import StageCut, cut_stages, describe_moves
from loadmaster.runtime.distributed.pipeline.stages import Stage, build_stage, find_deferrable
from loadmaster.runtime.distributed.transports import Transport, Waits
from loadmaster.runtime.graph_engine.free_batch import make_input_pattern
from loadmaster.runtime.graph_engine.gpu_autocast import autocast_for_export
from loadmaster.runtime.graph_engine.op_facts import collect_facts
from loadmaster.runtime.graph_engine.program import Program, export_program


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a pipeline trains; in a launched run these travel to the workers."""

    loss: Callable[..., torch.Tensor] | None = (
        None  # of what the model gives, and of the target if there is one
    )
    optimizer: Any = None  # a class, a name, or a function of a list of weights; None: gradients only
    scheduler: Callable[[Any], Any] | None = None  # makes one of the optimizer
    clip: float | None = None  # largest norm of all gradients together
    autocast: torch.dtype | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Built:
    """The stages of this rank for inputs of one shape."""

    program: Program | None  # None: the model is cut at module boundaries
    cut: StageCut | ModuleCut
    stages: Mapping[int, Stage | ModuleStage]
    chosen: int | None  # which output is the loss; None: the loss is made of all
    readers: Mapping[str, frozenset[int]]  # of every parameter: the stages that read it


@dataclass(slots=True)
class PipelineRank:
    """One process's part."""

    placement: Placement
    model: nn.Module
    options: TrainOptions
    rank: int
    where: torch.device
    transport: Transport
    waits: Waits
    layout: PipelineLayout = field(init=False)
    optimizer: Any = None
    scheduler: Any = None
    steps_done: int = 0
    notes: list[str] = field(default_factory=list)
    executor: Executor = field(init=False)
    grad_norm: float | None = None
    _built: dict[Any, _Built] = field(default_factory=dict)
    _orders: dict[bool, Order] = field(default_factory=dict)
    _readers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _leftovers: dict[str, torch.Tensor] = field(default_factory=dict)
    _waiting: list[Callable[[], object]] = field(default_factory=list)
    _module_cut: ModuleCut | None = None  # of a model that cannot be exported
    _checkpoints: bool = False  # whether the model itself computes parts again
    _frozen: list[nn.Module] = field(default_factory=list)  # modules that stay in eval mode while it trains

    def __post_init__(self) -> None:
        """Everything that needs no batch."""
        self.layout = layout_of(self.placement)
        if self.model.training:
            self._frozen = [one for one in self.model.modules() if not one.training]
        cast = self.options.autocast
        self.executor = Executor(
            self.transport,
            self.waits,
            self.where,
            self.layout.ranks(self.replica),
            self.place,
            self.layout.num_stages,
            self.options.seed,
            recompute=self.layout.recompute,
            context=None if cast is None else lambda: torch.autocast(self.where.type, dtype=cast),
        )

    @property
    def replica(self) -> int:
        """Which copy of the pipeline."""
        return self.rank // self.layout.num_places

    @property
    def place(self) -> int:
        """Which rank of its copy."""
        return self.rank % self.layout.num_places

    @property
    def own_stages(self) -> range:
        """Stages of this rank."""
        return range(self.place, self.layout.num_stages, self.layout.num_places)

    # -------------------------------------------------------------------------------------- steps

    def step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None, *, update: bool = True
    ) -> float:
        """One training step; gives the loss, the mean over the rows of the whole batch."""
        self._enter_training()
        batches = self._make_batches(args, kwargs, target, training=True)
        if self.optimizer is not None and update:
            self.optimizer.zero_grad(set_to_none=True)
        with _kept_generators(self.where), self._explain_own_recomputation():
            self.executor.run(
                self._order(train=True)[self.place],
                batches,
                self.steps_done,
                finally_=lambda action: self._finish(action, update=update),
            )
        self.steps_done += 1
        return self._sum_losses(batches)

    def evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> float:
        """The loss of a batch in eval mode, without gradients."""
        self.model.eval()
        try:
            batches = self._make_batches(args, kwargs, target, training=False)
            with _kept_generators(self.where):
                order = self._order(train=False)[self.place]
                self.executor.run(order, batches, self.steps_done, grad=False)
        finally:
            self._enter_training()
        return self._sum_losses(batches)

    def predict(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, Any]] | None:
        """What the model gives for every micro-batch of this replica, in eval mode; None: not the last."""
        self.model.eval()
        try:
            batches = self._make_batches(args, kwargs, None, training=False, outputs=True)
            with _kept_generators(self.where):
                order = self._order(train=False)[self.place]
                self.executor.run(order, batches, self.steps_done, grad=False)
        finally:
            self._enter_training()
        if self.layout.num_stages - 1 not in self.own_stages:
            return None
        to_host = tree_map_only(torch.Tensor, lambda one: one.detach().cpu(), [one.result for one in batches])
        return list(zip([one.number for one in batches], to_host, strict=True))

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Cut the model for inputs like these, so that its weights are known."""
        self._enter_training()
        self._make_batches(args, kwargs, None, training=True)

    @contextmanager
    def _explain_own_recomputation(self) -> Iterator[None]:
        """What torch.utils.checkpoint computes again must be of one stage: other stages' weights are gone."""
        try:
            yield
        except RuntimeError as problem:
            if not self._checkpoints or not (isinstance(problem, CheckpointError) or "meta" in str(problem)):
                raise
            raise RunError(
                "the plan cuts the model inside of a part that the model recomputes by itself"
                " (torch.utils.checkpoint). Turn that off, for example by"
                " model.gradient_checkpointing_disable(): the plan recomputes stages if memory is short"
            ) from problem

    def _enter_training(self) -> None:
        """As the model was given: a batch norm that its user has frozen stays so."""
        self.model.train()
        for module in self._frozen:
            module.training = False

    def _order(self, *, train: bool) -> Order:
        if train not in self._orders:
            self._orders[train] = self.layout.actions(self.rank, train=train)
        return self._orders[train]

    def _make_batches(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        *,
        training: bool,
        outputs: bool = False,
    ) -> list[MicroBatch]:
        """This replica's micro-batches, each with the stages for its shape."""
        given = (tuple(args), dict(sorted(kwargs.items())))
        total = count_rows(given)
        rows = self.layout.split_rows(total)
        parts = split_batch((*given, target), rows)
        first = sum(self.layout.micro_batches[: self.replica])
        shapes: dict[Any, Any] = {}
        for part in parts:  # every rank makes every shape, in one order: making one may need all ranks
            leaves = tree_leaves(part[:2])
            shapes.setdefault((make_input_pattern(leaves), training, outputs), part[:2])
        for key, part in shapes.items():
            if key not in self._built:
                self._built[key] = self._build(*part, outputs=outputs, training=training)
        made = []
        for number in range(first, first + self.layout.micro_batches[self.replica]):
            part = parts[number]
            leaves = tree_leaves(part[:2])
            key = (make_input_pattern(leaves), training, outputs)
            built = self._built[key]
            finish = self._make_finish(built, part[2], rows[number] / total, outputs=outputs)
            made.append(
                MicroBatch(
                    number,
                    leaves,
                    list(self._built).index(key),
                    built.stages,
                    built.cut.draws_later,
                    finish,
                    varies=built.program is None,
                )
            )
        return made

    def _make_finish(
        self, built: _Built, target: Any, share: float, *, outputs: bool
    ) -> Callable[[tuple[Any, ...]], Any]:
        loss, chosen, program, where = self.options.loss, built.chosen, built.program, self.where

        def finish(given: tuple[Any, ...]) -> Any:
            out = given[0] if program is None else None
            if outputs:
                return out if program is None else program.unflatten_outputs(given)
            if chosen is not None:
                found = given[chosen]
            else:
                if loss is None and not torch.is_grad_enabled() and not has_own_loss(out):
                    raise InputError(
                        "the model gives no loss of its own, so there is nothing to evaluate; pass loss= to"
                        " lm.launch"
                    )
                out = out if program is None else program.unflatten_outputs(given)
                found = compute_loss(out, with_target(loss, target, where))
            if found.numel() != 1:
                raise GraphError(f"the model's loss has shape {tuple(found.shape)}; it must be one number")
            return found.reshape(()) * share

        return finish

    def _sum_losses(self, batches: Sequence[MicroBatch]) -> float:
        """Over all micro-batches of all replicas; every rank learns it, so every rank is done."""
        own = sum(float(one.result.detach()) for one in batches if isinstance(one.result, torch.Tensor))
        total = torch.tensor([own], dtype=torch.float64)
        if self.layout.world > 1:
            self.transport.sum([total], None, "all ranks to finish the step")
        return float(total)

    # -------------------------------------------------------------------------------------- stages

    def _build(self, args: Any, kwargs: dict[str, Any], *, outputs: bool, training: bool) -> _Built:
        if self._module_cut is not None:
            return self._build_of_modules(args, kwargs)
        cast = self.options.autocast
        entered = nullcontext() if cast is None else torch.autocast(self.where.type, dtype=cast)
        try:
            with entered, autocast_for_export(for_gpu=self.where.type == "cuda"):
                program = export_program(self.model, args, kwargs, training=training, grad=training)
        except Exception as problem:  # torch and the user's model may raise anything
            return self._build_of_modules(args, kwargs, problem)
        facts = collect_facts(program)
        flat = list(next(node for node in program.graph.nodes if node.op == "output").args[0])
        chosen = None if outputs or self.options.loss is not None else find_own_loss(program, len(flat))
        if chosen is not None:
            flat = [one if at == chosen else None for at, one in enumerate(flat)]
        plan = self.placement.plan
        assert plan is not None, "it has a pipeline"
        needed = [one for one in flat if isinstance(one, fx.Node)]
        cut = cut_stages(program, facts, self.placement.problem.graph, plan, needed)
        moved = describe_moves(cut)
        if moved and moved not in self.notes:
            self.notes.append(moved)
        readers = _find_readers(program, cut, needed)
        if not self._readers:
            self._settle(readers)
        stages = {
            index: build_stage(
                program,
                facts,
                cut,
                index,
                self.model,
                where=self.where,
                outputs=flat,
                instead=find_deferrable if training and self.layout.schedule.startswith("zb") else None,
            )
            for index in self.own_stages
        }
        for index, stage in stages.items():
            lacking = [
                name for name, one in (*stage.named_parameters(), *stage.named_buffers()) if one.is_meta
            ]
            if lacking:
                raise RunError(
                    f"stage {index} reads {lacking[0]!r}, which belongs to another stage in training"
                )
        if training:
            shape = len(self._built)
            trained = {
                (shape, s): [node in facts.trained for node in cut.crossing[s]]
                for s in range(cut.num_stages - 1)
            }
            self.executor.trained = {**self.executor.trained, **trained}
        return _Built(program, cut, stages, chosen, readers)

    def _build_of_modules(
        self, args: Any, kwargs: dict[str, Any], problem: Exception | None = None
    ) -> _Built:
        """Stages of a model that cannot be exported: cut where its modules begin and end."""
        plan, why = self.placement.plan, "" if problem is None else shorten_error(problem)
        assert plan is not None, "it has a pipeline"
        if self._module_cut is None:
            if self._readers:
                raise GraphError(f"the model cannot be exported for these inputs: {why}") from problem
            home = next((one.device for one in self.model.parameters()), torch.device("cpu"))
            given = tree_map_only(torch.Tensor, lambda one: one.to(home), (args, kwargs))
            graph = self.placement.problem.graph
            try:
                self._module_cut = cut_modules(self.model, graph, plan, *given)
            except Exception as failure:
                raise GraphError(
                    f"the model cannot be exported ({why}), and its forward fails: {shorten_error(failure)}"
                ) from failure
            self._checkpoints = "torch.utils.checkpoint" in why
            self.notes.append(f"the model is cut at module boundaries, since it cannot be exported: {why}")
        cut = self._module_cut
        if cut.counted and self.layout.num_stages > self.layout.num_places:
            raise PlanError(
                f"the model's forward changes {cut.counted[0]!r} outside of the modules that are cut, so each"
                " process can have one stage only; plan without --pipeline interleaved"
            )
        if not self._readers:
            self._settle(cut.readers)
        spec = tree_flatten((args, kwargs))[1]
        stages = {s: ModuleStage(s, cut, self.model, spec, self.where) for s in self.own_stages}
        return _Built(None, cut, stages, None, cut.readers)

    def _settle(self, readers: Mapping[str, frozenset[int]]) -> None:
        """Once: own weights go to the device, others are let go, copies are made equal."""
        self._readers = readers
        own = {name for name, stages in readers.items() if stages & set(self.own_stages)}
        self._make_groups()
        for name, tensor in self._all_tensors().items():
            if name in own:
                tensor.data = tensor.data.to(self.where)
        if self.rank == 0:  # what no op reads is kept for checkpoints
            self._leftovers = {
                name: tensor for name, tensor in self._all_tensors().items() if name not in readers
            }
        elsewhere = {name for name in readers if name not in own}
        release_weights(self.model, elsewhere)
        self._equalise(own)
        if self.options.optimizer is not None:
            weights = [one for one in self.own_parameters().values() if one.requires_grad]
            if weights:
                self.optimizer = make_optimizer(self.options.optimizer, weights)
                if self.options.scheduler is not None:
                    self.scheduler = self.options.scheduler(self.optimizer)
        waiting, self._waiting = self._waiting, []
        for way in waiting:
            way()

    def _all_tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Weights of this rank's stages by their first name."""
        own = set(self.own_stages)
        return {
            name: one
            for name, one in self.model.named_parameters()
            if self._readers.get(name, frozenset()) & own
        }

    def saved_names(self) -> set[str]:
        """Weights and buffers that this rank writes to checkpoints: the first place that has one does."""
        if self.replica:
            return set()
        found = {name for name in self._readers if self.places_of(name)[:1] == (self.place,)}
        return found | set(self._leftovers)

    def held_names(self) -> set[str]:
        """Weights and buffers that this rank has."""
        found = {name for name in self._readers if self.place in self.places_of(name)}
        return found | set(self._leftovers)

    def clocked(self, on: bool) -> None:
        """Whether GPUs are waited for after every action."""
        self.executor.synchronize = on

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        """Work, stage, micro-batch, begin and end of each action of the last step."""
        return _as_rows(self.executor.spans)

    def arrivals(self) -> list[tuple[str, int, int, float, float]]:
        """The same of each wait for what another rank sent; it ends when that is there."""
        return _as_rows(self.executor.arrivals)

    def sent_sizes(self) -> list[tuple[str, int, int]]:
        """Work, stage and bytes of what was sent in the last step."""
        return list(self.executor.sizes)

    def plan_digest(self) -> str:
        """Of the plan that is run."""
        return self.placement.digest

    def after_settling(self, way: Callable[[], object]) -> None:
        """Do something as soon as this rank has its weights."""
        if self._readers:
            way()
        else:
            self._waiting.append(way)

    def places_of(self, name: str) -> tuple[int, ...]:
        """The places of a pipeline that have a weight or buffer."""
        return tuple(sorted({stage % self.layout.num_places for stage in self._readers.get(name, ())}))

    def _make_groups(self) -> None:
        """A group for every set of places that share a weight, over all replicas; all ranks make all."""
        layout, sets = self.layout, set()
        for name in self._readers:
            sets.add(self.places_of(name))
        for places in sorted(sets):
            members = sorted(r * layout.num_places + p for r in range(layout.num_replicas) for p in places)
            if len(members) > 1:
                self._groups[places] = dist.new_group(members, backend="gloo")
        for replica in range(layout.num_replicas):
            group = dist.new_group(list(layout.ranks(replica)), backend="gloo") if layout.world > 1 else None
            if replica == self.replica:
                self._groups[(-1,)] = group

    def _by_places(self, names: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
        """Names by the set of places that have them, in one order on all ranks."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            places = self.places_of(name)
            if places in self._groups and self.place in places:
                found.setdefault(places, []).append(name)
        return dict(sorted(found.items()))

    def _equalise(self, own: set[str]) -> None:
        """Copies of a weight or buffer take the values of the first rank that has it."""
        tensors = self._all_tensors()
        for places, names in self._by_places(sorted(own)).items():
            some = [tensors[name].data for name in names]
            if self.rank != places[0]:
                for one in some:
                    one.zero_()
            self.transport.sum(some, self._groups[places], "the first values of shared weights")

    # -------------------------------------------------------------------------------- sums and updates

    def _finish(self, action: Action, *, update: bool) -> None:
        if action.stage != self.own_stages[-1]:  # once for all stages of the rank, after the last
            return
        if action.work == Work.REDUCE:
            self._reduce()
        elif action.work == Work.UPDATE and update:
            self._update()

    def _reduce(self) -> None:
        """Sum gradients of weights that several ranks have: replicas, and tied weights of several stages."""
        weights = {name: one for name, one in self.own_parameters().items() if one.requires_grad}
        for places, names in self._by_places(sorted(weights)).items():
            for name in names:
                if weights[name].grad is None:
                    weights[name].grad = torch.zeros_like(weights[name])
            grads = [weights[name].grad for name in names]
            self.transport.sum(
                [one for one in grads if one is not None],
                self._groups[places],
                f"the gradients of {names[0]!r} from ranks that share it",
            )

    def _update(self) -> None:
        if self.options.clip is not None:
            self._clip(self.options.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _clip(self, largest: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` over the whole model; a shared weight counts once."""
        squares = torch.zeros(1, dtype=torch.float64)
        for name, one in self.own_parameters().items():
            if one.grad is not None and self.places_of(name)[0] == self.place:
                squares += one.grad.detach().double().norm().cpu() ** 2
        if self.layout.num_places > 1:
            self.transport.sum([squares], self._groups[(-1,)], "the norm of gradients of all stages")
        self.grad_norm = math.sqrt(float(squares))
        factor = min(1.0, largest / (self.grad_norm + 1e-6))
        for one in self.own_parameters().values():
            if one.grad is not None:
                one.grad.mul_(factor)


def _as_rows(spans: Sequence[Span]) -> list[tuple[str, int, int, float, float]]:
    return [
        (one.action.work.value, one.action.stage, one.action.microbatch, one.start_s, one.end_s)
        for one in spans
    ]


def with_target(loss: Any, target: Any, where: torch.device) -> Any:
    """The loss as a function of what the model gives alone."""
    if target is None:
        return loss
    if loss is None:
        raise InputError("a target was given, but no loss to compare it in; pass loss= to lm.launch")
    moved = tree_map_only(torch.Tensor, lambda one: one.to(where), target)
    return lambda out: loss(out, moved)


def find_own_loss(program: Program, num_outputs: int) -> int | None:
    """Which output is the model's own loss; None where it has none."""
    marks = [torch.empty(0) for _ in range(num_outputs)]
    try:
        out = program.unflatten_outputs(marks)
    except Exception:  # outputs that are made of real tensors
        return None
    own = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    return next((at for at, mark in enumerate(marks) if mark is own), None)


def has_own_loss(out: Any) -> bool:
    """Whether what a model gives has a loss in it."""
    own = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    return isinstance(own, torch.Tensor) and own.numel() == 1


def _find_readers(program: Program, cut: StageCut, outputs: Sequence[fx.Node]) -> dict[str, frozenset[int]]:
    """The stages that read each weight and buffer, by its first name."""
    found: dict[str, frozenset[int]] = {}
    for node in program.inputs:
        if node.meta["slot"].kind != "weight":
            continue
        stages = {cut.stage[user] for user in node.users if user in cut.stage}
        if node in outputs:
            stages.add(cut.num_stages - 1)
        if stages:
            found[node.meta["slot"].name] = frozenset(stages)
    return found


def release_weights(model: nn.Module, names: set[str]) -> None:
    """Tensors of other ranks keep their shape and lose their memory; tied names stay tied."""
    gone: dict[int, torch.Tensor] = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in names:
        one = tensors[name]
        empty = torch.empty_like(one, device="meta")
        gone[id(one)] = (
            nn.Parameter(empty, requires_grad=one.requires_grad) if isinstance(one, nn.Parameter) else empty
        )
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for own, tensor in table.items():
                if tensor is not None and id(tensor) in gone:
                    table[own] = gone[id(tensor)]


class _kept_generators:  # noqa: N801
    """The generators go on afterwards as if nothing had been drawn."""

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state(self._where) if self._where.type == "cuda" else None

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device, self._where)

"""Placed: a model of the user's own class whose forward runs a plan; weights, names and modes are its own."""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import DeviceMemoryError, InputError, PlanError, RunError, VerifyError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.graph.origin import reason_of
from loadmaster.modules.checkpoint import Checkpoint
from loadmaster.modules.materialise import is_meta, materialise
from loadmaster.runtime.adoption import Move, Residents
from loadmaster.runtime.explain import describe_prediction, explain_engine
from loadmaster.runtime.finite_loss import WARN, FiniteCheck
from loadmaster.runtime.graph_engine.assignment import PlanIndex, index_plan
from loadmaster.runtime.graph_engine.engine import CannotExportError, GraphEngine, ReadyGraph, refuse_python
from loadmaster.runtime.hook_engine.engine import HookEngine
from loadmaster.runtime.optimizers import Optimizers
from loadmaster.runtime.outputs import mark_outputs
from loadmaster.runtime.shortage import (
    Replan,
    find_full_device,
    find_plan_that_fits,
    make_memory_error,
    peak_allocated_bytes,
)
from loadmaster.runtime.spill.weight_loads import Spill
from loadmaster.runtime.transport.byte_accounts import Accounts
from loadmaster.runtime.transport.device_streams import PartStreams
from loadmaster.runtime.transport.devices import RunDevice, locate_devices
from loadmaster.runtime.verify.unplaced import BatchError, Loss
from loadmaster.runtime.verify.verification import Verification, compare_batch

AUTO, GRAPH, HOOKS = "auto", "graph", "hooks"
_TURN = "_loadmaster_turn"  # how often a model was placed
ENGINES = (AUTO, GRAPH, HOOKS)
_COMPILE = (
    "torch.compile cannot compile a placed model: it would trace the engine that runs the plan; compile"
    " the parts of the plan instead, lm.place(..., compile=True)"
)
_STAYS = (
    "a placed model stays where its plan put it; move or cast the model before it is placed (inputs may be on"
    " any device)"
)


@dataclass(frozen=True, slots=True)
class Options:
    """How a placed model runs."""

    engine: str = AUTO
    presum: bool = False
    output_device: torch.device | None = None
    loss: Loss | None = None
    verify: bool = False  # the first batch is compared with the unplaced model
    on_nan: str | None = WARN
    compile: str = ""  # torch.compile's backend for parts on one device, '' = not compiled

    def for_graph(self, graph: Graph) -> "Options":
        """A graph that was traced has no ops to run, only modules."""
        if not graph.capture.startswith(("traced", "estimated")):
            return self
        if self.engine == GRAPH:
            raise PlanError(
                f"there is no graph to run: {_explain_trace(graph)}; leave engine out, or choose 'hooks'"
            )
        return replace(self, engine=HOOKS)


class _NotCompiled:
    """Stands where torch.compile looks for what it is given (`placed.forward`), and refuses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """It is never run."""
        raise RunError(_COMPILE)

    def __eq__(self, other: object) -> bool:
        """Newer versions of torch ask first whose wrapper it is."""
        raise RunError(_COMPILE)

    __hash__ = object.__hash__

    @property
    def _torchdynamo_orig_callable(self) -> Any:  # older ones look behind it
        raise RunError(_COMPILE)


class Placed(nn.Module):
    """Stands before the class of the user's model: `type(placed)` is a subclass of both."""

    _engine: GraphEngine
    _hooks: HookEngine
    _optimizers: Optimizers
    _residents: Residents
    _options: Options
    _finite: FiniteCheck | None
    _to_verify: bool
    hf_device_map: dict[str, torch.device]
    _placement: Placement | None = None
    _replan: Replan | None = None
    _why_hooks: str = ""  # why hooks run the model, or ran its last call; '' = the graph engine does
    _needed: list[int] | None = None  # [D] after a whole device was full: what stood there and was asked for

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, computed where the plan says."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RunError(
                "a placed model cannot run under torch.func (vmap, grad, jvp): copies between devices have no"
                " rules for it; use the model itself there"
            )
        if self._to_verify and self.training:
            self._to_verify = False
            try:
                found = self.verify(*args, **kwargs)
            except BatchError as problem:  # in the user's own loop it is the model's own error
                raise problem.__cause__ or problem from None
            if not found.ok:
                raise VerifyError(f"the first batch, placed and unplaced: {found}")
        looks = self._finite if self.training and torch.is_grad_enabled() else None
        if looks is not None:
            looks.begin()
        graph = self._graph(args, kwargs)
        try:
            out = self._engine.run(*graph) if graph is not None else self._hooks(args, kwargs)
        except torch.OutOfMemoryError as problem:
            raise self.full(problem) from problem
        if looks is not None:
            looks.loss(out)
        return mark_outputs(out, (args, kwargs))

    def verify(self, *args: Any, seed: int = 0, **kwargs: Any) -> Verification:
        """One batch compared with the unplaced model; nothing changes."""
        engine = self._hooks if self._graph(args, kwargs) is None else self._engine
        return compare_batch(engine, args, kwargs, loss=self._options.loss, seed=seed)

    def _graph(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ReadyGraph, list[Any]] | None:
        """The graph for these arguments and their leaves; None is said in the notes: hooks run it."""
        self._adopt_new()
        if self._options.engine == HOOKS:
            return None
        try:
            refuse_python(self)
            found = self._engine.ready(args, kwargs)
            self._why_hooks = ""
            return found
        except CannotExportError as problem:
            if self._options.engine == GRAPH:
                raise
            self._why_hooks = str(problem)
            self._engine.say(f"run by hooks on modules, not as a graph: {problem}")
        if self._hooks.settle():
            self._engine.forget()
        self._say_what_hooks_move()
        return None

    def _adopt_new(self) -> None:
        """Modules and weights that came after placing, or have other names, get their device."""
        new = self._residents.adopt_new()
        if new is None:
            return
        self._engine.adopt(new)
        self._optimizers.name_weights(self)
        devices = self._engine.devices
        self.hf_device_map = {name: devices[home].where for name, home in self._engine.homes.items()}

    def _say_what_hooks_move(self) -> None:
        """A plan of single ops is not what hooks run: its predictions are not theirs."""
        num_moved = self._hooks.count_moved_ops()
        if num_moved:
            self._engine.say(
                f"hooks run {num_moved} ops on other devices than the plan, with their modules: its predicted"
                " time and peaks are not those of this run (lm.place(model, inputs) plans for hooks)"
            )

    def adopt(self, optimizer: Any) -> None:
        """Move the state of an optimizer that was made before to where its weights are now."""
        self._optimizers.adopt(optimizer)

    def plan_that_fits(self) -> Placement:
        """After a device was full: the nearest plan that leaves room for what was missing there."""
        accounts = self._engine.accounts
        needed = self._needed if accounts is None else accounts.most_needed_bytes
        return find_plan_that_fits(self.placement, needed, self._replan)

    def full(self, problem: torch.OutOfMemoryError) -> DeviceMemoryError:
        """Torch's error as ours, for a loop that catches it in its backward pass: `raise placed.full(e)`."""
        devices = self._engine.devices
        at, tried = find_full_device(problem, devices)
        held = [peak_allocated_bytes(device) for device in devices]
        known = self._placement.peak_bytes.tolist() if self._placement is not None else None
        self._needed = list(held)
        self._needed[at] += tried
        return make_memory_error(
            devices[at],
            held_bytes=held[at],
            tried_bytes=tried,
            predicted_bytes=None if known is None else known[at],
        )

    @property
    def placement(self) -> Placement:
        """What `lm.plan` gave: for `lm.save` and `lm.verify`."""
        if self._placement is None:
            raise RunError("this model was placed without its placement; use lm.place")
        return self._placement

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to differ from the plan, and what was made again."""
        return tuple(self._engine.notes)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that ever stood on each logical device."""
        accounts = self._engine.accounts
        if accounts is None:
            return {}
        return {d.name: peak for d, peak in zip(accounts.devices, accounts.peak_bytes, strict=True)}

    def explain(self) -> str:
        """Which engine runs and why, and where everything is, in a few lines."""
        where = explain_engine(self._engine, self._hooks if self._why_hooks else None, self._why_hooks)
        predicted = describe_prediction(self._placement)
        return f"{where}\n{predicted}" if predicted else where

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """It is where its plan has it."""
        raise RunError(_STAYS)

    cuda = cpu = to

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """A compiler around it would look into the engine; parts of the plan can be compiled."""
        raise RunError(_COMPILE)

    @property
    def _torchdynamo_orig_callable(self) -> Any:  # what torch.compile asks first
        raise RunError(_COMPILE)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """A module around it may be moved, as trainers do: this part stays. Nothing may cast it."""
        for weight in self.parameters():
            probe = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
            if probe.dtype != weight.dtype:
                raise RunError(_STAYS)
        self._engine.say("a module around the placed model was moved; the placed model stayed")
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy would share the plan's weights."""
        raise RunError(
            "a placed model cannot be copied; copy the model itself before it is placed (so does"
            " AveragedModel(model)), or copy it later and place the copy"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Only its state can be saved."""
        raise RunError("a placed model cannot be pickled; save placed.state_dict(), it loads into the model")


def build_placed_model(
    model: nn.Module,
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    predicted_bytes: list[int] | None = None,
    options: Options | None = None,
    weights: Checkpoint | None = None,
) -> Placed:
    """The model on the devices of a plan; its weights move there, or are made there (from `weights`)."""
    if isinstance(model, Placed):
        raise InputError("the model is placed already; place the original model")
    devices, known = locate_devices(cluster), index_plan(graph, plan)
    if (known.spilled or known.stashing) and options is not None and options.compile:
        raise PlanError("the plan spills weights, which compiled parts cannot load; leave one of them out")
    require_weights(model, graph)
    homes = _find_homes(model, known)
    accounts = Accounts(devices) if any(device.logical for device in devices) else None
    if accounts is not None:
        accounts.predicted_bytes = list(predicted_bytes or [])
    model.__dict__[_TURN] = model.__dict__.get(_TURN, 0) + 1
    optimizers = Optimizers(model, accounts, homes, _make_turn_check(model))
    if weights is not None or is_meta(model):
        materialise(
            model,
            lambda name, tensor: _move_tensor(name, tensor, homes[name], devices, accounts),
            weights=weights,
        )
    _move_weights(model, homes, devices, accounts)
    spill = _make_spill(model, known, devices, accounts)
    made = _make_placed_instance(model)
    chosen = (options or Options()).for_graph(graph)
    shared: dict[str, Any] = {
        "model": model,
        "root": made,
        "known": known,
        "devices": devices,
        "homes": homes,
        "accounts": accounts,
        "output_device": chosen.output_device,
    }
    streams = PartStreams(devices if accounts is not None and spill is None else ())
    made._engine = GraphEngine(
        **shared, presum=chosen.presum, backend=chosen.compile, spill=spill, streams=streams
    )
    made._engine.only_graphs = chosen.engine == GRAPH
    made._hooks = HookEngine(**shared, notes=made._engine.notes)
    made._residents = Residents(made, homes, made._hooks.places, _make_mover(made, accounts))
    made._optimizers, made._options, made._to_verify = optimizers, chosen, chosen.verify
    if chosen.engine == HOOKS and (options is None or options.engine != HOOKS):
        made._why_hooks = _explain_trace(graph)
        made._engine.say(f"run by hooks on modules, not as a graph: {made._why_hooks}")
    elif chosen.engine == HOOKS:
        made._why_hooks = "engine='hooks' was asked for"
    if chosen.engine == HOOKS:
        made._say_what_hooks_move()
    made._finite = FiniteCheck(chosen.on_nan) if chosen.on_nan is not None else None
    if made._finite is not None:
        made._finite.watch(model)
    # transformers and accelerate leave a model alone that has more than one entry here
    made.hf_device_map = {name: devices[home].where for name, home in homes.items()}
    # what accelerate puts around the placed model's forward (mixed precision) is not the model's own
    wrapped = {"forward", "_original_forward"}
    made._engine.ours = (
        frozenset(vars(made)) - frozenset(vars(model)) | {_TURN, "_needed", "_why_hooks"} | wrapped
    )
    optimizers.watch(together=spill is None)  # the host's part of many weights at once takes much memory
    if accounts is not None:
        _count_gradients(made, model, homes, accounts)
    return made


def _explain_trace(graph: Graph) -> str:
    """Why a traced graph cannot be run op by op."""
    reason = reason_of(graph)
    if not reason:
        return "the model was captured with path='traced', which gives no graph to run"
    return f"when it was planned, torch.export could not make a graph of the model ({reason})"


def _make_placed_instance(model: nn.Module) -> Placed:
    """A module with the model's own tables of weights and modules."""
    kind = type(model)

    @functools.wraps(kind.forward)  # who looks at a model's arguments sees its own
    def forward(self: Placed, *args: Any, **kwargs: Any) -> Any:
        return Placed.forward(self, *args, **kwargs)

    refusal: Any = _NotCompiled()
    vars(forward).update(_torchdynamo_orig_callable=refusal, _torchdynamo_wrapper_id=refusal)
    own = {"forward": forward, "__module__": kind.__module__, "__qualname__": f"Placed{kind.__qualname__}"}
    cls = types.new_class(kind.__name__, (Placed, kind), exec_body=lambda names: names.update(own))
    made: Placed = object.__new__(cls)
    made.__dict__.update(model.__dict__)
    return made


def require_weights(model: nn.Module, graph: Graph) -> None:
    """Refuse a plan whose weights are not the model's."""
    shapes = {name: weight.untyped_storage().nbytes() for name, weight in model.named_parameters()}
    planned = [
        name
        for name, kind, phase in zip(graph.op_name, graph.op_kind, graph.phase.tolist(), strict=True)
        if phase == Phase.PARAM and kind == "param"
    ]
    missing, extra = set(shapes) - set(planned), set(planned) - set(shapes)
    if missing or extra:
        has = f"the model has {sorted(missing)[0]!r}, the plan does not" if missing else ""
        more = f"the plan has {sorted(extra)[0]!r}, the model does not" if extra else ""
        raise PlanError(
            f"the plan is for another model: {'; '.join(filter(None, (has, more)))}"
            f" ({len(missing) + len(extra)} weights differ); plan this model"
        )
    sizes = dict(zip(graph.op_name, graph.signature.tolist(), strict=True))
    for name, weight in model.named_parameters():
        row = sizes[name]
        words = graph.signature_table[row].split() if row >= 0 else []
        shape = f"[{','.join(map(str, weight.shape))}]"
        here = str(weight.dtype).removeprefix("torch.") + shape
        if len(words) > 1 and not (words[1] + "/").startswith(here + "/"):  # strides stand behind
            raise PlanError(
                f"the plan is for another model: weight {name!r} is {words[1]} there, {here} here;"
                " plan this model"
            )


def _find_homes(model: nn.Module, known: PlanIndex) -> dict[str, int]:
    """The device of every weight and buffer; a buffer the plan does not know is with its module."""
    found = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        module = name.rpartition(".")[0]
        found[name] = known.device.get(name, known.by_module.get(module, 0))
    return found


def _move_weights(
    model: nn.Module, homes: Mapping[str, int], devices: tuple[RunDevice, ...], accounts: Accounts | None
) -> None:
    """Weights, buffers and gradients go home; the objects stay the same."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _move_tensor(name, tensor, homes[name], devices, accounts)


def _move_tensor(
    name: str, tensor: torch.Tensor, home: int, devices: tuple[RunDevice, ...], accounts: Accounts | None
) -> None:
    where = devices[home].where
    if tensor.device != where:
        tensor.data = tensor.data.to(where)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(where)
    if accounts is not None:
        accounts.add((tensor, tensor.grad), home, f"weight {name}")


def _make_mover(made: Placed, accounts: Accounts | None) -> Move:
    """Brings a weight that came after placing to its device, and counts it as the others are."""
    this = weakref.ref(made)

    def move(name: str, tensor: torch.Tensor, home: int) -> None:
        placed = this()
        assert placed is not None, "it is being called"
        _move_tensor(name, tensor, home, tuple(placed._engine.devices), accounts)
        if isinstance(tensor, nn.Parameter) and accounts is not None:
            _count_gradient(placed, name, tensor, home, accounts)

    return move


def _make_spill(
    model: nn.Module, known: PlanIndex, devices: tuple[RunDevice, ...], accounts: Accounts | None
) -> Spill | None:
    """Weights that stay on the host while GPUs read them are pinned, so that copies run beside the ops."""
    if not known.spilled and not known.stashing:
        return None
    weights = [(name, weight) for name, weight in model.named_parameters() if name in known.spilled]
    if any(device.where.type == "cuda" for device in devices):
        for name, weight in weights:
            if weight.device.type == "cpu" and not weight.is_pinned():
                weight.data = weight.data.pin_memory()
                if accounts is not None:
                    accounts.move(weight, known.device[name])
    largest = max((weight.nbytes for _, weight in weights), default=0)
    largest = max(largest, known.largest_stash_bytes)
    return Spill(known.spilled, known.stashing, known.window_bytes, largest, devices, accounts)


def _make_turn_check(model: nn.Module) -> Callable[[], bool]:
    """Whether a model is still placed as it is now: asked later, when it may have been placed again."""
    turn = model.__dict__.get(_TURN, 0)
    return lambda: bool(model.__dict__.get(_TURN, 0) == turn)


def _count_gradients(made: Placed, model: nn.Module, homes: Mapping[str, int], accounts: Accounts) -> None:
    """Gradients are counted where their weights are."""
    for name, weight in model.named_parameters():
        _count_gradient(made, name, weight, homes[name], accounts)


def _count_gradient(made: Placed, name: str, weight: torch.Tensor, home: int, accounts: Accounts) -> None:
    """Counted until the model is placed again or the placed one is gone."""
    if not weight.requires_grad:
        return
    current = _make_turn_check(made._engine.model)

    def count(weight: Any) -> None:
        if current():
            accounts.add_gradient(weight, home, f"the gradient of {name}")

    handle = weight.register_post_accumulate_grad_hook(count)
    weakref.finalize(made, handle.remove)

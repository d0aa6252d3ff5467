"""Engine: runs the plan of a model op by op; a graph for every mode and shape it is called with.

A graph is made when it is first needed: exported, placed by the plan, put in order and rewritten. Where bytes
are counted (logical devices) the graph is interpreted node by node, else its generated code is run.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from loadmaster.core.errors import GraphError, PlanError
from loadmaster.core.raised import shorten_error
from loadmaster.modules.fake_model import list_parameters
from loadmaster.modules.full_masks import find_full_masks, name_arguments
from loadmaster.modules.saved_tensors import drop_history
from loadmaster.modules.torch_state import leave_transforms
from loadmaster.runtime.graph_engine.assignment import (
    PlanIndex,
    assign_devices,
    find_unplanned_ops,
    names_in_plan,
)
from loadmaster.runtime.graph_engine.compiled_parts import Parts, compile_parts
from loadmaster.runtime.graph_engine.free_batch import FIXED, Sizes, find_free_sizes, make_input_pattern
from loadmaster.runtime.graph_engine.gpu_autocast import autocast_for_export, is_casting
from loadmaster.runtime.graph_engine.input_binding import Fill, make_fills
from loadmaster.runtime.graph_engine.issue_order import issue_order
from loadmaster.runtime.graph_engine.non_reentrant_lock import NonReentrantLock
from loadmaster.runtime.graph_engine.op_clock import Clock, TimedInterpreter
from loadmaster.runtime.graph_engine.op_facts import Facts, collect_facts
from loadmaster.runtime.graph_engine.program import Program, export_program
from loadmaster.runtime.graph_engine.python_attributes import (
    child_identity,
    find_changed_names,
    find_hooked_module,
    find_outer_python,
    is_call_replaced,
    list_modules,
    snapshot_named_state,
    snapshot_state,
)
from loadmaster.runtime.graph_engine.rewrite import EDGE, RegionStack, RewrittenGraph, rewrite_program
from loadmaster.runtime.spill.weight_loads import Spill, WeightLoads
from loadmaster.runtime.transport.byte_accounts import NO_DEVICE, Accounts
from loadmaster.runtime.transport.copies import copy_to_device, link_gradient
from loadmaster.runtime.transport.device_streams import PartStreams
from loadmaster.runtime.transport.devices import RunDevice

_FEW = 3
_MOST_GRAPHS = 16
_MOST_STATES = 4  # of attributes: graphs of one kind of call


class CannotExportError(GraphError):
    """The model cannot be made a graph on these arguments; nothing has run yet."""


@dataclass(frozen=True, slots=True)
class ReadyGraph:
    """A graph that can be run."""

    program: Program
    facts: Facts
    device: dict[fx.Node, int]
    rewritten: RewrittenGraph
    fills: tuple[Fill, ...]  # a value for every input, of the leaves of the arguments
    parts: Parts | None = None  # compiled

    def flat(self, leaves: list[Any]) -> list[Any]:
        """What the graph's inputs are, without the regions."""
        return [fill(leaves) for fill in self.fills]


@dataclass(slots=True)
class GraphEngine:
    """One placed model's graphs."""

    model: nn.Module  # whose modules and weights are run
    root: nn.Module  # whose mode counts: the placed model
    known: PlanIndex
    devices: Sequence[RunDevice]
    homes: dict[str, int]  # of every weight and buffer
    accounts: Accounts | None
    presum: bool = False
    backend: str = ""  # that compiles parts, '' = none
    spill: Spill | None = None
    streams: PartStreams = field(default_factory=lambda: PartStreams(()))
    output_device: torch.device | None = None
    notes: list[str] = field(default_factory=list)
    clock: Clock | None = None  # where one is set, ops are timed and bytes are not counted
    _ready: dict[Any, list[ReadyGraph]] = field(
        default_factory=dict
    )  # last used first: other Python, other graph
    _changed: str = ""  # what a graph's Python would read otherwise now
    _kinds: set[Any] = field(default_factory=set)  # arguments seen, but for their sizes
    _fixed: set[Any] = field(default_factory=set)  # of these, such as no graph holds for any sizes of
    only_graphs: bool = False  # there is no other engine to run what has no graph
    _refused: dict[Any, str] = field(default_factory=dict)  # arguments without a graph, and why
    ours: frozenset[str] = frozenset()  # attributes of the placed model that are not the model's
    _matched: bool = False
    _adopted: bool = False  # modules came that the plan does not know
    _names: tuple[Any, list[str]] = (None, [])  # forward, and the names of what it takes
    _making: NonReentrantLock = field(default_factory=NonReentrantLock)
    _modules: tuple[Any, ...] = ()
    _known_state: dict[str, Any] = field(default_factory=dict)  # attributes that the last graph was made with
    _states: dict[Any, set[Any]] = field(default_factory=dict)  # [kind of call] attributes it was made with

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model gives."""
        ready, leaves = self.ready(args, kwargs)
        return self.run(ready, leaves)

    def ready(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ReadyGraph, list[Any]]:
        """The graph for these arguments, and their leaves."""
        ordered = dict(sorted(kwargs.items()))
        leaves, spec = tree_flatten((args, ordered))
        mode = (find_full_masks(name_arguments(self._parameters(), args, kwargs)), *self._mode())
        found = self._find((spec, make_input_pattern(leaves), mode))
        if found is None:
            sizes = find_free_sizes((args, ordered))
            with self._making:  # torch.export is not for two threads
                found = self._find_known((spec, leaves, mode), sizes)
                if found is None:
                    found = self._new(args, ordered, (spec, leaves, mode), sizes)
        return found, leaves

    def _parameters(self) -> list[str]:
        """What the model's forward takes; asked once of each forward that it has."""
        forward = getattr(self.model.forward, "__func__", self.model.forward)
        if self._names[0] is not forward:
            self._names = forward, list_parameters(self.model)
        return self._names[1]

    def _find_known(self, call: tuple[Any, ...], sizes: list[Sizes]) -> ReadyGraph | None:
        """A graph that was made for such arguments, or for any sizes of them."""
        spec, leaves, mode = call
        for free in (FIXED, *sizes):
            found = self._find((spec, make_input_pattern(leaves, free), mode), free)
            if found is not None:
                return found
        return None

    def _find(self, key: Any, sizes: Sizes = FIXED) -> ReadyGraph | None:
        """A graph of this key for which Python is as it was."""
        made = self._ready.get(key, [])
        for at, one in enumerate(made):
            changed = one.program.reads.find_change()
            if changed:
                self._changed = changed
            elif one.program.fits is None or one.program.fits(sizes):
                if at:
                    made.insert(0, made.pop(at))
                return one
        return None

    def _new(
        self, args: Any, kwargs: dict[str, Any], call: tuple[Any, ...], sizes: list[Sizes]
    ) -> ReadyGraph:
        """A graph for these arguments; where it is not the first of its kind, for any sizes if that works."""
        spec, leaves, mode = call
        exact = (spec, make_input_pattern(leaves), mode)
        _refuse_replaced_call()
        if exact in self._refused:
            raise CannotExportError(self._refused[exact])
        kinds = {(spec, make_input_pattern(leaves, free), mode): free for free in sizes}
        self._check_attributes((spec, mode[:-1]), mode[-1])
        changed, self._changed = self._changed, ""
        if changed and max(len(self._ready.get(one, ())) for one in (exact, *kinds)) >= _MOST_STATES:
            raise CannotExportError(f"{changed!r}, which forward reads, changes from call to call")
        if changed:
            self.say(f"{changed!r}, which forward reads, has changed; exported the model again")
        made = self._make_free(args, kwargs, kinds, again=bool(changed))
        if made is not None:
            return made
        self._require_room(spec, mode)
        try:
            made = self._make_graph(args, kwargs)
        except CannotExportError as problem:
            self._refused[exact] = str(problem)
            raise
        if self._kinds:
            mode_words = " in training" if self.root.training else " in eval mode"
            mode_words += "" if torch.is_grad_enabled() else " without gradients"
            self.say(f"exported the model again for {describe_inputs(leaves)}{mode_words}")
        self._kinds.update(kinds)
        self._keep(exact, made)
        return made

    def _make_free(
        self, args: Any, kwargs: dict[str, Any], kinds: Mapping[Any, Sizes], *, again: bool
    ) -> ReadyGraph | None:
        """A graph for any sizes, where such a call came before with others; the fewest free axes first."""
        for kind, free in kinds.items():
            if kind not in self._kinds or kind in self._fixed or (kind in self._ready and not again):
                continue
            try:
                made = self._make_graph(args, kwargs, free=free)
            except CannotExportError as problem:
                self._fixed.add(kind)
                self.say(f"no graph for any {free.axes} ({problem}): one for each size")
                continue
            self._kinds.update(kinds)
            self._keep(kind, made)
            self.say(f"a graph for any {free.axes} was made when {free} came")
            return made
        return None

    def _keep(self, key: Any, made: ReadyGraph) -> None:
        while len(self._ready) >= _MOST_GRAPHS:
            self._ready.pop(next(iter(self._ready)))
        self._ready.setdefault(key, []).insert(0, made)

    def _require_room(self, spec: Any, mode: tuple[Any, ...]) -> None:
        """Refuse one more shape than graphs are kept: each would be exported at every call."""
        made = sum(key[0] == spec and key[2] == mode for key in self._ready)
        if made >= _MOST_GRAPHS and not self.only_graphs:
            raise CannotExportError(
                f"it was called with more than {_MOST_GRAPHS} shapes, and no graph holds for any sizes"
            )

    def _check_attributes(self, call: Any, state: tuple[Any, ...]) -> None:
        """Say which have changed; where they do so again and again, no graph is made any more."""
        seen = self._states.setdefault(call, set())
        now = snapshot_named_state(self.root, self.ours)
        different = find_changed_names(self._known_state, now) if self._known_state else []
        if state not in seen and len(seen) >= _MOST_STATES:
            name = different[0] if different else "an attribute"
            raise CannotExportError(f"{name!r} of the model changes from call to call")
        seen.add(state)
        self._known_state = now
        if different:
            self.say(f"{different[0]!r} of the model has changed; exported the model again")
        own = {name: value for name, value in vars(self.root).items() if name not in self.ours}
        vars(self.model).update(own)  # what was set on the placed model is the model's
        modules = tuple(part for module in list_modules(self.root) for part in child_identity(module))
        self._matched &= modules == self._modules  # an exchanged module: does the plan still hold?
        self._modules = modules

    def say(self, note: str) -> None:
        """A note for the user, once."""
        if note not in self.notes:
            self.notes.append(note)

    def run(self, ready: ReadyGraph, leaves: list[Any], watcher: Any = None) -> Any:
        """Run a graph; `watcher` is told of every node."""
        flat, loads = ready.flat(leaves), None
        graph = ready.rewritten
        if (graph.readings or graph.stashing) and self.spill is not None:
            loads = WeightLoads(self.spill, graph.readings, graph.stashing, flat)
        regions = RegionStack(loads)
        try:
            with nullcontext() if loads is None else loads.running():
                out = self._out(ready, regions, flat, watcher)
        finally:
            regions.close()
        if loads is not None:
            loads.watch(out)
        return ready.program.unflatten_outputs(out)

    def _out(self, ready: ReadyGraph, regions: RegionStack, flat: Sequence[Any], watcher: Any) -> Any:
        """What the graph gives: timed, in compiled parts, by its generated code, or counted node by node."""
        if self.clock is not None and watcher is None:
            timed = TimedInterpreter(ready.rewritten.module, self.clock, ready.device)
            return timed.run(regions, *flat, enable_io_processing=False)
        if ready.parts is not None and watcher is None:
            return ready.parts.run(self.accounts, regions, *flat)
        if self.accounts is None and watcher is None:
            return ready.rewritten.module(regions, *flat)
        counted = _NodeInterpreter(ready.rewritten.module, self.accounts, watcher, self.streams)
        with self.streams.running():
            out = counted.run(regions, *flat, enable_io_processing=False)
        self.streams.hand_out(out)
        return out

    @property
    def graphs(self) -> list[ReadyGraph]:
        """The graphs made so far."""
        return [one for made in self._ready.values() for one in made]

    def _mode(self) -> tuple[Any, ...]:
        """All that makes another graph of the same arguments."""
        run, asked = list_modules(self.model), list_modules(self.root)
        flags = tuple(module.training for module in run[1:])
        weights = (w for one in run for table in (one._parameters, one._buffers) for w in table.values())
        trained = tuple(w if w is None else (w.requires_grad, w.dtype, w.shape) for w in weights)
        casts = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in ("cpu", "cuda")
        )
        grad = torch.is_grad_enabled()  # forward may ask, as torch's own transformer layers do
        made = torch.get_default_dtype()
        return self.root.training, grad, flags, trained, casts, made, snapshot_state(asked, self.ours)

    def _make_graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, free: Sizes = FIXED
    ) -> ReadyGraph:
        grad = torch.is_grad_enabled()
        program, facts = self._export_program(args, kwargs, grad=grad, free=free)
        _refuse_input_writes(program, facts)
        found = find_unplanned_ops(program, facts, self.known)
        if found and not self._matched and self._is_as_planned(args, kwargs, grad=grad):
            found = []
        self._check(program, found)
        names = names_in_plan(program, facts, self.known)
        device, notes = assign_devices(program, facts, self.known, names, self.homes)
        self._settle(program, device)
        for note in notes:
            self.say(note)
        priority = {node: self.known.priority[name] for node, name in names.items()}
        order = issue_order(program, facts, priority)
        where = [device.where for device in self.devices]
        made = rewrite_program(
            program,
            facts,
            device,
            order,
            where,
            presum=self.presum,
            output_device=self.output_device,
            spilled=self.spill.names if self.spill is not None else frozenset(),
            stashing=self._find_stashing(names),
        )
        parts = compile_parts(made.module, backend=self.backend) if self.backend else None
        if parts is not None:
            self.say(f"{parts.num_compiled} parts are compiled by {self.backend}")
        return ReadyGraph(program, facts, device, made, make_fills(self.model, program, device, where), parts)

    def _find_stashing(self, names: Mapping[fx.Node, str]) -> dict[fx.Node, int]:
        """Ops whose outputs wait elsewhere for their backward, and where."""
        known = self.spill.stashing if self.spill is not None else {}
        return {node: known[name] for node, name in names.items() if name in known}

    def _is_as_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool) -> bool:
        """Whether the plan is for what runs with gradients, as most plans are, without autocast, or with
        other masks: with full ones, or with some that mask something.
        """
        masks = frozenset(name for name in name_arguments(self._parameters(), args, kwargs) if "mask" in name)
        ways: list[dict[str, Any]] = [{"casts": True}] * (not grad) + [{"casts": False}] * is_casting()
        ways += [{"full_masks": full} for full in (frozenset(), masks) if masks]
        for way in ways:
            try:
                if not find_unplanned_ops(*self._export_program(args, kwargs, grad=True, **way), self.known):
                    return True
            except CannotExportError:  # a model may be one that runs under autocast alone
                continue
        return False

    def _export_program(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        grad: bool,
        free: Sizes = FIXED,
        casts: bool = True,
        full_masks: frozenset[str] | None = None,
    ) -> tuple[Program, Facts]:
        training = self.root.training
        for_gpu = any(device.where.type == "cuda" for device in self.devices)
        try:
            # a graph is for all later calls: this one's hooks (checkpoint) and inference mode are not its own
            with (
                saved_tensors_hooks(drop_history, _identity),
                torch.inference_mode(False),
                autocast_for_export(for_gpu=for_gpu, casts=casts),
            ):
                program = export_program(
                    self.model,
                    args,
                    kwargs,
                    training=training,
                    grad=grad,
                    free=free,
                    root=self.root,
                    ours=self.ours,
                    full_masks=full_masks,
                )
                return program, collect_facts(program)
        except Exception as problem:  # torch and the user's model may raise anything
            leave_transforms()
            raise CannotExportError(shorten_error(problem)) from problem

    def _check(self, program: Program, found: list[str]) -> None:
        """The first graph of the plan's own mode and inputs must have the plan's ops; `found` are others."""
        given = {node.meta["op"] for node in program.inputs if node.meta["slot"].kind == "input"}
        if not found:
            self._matched = True
        elif given != self.known.inputs:
            self.say(
                f"the model is given {_join_names(given)}, it was planned on {_join_names(self.known.inputs)}"
            )
        elif not self._matched and not self._adopted and self.root.training == self.known.trains:
            more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
            raise PlanError(
                f"the plan is for another model or other inputs: {found[0]}{more}; plan this model on inputs"
                " like these"
            )

    def adopt(self, names: list[str]) -> None:
        """Modules or weights came after placing; ops that the plan does not know go with those around."""
        modules = [part for module in list_modules(self.root) for part in child_identity(module)]
        if names:
            few = ", ".join(map(repr, names[:_FEW])) + (
                f" and {len(names) - _FEW} more" if names[_FEW:] else ""
            )
            self.say(f"{few} added after placing; placed with the modules around")
        if names or tuple(modules) != self._modules:
            self._adopted = True
            self.forget()

    def forget(self) -> None:
        """Weights have moved: graphs are made again when they are needed."""
        self._ready.clear()

    def _settle(self, program: Program, device: Mapping[fx.Node, int]) -> None:
        """A buffer that an op writes goes to that op; graphs that had it elsewhere are made again."""
        tensors = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        for node in program.inputs:
            name = node.meta["op"]
            if node.meta["slot"].kind != "weight" or self.homes.get(name) == device[node]:
                continue
            self.homes[name] = device[node]
            tensors[name].data = tensors[name].data.to(self.devices[device[node]].where)
            if self.accounts is not None:
                self.accounts.move(tensors[name], device[node])
            self.forget()


def require_graph(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise CannotExportError where a model has no graph on these arguments, so that hooks will run it."""
    refuse_python(model)
    _refuse_replaced_call()
    try:
        program = export_program(model, args, dict(sorted(kwargs.items())), training=model.training)
        facts = collect_facts(program)
    except Exception as problem:  # torch and the user's model may raise anything
        leave_transforms()
        raise CannotExportError(shorten_error(problem)) from problem
    _refuse_input_writes(program, facts)


def refuse_python(model: nn.Module) -> None:
    """Refuse a call during which Python must run: around all modules or functions, or hooks of a module."""
    around = find_outer_python()
    if around:
        raise CannotExportError(around)
    hooked = find_hooked_module(model)
    if hooked:
        raise CannotExportError(f"module {hooked!r} has hooks, which a graph does not call")


def _refuse_replaced_call() -> None:
    if is_call_replaced():
        raise CannotExportError("the call of all modules was replaced, which torch.export does not see")


def _refuse_input_writes(program: Program, facts: Facts) -> None:
    """A graph may be given a copy of an input: what it writes there the caller would not see."""
    for node in program.inputs:
        if node.meta["slot"].kind == "input" and facts.changing.intersection(facts.storages[node]):
            raise CannotExportError(f"forward writes into its input {node.meta['op']!r}")


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def describe_inputs(leaves: list[Any]) -> str:
    """'inputs of [3, 16], [3, 16]'."""
    shapes = [str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return f"inputs of {', '.join(shapes)}" if shapes else "no inputs"


class _NodeInterpreter(fx.Interpreter):
    """Runs a graph node by node, its bytes counted where they are made."""

    def __init__(
        self, module: fx.GraphModule, accounts: Accounts | None, watcher: Any, streams: PartStreams
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors keep their own words
        self._accounts, self._watcher, self._streams = accounts, watcher, streams
        self._known: set[Any] = set()  # autograd's nodes that are hooked

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        if n.op not in ("call_function", "placeholder") or "device" not in n.meta:
            return super().run_node(n)
        if self._watcher is not None:
            self._watcher.before(n, self.fetch_args_kwargs_from_env(n))
        out = self._run_on_stream(n) if self._streams else self._run_and_count(n)
        if self._watcher is not None:
            out = self._watcher.after(n, out)
        return out

    def _run_on_stream(self, n: fx.Node) -> Any:
        """On the stream of its device, after what it reads on others."""
        at = n.meta["device"]
        if n.meta.get("role") == EDGE:  # reads nothing; its gradient comes home, on the stream of its home
            with self._streams.on(n.meta["back"], ()):
                return self._run_and_count(n)
        far = [one for one in n.all_input_nodes if one.meta.get("device", at) != at]
        with self._streams.on(at, [one.meta["device"] for one in far]):
            out = self._run_and_count(n)
        self._streams.read(out if n.op == "placeholder" else [self.env[one] for one in far], at)
        return out

    def _run_and_count(self, n: fx.Node) -> Any:
        if self._accounts is None:
            return super().run_node(n)
        at, what = n.meta["device"], n.meta["op"]
        if n.op == "placeholder":
            return self._receive_input(super().run_node(n), n)
        with self._accounts.running(at, what):
            out = super().run_node(n)
        self._accounts.watch_backward(out, n.meta["back"], what, self._known)
        return out

    def _receive_input(self, given: Any, n: fx.Node) -> Any:
        """An input comes to its device as a copy: what it is a part of, and how long its owner holds on to
        it, is no matter of the device's. What belongs to the model is counted where the plan has it.
        """
        accounts, at, what = self._accounts, n.meta["device"], n.meta["op"]
        assert accounts is not None, "bytes are counted"
        owner = accounts.owner(given) if isinstance(given, torch.Tensor) else at
        if owner == at or (owner == NO_DEVICE and not n.meta["given"]):
            accounts.add(given, at, what)
            return given
        copy = copy_to_device(given, given.device)
        accounts.add(copy, at, what)
        return link_gradient(given, copy)

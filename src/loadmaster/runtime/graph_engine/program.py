"""Program: a model's forward pass as one flat graph, its nodes named as the ops of a captured Graph.

The export is capture's own (fake tensors on the CPU, no weight is touched). Graphs inside of nodes are laid
flat: their ops are named 'outer.inner' and keep the region (grad mode, autocast) they ran in. A weight with
two names is one input.

What each node carries in its `meta`:  op (name), module, region (tuple of contexts), slot (inputs only).
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from loadmaster.core.errors import GraphError
from loadmaster.graph.export import UNNAMED, Exported, export, make_unique, module_of
from loadmaster.modules.fake_model import FakeModel, make_fake_model
from loadmaster.modules.op_signature import kind_of
from loadmaster.modules.randomness import preserve_rng
from loadmaster.modules.torch_state import silence_torch
from loadmaster.modules.tracing.python_reads import Code, Reads, collect_reads
from loadmaster.runtime.graph_engine.free_batch import (
    FIXED,
    Fits,
    Sizes,
    make_dynamic_shapes,
    make_size_check,
    spell_out_arguments,
)
from loadmaster.runtime.graph_engine.padded_encoder import refuse_packing
from loadmaster.runtime.graph_engine.python_attributes import (
    list_modules,
    refuse_attribute_changes,
    remove_hooks,
)

Region = tuple[tuple[Any, ...], ...]  # ('grad', enabled) or ('autocast', device, dtype, enabled, cached)
_OWN = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class InputSlot:
    """What an input of the graph is filled with."""

    kind: str  # 'weight' (any parameter or buffer), 'constant' or 'input'
    name: str  # of a weight: its first name; of an input: the op's name in a captured Graph
    place: int  # of an input: which leaf of the arguments
    value: Any = None  # of a constant


@dataclass(frozen=True, slots=True)
class Program:
    """The flat graph, and how its outputs are handed back."""

    graph: fx.Graph
    root: nn.Module  # what its get_attr nodes name
    fake: FakeModel
    exported: Exported  # knows how outputs are put together
    fits: Fits | None = None  # of a graph with free axes: the sizes that it holds for
    reads: Reads = field(default_factory=Reads)  # what the Python of the model could read

    @property
    def ops(self) -> list[fx.Node]:
        """Every call, in captured order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def inputs(self) -> list[fx.Node]:
        """Every input, each with its slot."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def unflatten_outputs(self, flat: Any) -> Any:
        """What the model would give, of what the graph gives."""
        return self.exported.unflatten_outputs(flat)


def export_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool,
    grad: bool = True,
    free: Sizes = FIXED,
    root: nn.Module | None = None,
    ours: frozenset[str] = frozenset(),
    full_masks: frozenset[str] | None = None,
) -> Program:
    """The forward pass in the present mode of the model's modules; raises what torch.export raises.

    `grad` is whether gradients are taken when it runs: a forward may ask. `root` has the attributes that the
    user sets, but for `ours`; without it the model has. `full_masks` are the arguments that mask
    nothing, where it is not seen of the arguments themselves.
    """
    fake = make_fake_model(model, args, kwargs, full_masks=full_masks)
    fake.model.training = training
    remove_hooks(fake.model)
    with (
        silence_torch(),
        torch.set_grad_enabled(grad),
        refuse_attribute_changes(fake.model) as code,
        refuse_packing(fake.model),
    ):
        if free:
            spell_out_arguments(fake.model.__dict__["forward"], fake)
        made = export(fake, dynamic_shapes=make_dynamic_shapes(fake, free) if free else None)
    exported = made.program
    fits = make_size_check(exported, fake, free) if free else None
    if free and fits is None:
        raise GraphError("the model depends on the sizes of its inputs")
    with torch.set_grad_enabled(grad):
        _refuse_hidden_changes(fake, code)
    reads = collect_reads(list_modules(model if root is None else root), code, ours)
    if reads.sources:
        raise GraphError(f"its forward reads {reads.sources[0]!r}, which gives another value each time")
    flat = _Flattener(exported.graph_module)
    slots = _make_slots(exported, fake, model)
    _refuse_frozen_weights(slots, model, reads)
    flat.inputs(slots)
    flat.nodes(exported.graph_module, "", ())
    _rename_clashing_ops(flat.graph, [*fake.weights(), *fake.buffers(), *(name for name, _ in fake.inputs())])
    return Program(flat.graph, flat.root, fake, made, fits, reads)


def _refuse_hidden_changes(fake: FakeModel, code: Code) -> None:
    """Refuse a forward that changes what it reads in objects, globals or closures: it runs once more."""
    found = collect_reads(list_modules(fake.model), code)
    if not found.writes:
        return
    with silence_torch(), preserve_rng(), fake.mode:
        fake.model(*fake.args, **fake.kwargs)
    changed = found.find_change()
    if changed:
        raise GraphError(f"its forward changes {changed!r}, which a graph would not do again")


def _refuse_frozen_weights(slots: list[InputSlot], model: nn.Module, reads: Reads) -> None:
    """Refuse a weight that forward reads around its module (a function of the user's own holds it)."""
    named = [*model.named_buffers(), *model.named_parameters()]
    trained = [("a tensor that is trained", one) for one in reads.tensors if one.requires_grad]
    known = {one.untyped_storage().data_ptr(): name for name, one in (*trained, *named)}
    for slot in slots:
        if slot.kind == "constant" and isinstance(slot.value, torch.Tensor) and slot.value.numel():
            name = known.get(slot.value.untyped_storage().data_ptr())
            if name is not None:
                raise GraphError(f"its forward reads {name!r} in another way than through its module")


class _Flattener:
    """Writes a graph and the graphs inside of it into one."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self._env: dict[fx.Node, Any] = {}
        self._first = [node for node in module.graph.nodes if node.op == "placeholder"]

    def inputs(self, slots: list[InputSlot]) -> None:
        """One input for every slot; a weight with two names has one."""
        known: dict[str, fx.Node] = {}
        for node, slot in zip(self._first, slots, strict=True):
            same = known.get(slot.name) if slot.kind == "weight" else None
            if same is None:
                same = self.graph.placeholder(node.name)
                same.meta = {"op": slot.name, "module": "", "region": (), "slot": slot}
                known[slot.name] = same
            self._env[node] = same

    def nodes(self, module: fx.GraphModule, prefix: str, region: Region) -> Any:
        """Everything but the inputs; gives what the graph gives."""
        for node in module.graph.nodes:
            if node.op == "placeholder" or node.target in UNNAMED:
                continue
            if node.op == "output":
                given = fx.map_arg(node.args[0], self._env.__getitem__)
                if not prefix:
                    self.graph.output(given)
                return given
            self._env[node] = self._make_one(module, node, prefix, region)
        raise AssertionError("a graph ends with its output")

    def _make_one(self, module: fx.GraphModule, node: fx.Node, prefix: str, region: Region) -> Any:
        if node.op == "get_attr":
            return _get_attribute(module, str(node.target))
        inner = _unpack_region(node, self._env)
        if inner is not None:
            graph, context, rest = inner
            firsts = [one for one in graph.graph.nodes if one.op == "placeholder"]
            self._env.update(zip(firsts, rest, strict=True))
            return self.nodes(graph, f"{prefix}{node.name}.", (*region, *context))
        source = self._env.get(node.args[0]) if node.args else None
        if node.target is operator.getitem and isinstance(source, list | tuple):
            return source[node.args[1]]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._env.__getitem__)
        args, kwargs = self._attach_graphs((args, kwargs))
        made = self.graph.call_function(node.target, args, kwargs)
        made.meta = {"op": f"{prefix}{node.name}", "module": module_of(node), "region": region}
        return made

    def _attach_graphs(self, tree: Any) -> Any:
        """Graphs among the arguments of an op that is not laid flat (a loop, a branch) stay attributes."""

        def attach(leaf: Any) -> Any:
            if not isinstance(leaf, nn.Module):
                return leaf
            name = f"inner_{len(list(self.root.children()))}"
            self.root.add_module(name, leaf)
            return self.graph.get_attr(name)

        return fx.node.map_aggregate(tree, attach)


def _rename_clashing_ops(graph: fx.Graph, taken: Iterable[str]) -> None:
    """An op called as a weight is (a buffer 'mean' and `x.mean()`) has the name that capture gives it."""
    counts = dict.fromkeys(taken, 1)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.meta["op"] = make_unique(node.meta["op"], counts)


def _get_attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return _require_real(found)


def _require_real(value: Any) -> Any:
    """Refuse a constant that is no value: what export itself computed (a gradient taken in forward)."""
    if isinstance(value, FakeTensor):
        raise GraphError("its forward computes what torch.export does not follow (a gradient of its own?)")
    return value


def _unpack_region(
    node: fx.Node, env: dict[fx.Node, Any]
) -> tuple[fx.GraphModule, Region, tuple[Any, ...]] | None:
    """A graph inside a node, the contexts it runs in, and what it is given."""
    name = getattr(node.target, "__name__", "")
    if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "wrap", "invoke_subgraph"):
        return None
    args = fx.map_arg(node.args, env.__getitem__)
    if name == "wrap_with_set_grad_enabled":
        return args[1], (("grad", args[0]),), args[2:]
    if name == "wrap_with_autocast":
        return args[4], (("autocast", *args[:4]),), args[5:]
    rest = args[1:] if name == "wrap" else args[2:]
    return (args[0], (), rest) if isinstance(args[0], fx.GraphModule) else None


def _make_slots(exported: torch.export.ExportedProgram, fake: FakeModel, model: nn.Module) -> list[InputSlot]:
    """What fills each input of the exported graph, in order."""
    first: dict[int, str] = {}
    names = fake.names()
    for name, tensor in [*fake.weights().items(), *fake.buffers().items()]:
        first.setdefault(id(tensor), name)
    titles = {id(tensor): name for name, tensor in fake.inputs()}
    leaves, at, slots = tree_leaves((fake.args, fake.kwargs)), 0, []
    real = _map_attribute_tensors(fake.model, model)
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            slots.append(InputSlot("input", titles.get(id(leaves[at]), spec.arg.name), at))
            at += 1
        elif spec.target in names:
            slots.append(InputSlot("weight", first[id(names[spec.target])], -1))
        else:
            value = exported.constants[str(spec.target)]
            if isinstance(value, torch.Tensor):
                value = _require_real(real.get(value.untyped_storage()._cdata, value))
            slots.append(InputSlot("constant", str(spec.target), -1, value))
    return slots


def _map_attribute_tensors(fake: nn.Module, model: nn.Module) -> dict[int, torch.Tensor]:
    """The real tensor of every storage that modules of the fake model hold as plain attributes."""
    found = {}
    for copied, module in zip(fake.modules(), model.modules(), strict=True):
        for name, value in vars(module).items():
            if name in _OWN:
                continue
            twins = tree_leaves(vars(copied).get(name))
            for leaf, twin in zip(tree_leaves(value), twins, strict=False):
                if isinstance(leaf, torch.Tensor) and isinstance(twin, torch.Tensor):
                    found[twin.untyped_storage()._cdata] = leaf
    return found


def op_kind(node: fx.Node) -> str:
    """The kind a captured Graph gives to an op."""
    return kind_of(node.target)

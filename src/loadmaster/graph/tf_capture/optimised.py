"""Optimised: the ops that TensorFlow runs of a function, after its own graph optimiser (Grappler).

Without this a plan would change the numbers: the optimiser fuses and reorders ops within a device, so that
it does otherwise for each placement. Here it runs once, as for the whole step on one CPU, and the runtime
leaves it out. Six things make it give the graph that an unplaced run has:

1. every node is said to be on the CPU, since fusions ask for the device;
2. a variable's placeholder becomes a VarHandleOp, since shapes of variables decide about rewrites;
3. an argument's placeholder is a variable's reading for as long: placeholders' shapes are not believed;
4. loops stay one op each (`_lower_using_switch_merge` is put back afterwards);
5. what they run is fused, too, as in an unplaced run (`bodies`);
6. nodes keep their names until it is done: it orders the parts of a sum by their names.

Functions called within the step are inlined first, so that their nodes get canonical names too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.grappler import tf_optimizer  # where TensorFlow's own converters find it

import tensorflow as tf
from loadmaster.core.errors import InputError
from loadmaster.core.raised import shorten_error
from loadmaster.graph.tf_capture.bodies import (
    all_nodes,
    describe_handles,
    put_arguments_back,
    register_functions,
    rename_functions,
    stand_in_for_arguments,
)
from loadmaster.graph.tf_capture.canonical import canonical_names, name_additions
from loadmaster.graph.tf_capture.trace import Captured, Traced

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
ONEDNN_CONVOLUTION = "_MklNativeFusedConv2D"
_HANDLE = "/given"
_LOWER = "_lower_using_switch_merge"


@dataclass(frozen=True, slots=True, eq=False)
class OptimisedStep:
    """What runs: a GraphDef whose arguments and captures are nodes of their own, by canonical names."""

    graph_def: Any
    args: tuple[str, ...]
    captured: tuple[Captured, ...]
    outputs: tuple[str, ...]
    traced: Traced
    order: dict[str, int]  # where nodes stood when they were traced: the optimiser shuffles them


def optimise_step(traced: Traced) -> OptimisedStep:
    """The ops of a concrete function as TensorFlow would run them on one CPU."""
    graph_def = traced.concrete.graph.as_graph_def()
    fetches = _list_fetches(traced)
    _replace_handles(graph_def, traced.captured)
    if any(node.op in CALLS for node in graph_def.node):
        graph_def = _run_optimiser(graph_def, fetches, inline_only=True)
    names = canonical_names([node.name for node in graph_def.node])
    describe_handles(graph_def)
    placeholders = _stand_in(graph_def)
    graph_def = _optimise_with_bodies(graph_def, fetches)
    _put_back(graph_def, placeholders)
    order = {name: at for at, name in enumerate(names.values())}
    names |= name_additions([node.name for node in graph_def.node if node.name not in names], names)
    _rename(graph_def, names)
    rename_functions(graph_def)
    _choose_kernels(graph_def)
    register_functions(graph_def)
    args = tuple(names[name] for name in traced.args)
    _drop_control_edges(graph_def, {*args, *(names[held.node] for held in traced.captured)})
    captured = tuple(Captured(names[held.node], held.tensor, held.variable) for held in traced.captured)
    outputs = tuple(_rename_input(name, names) for name in traced.outputs)
    return OptimisedStep(graph_def, args, captured, outputs, traced, order)


def _list_fetches(traced: Traced) -> list[str]:
    """Arguments, results and what must run without giving any."""
    inputs = [tensor.name for tensor in traced.concrete.inputs]
    return [*inputs, *traced.outputs, *(op.name for op in traced.concrete.graph.control_outputs)]


def _replace_handles(graph_def: Any, captured: Iterable[Captured]) -> None:
    """A variable's placeholder says its dtype and shape."""
    variables = {held.node: held.variable for held in captured if held.variable is not None}
    for node in graph_def.node:
        variable = variables.get(node.name)
        if variable is not None:
            name = node.name
            node.Clear()
            node.name, node.op = name, "VarHandleOp"
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            node.attr["shared_name"].s = name.encode()


def _stand_in(graph_def: Any) -> dict[str, Any]:
    """Let arguments be read from variables of their shapes; gives the placeholders as they were."""
    found: dict[str, Any] = {}
    handles = []
    for node in graph_def.node:
        if node.op != "Placeholder" or node.attr["dtype"].type == tf.resource.as_datatype_enum:
            continue
        found[node.name] = type(node).FromString(node.SerializeToString())
        name, dtype, shape = node.name, node.attr["dtype"].type, found[node.name].attr["shape"].shape
        handle = type(node)(name=f"{name}{_HANDLE}", op="VarHandleOp")
        handle.attr["dtype"].type, handle.attr["shared_name"].s = dtype, name.encode()
        handle.attr["shape"].shape.CopyFrom(shape)
        handles.append(handle)
        node.Clear()
        node.name, node.op = name, "ReadVariableOp"
        node.input.append(handle.name)
        node.attr["dtype"].type = dtype
    graph_def.node.extend(handles)
    return found


def _put_back(graph_def: Any, placeholders: dict[str, Any]) -> None:
    handles = {f"{name}{_HANDLE}" for name in placeholders}
    kept = [
        type(node).FromString(node.SerializeToString()) for node in graph_def.node if node.name not in handles
    ]
    del graph_def.node[:]
    graph_def.node.extend(placeholders.get(node.name, node) for node in kept)
    _drop_control_edges(graph_def, handles)


def _optimise_with_bodies(graph_def: Any, fetches: list[str]) -> Any:
    """Also what loops and branches run, with the shapes of their arguments where that is possible."""
    told = type(graph_def).FromString(graph_def.SerializeToString())
    stand_in_for_arguments(told.library.function)
    found = _run_optimiser(told, fetches, inline_only=False)
    if put_arguments_back(found.library.function):
        return found
    return _run_optimiser(graph_def, fetches, inline_only=False)


def _run_optimiser(graph_def: Any, fetches: list[str], *, inline_only: bool) -> Any:
    lowered = _set_lowering(graph_def, to=False)
    for node in all_nodes(graph_def):
        node.device = CPU
    meta = meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    meta.collection_def["train_op"].node_list.value.extend(fetches)
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    if inline_only:
        rewrites.min_graph_nodes = -1
        rewrites.optimizers.append("function")
    found = tf_optimizer.OptimizeGraph(config, meta, verbose=False)
    if lowered:
        _set_lowering(found, to=True)
    for function in found.library.function:
        for node in function.node_def:
            node.device = ""  # where the loop or branch is
    return found


def _choose_kernels(graph_def: Any) -> None:
    """Fused convolutions in bfloat16 exist as oneDNN's op alone, which TensorFlow puts in unchecked later."""
    for node in all_nodes(graph_def):
        if node.op == "_FusedConv2D" and node.attr["T"].type == tf.bfloat16.as_datatype_enum:
            node.op = ONEDNN_CONVOLUTION
            node.attr["_kernel"].s = b"MklNameChangeOp"


def _set_lowering(graph_def: Any, *, to: bool) -> bool:
    """Whether loops and branches are taken apart; says whether there were any."""
    found = False
    for node in all_nodes(graph_def):
        if _LOWER in node.attr:
            node.attr[_LOWER].b, found = to, True
    return found


def _rename(graph_def: Any, names: dict[str, str]) -> None:
    for node in graph_def.node:
        node.name = names[node.name]
        for at, name in enumerate(node.input):
            node.input[at] = _rename_input(name, names)
        if "_class" in node.attr:
            places = [text.decode() for text in node.attr["_class"].list.s]
            renamed = [
                f"loc:@{names.get(text[5:], text[5:])}".encode()
                for text in places
                if text.startswith("loc:@")
            ]
            node.attr["_class"].list.s[:] = renamed
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s = node.name.encode()


def _rename_input(name: str, names: dict[str, str]) -> str:
    """'^node', 'node' or 'node:1'."""
    control, plain = name.startswith("^"), name.removeprefix("^")
    node, colon, number = plain.partition(":")
    return "^" * control + names[node] + colon + number


def _drop_control_edges(graph_def: Any, given: set[str]) -> None:
    """Arguments are always there: nothing has to wait for them."""
    for node in graph_def.node:
        kept = [name for name in node.input if name.removeprefix("^") == name or name[1:] not in given]
        if len(kept) < len(node.input):
            node.input[:] = kept


def import_shapes(step: OptimisedStep, specs: Iterable[Any]) -> Any:
    """A tf.Graph of the step for arguments of these specs: every tensor has a shape as far as it is known."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(step.graph_def)
    shapes = dict(zip(step.args, (spec.shape for spec in specs), strict=True))
    for node in graph_def.node:
        node.device = ""
        node.attr.pop("_class", None)
        if node.name in shapes:
            node.attr["shape"].shape.CopyFrom(shapes[node.name].as_proto())
    graph = tf.Graph()
    with graph.as_default():
        try:
            tf.graph_util.import_graph_def(graph_def, name="")
        except ValueError as problem:
            raise InputError(
                f"an op that TensorFlow's optimiser makes of {step.traced.name!r} cannot be placed:"
                f" {shorten_error(problem)}; build the model in float32, or without the layer that is named"
            ) from problem
    return graph

"""Bodies: what the loops and branches of a step run, as TensorFlow would optimise it within the step.

An unplaced run takes a loop apart before it is optimised, so that its ops are fused with the shapes of the
step known. Here a body stays a function of its own. It is told the shapes of variables that it is given,
and each argument is a variable's reading for as long: shapes of arguments are not believed. Afterwards it
gets a name of its own, because TensorFlow keeps the function that it knows by a name.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from tensorflow.python.eager import context as eager_context  # functions are added nowhere else

import tensorflow as tf

_HELD = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
_GIVEN = "given/"  # a reading that stands for an argument


def all_nodes(graph_def: Any) -> Iterator[Any]:
    """Of the graph, and of the functions that its loops and branches run."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def describe_handles(graph_def: Any) -> None:
    """Bodies of loops and branches say the shapes of the variables that they are given."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    known = {node.name: node.attr for node in graph_def.node if node.op == "VarHandleOp"}
    waiting = [(node, known) for node in graph_def.node]
    while waiting:
        node, handles = waiting.pop()
        called = [
            body for value in node.attr.values() for body in (value.func, *value.list.func) if body.name
        ]
        for function in (functions[body.name] for body in called if body.name in functions):
            arguments = function.signature.input_arg
            given = _data_inputs(node)[-len(arguments) :]
            inner = {}
            for at, (argument, name) in enumerate(zip(arguments, given, strict=False)):
                handle = handles.get(name.split(":")[0])
                if handle is not None and argument.type == tf.resource.as_datatype_enum:
                    inner[argument.name] = handle
                    attr = function.arg_attr[at].attr
                    attr["_handle_dtypes"].list.type[:] = [handle["dtype"].type]
                    del attr["_handle_shapes"].list.shape[:]
                    attr["_handle_shapes"].list.shape.add().CopyFrom(handle["shape"].shape)
            if inner:
                waiting += [(one, inner) for one in function.node_def]


def _data_inputs(node: Any) -> list[str]:
    return [name for name in node.input if not name.startswith("^")]


def stand_in_for_arguments(functions: Iterable[Any]) -> None:
    """Let arguments whose shapes are known be read from variables of these shapes."""
    for function in functions:
        stands: dict[str, str] = {}
        for at, argument in enumerate(function.signature.input_arg):
            shape = _shape_of(function, at)
            if argument.type in _HELD or shape is None:
                continue
            name = f"{_GIVEN}{argument.name}"
            stands[argument.name] = f"{name}:value:0"
            handle = function.node_def.add(name=f"{name}/handle", op="VarHandleOp")
            handle.attr["dtype"].type, handle.attr["shared_name"].s = argument.type, name.encode()
            handle.attr["shape"].shape.CopyFrom(shape)
            reading = function.node_def.add(
                name=name, op="ReadVariableOp", input=[f"{name}/handle:resource:0"]
            )
            reading.attr["dtype"].type = argument.type
        for node in function.node_def:
            node.input[:] = [stands.get(name, name) for name in node.input]


def put_arguments_back(functions: Iterable[Any]) -> bool:
    """Arguments are arguments again; False where the optimiser moved a reading into another function."""
    for function in functions:
        handles = {
            node.name: node.attr["shared_name"].s.decode().removeprefix(_GIVEN)
            for node in function.node_def
            if node.op == "VarHandleOp" and node.attr["shared_name"].s.startswith(_GIVEN.encode())
        }
        readings = {
            node.name: handles[node.input[0].split(":")[0]]
            for node in function.node_def
            if node.op == "ReadVariableOp" and node.input[0].split(":")[0] in handles
        }
        arguments = {argument.name for argument in function.signature.input_arg}
        if not arguments.issuperset(readings.values()):
            return False
        gone = {*handles, *readings}
        kept = [node for node in function.node_def if node.name not in gone]
        kept = [type(node).FromString(node.SerializeToString()) for node in kept]
        for node in kept:
            names = [name for name in node.input if not (name.startswith("^") and name[1:] in gone)]
            node.input[:] = [readings.get(name.split(":")[0], name) for name in names]
        del function.node_def[:]
        function.node_def.extend(kept)
        for name, given in list(function.ret.items()):
            function.ret[name] = readings.get(given.split(":")[0], given)
    return True


def _shape_of(function: Any, at: int) -> Any:
    """The shape of an argument, where it is known."""
    if at not in function.arg_attr or "_output_shapes" not in function.arg_attr[at].attr:
        return None
    (shape,) = function.arg_attr[at].attr["_output_shapes"].list.shape
    known = not shape.unknown_rank and all(dim.size >= 0 for dim in shape.dim)
    return shape if known else None


def rename_functions(graph_def: Any) -> None:
    """Optimised bodies get names of their own: TensorFlow keeps the function that it knows by a name."""
    functions = graph_def.library.function
    content = b"".join(function.SerializeToString(deterministic=True) for function in functions)
    mark = hashlib.sha256(content).hexdigest()[:12]
    renamed = {function.signature.name: f"{function.signature.name}_{mark}" for function in functions}
    for function in functions:
        function.signature.name = renamed[function.signature.name]
    for node in all_nodes(graph_def):
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                if called.name in renamed:
                    called.name = renamed[called.name]


def register_functions(graph_def: Any) -> None:
    """Bodies that the optimiser made are not known to TensorFlow yet."""
    context = eager_context.context()
    for function in graph_def.library.function:
        if not context.has_function(function.signature.name):
            context.add_function_def(function)

"""ONNX files before they are a graph: parsed, functions written out, free axes bound, shapes inferred.

The `onnx` package does the work; it is written in C++ for files that are well meant, so what it could choke
on (functions that call themselves, graphs inside of ops) is refused before it sees it.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadmaster.core.errors import FormatError, InputError, SchemaError
from loadmaster.graph.formats._inference import MOST_AXES, Value
from loadmaster.graph.formats._onnx_sizes import MOST_ELEMENTS, evaluate_sizes
from loadmaster.graph.models import DEFAULT_SEQ
from loadmaster.graph.origin import DEFAULT_BATCH

_MOST_OPS = 5_000_000
_FEW = 5
_STANDARD = ("", "ai.onnx")
_BY_AXES = {"Squeeze", "Unsqueeze"}


def import_onnx() -> Any:
    """The package, imported when a file needs it."""
    try:
        import onnx
        import onnx.inliner
        import onnx.shape_inference
    except ImportError:
        raise InputError("an ONNX file needs the onnx package: pip install 'loadmaster[onnx]'") from None
    return onnx


@dataclass(slots=True)
class Axes:
    """The sizes that free axes get, and those that were given out."""

    batch: int | None = None
    seq: int | None = None
    bound: dict[str, int] = field(default_factory=dict)

    def size(self, name: str, at: int, *, tokens: bool) -> int | None:
        """The size of a free axis, or None where its name says nothing."""
        word = name.lower()
        if word in self.bound:
            return self.bound[word]
        if "batch" in word or (at == 0 and "seq" not in word):
            size, label = self.batch or DEFAULT_BATCH, word or "batch"
        elif ("seq" in word and "past" not in word and "total" not in word) or (at == 1 and tokens):
            size, label = self.seq or DEFAULT_SEQ, word or "seq"
        else:
            return None
        self.bound[label] = size
        return size

    def describe_bound_axes(self) -> list[str]:
        """What was bound, for the graph to say; sizes given for nothing are refused."""
        if not self.bound and (self.batch is not None or self.seq is not None):
            raise InputError("all axes of this ONNX file have fixed sizes; leave batch and seq out")
        shown = [f"{name}={size}" for name, size in self.bound.items()]
        return [f"free axes {', '.join(shown[:_FEW])}"] if shown else []


def parse_model(onnx: Any, data: bytes) -> Any:
    """The model; its versions are those this onnx knows."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as problem:  # protobuf's own, which is another one in each of its versions
        raise FormatError(f"not an ONNX model: {' '.join(str(problem).split())[:200]}") from None
    if not model.HasField("graph"):
        raise FormatError("not an ONNX model: it has no graph")
    _require_text(model)
    if model.ir_version > onnx.IR_VERSION:
        raise SchemaError(
            f"the model has IR version {model.ir_version}, the installed onnx knows {onnx.IR_VERSION};"
            " upgrade onnx"
        )
    newest = onnx.defs.onnx_opset_version()
    for domain, version in _opset_versions(model).items():
        if domain in _STANDARD and not 1 <= version <= newest:
            raise SchemaError(
                f"the model uses opset {version}, the installed onnx knows 1 to {newest}; upgrade onnx"
            )
    return model


def _require_text(model: Any) -> None:
    """Refuse names that are not text; protobuf hands such out as bytes."""
    graph = model.graph
    nodes = [*graph.node, *(node for function in model.functions for node in function.node)]
    entries = [*graph.input, *graph.output, *graph.value_info]
    words = [
        word for node in nodes for word in (node.name, node.op_type, node.domain, *node.input, *node.output)
    ]
    words += [attribute.name for node in nodes for attribute in node.attribute]
    words += [word for node in nodes for prop in node.metadata_props for word in (prop.key, prop.value)]
    words += [tensor.name for tensor in graph.initializer]
    words += [part.name for tensor in graph.sparse_initializer for part in (tensor.values, tensor.indices)]
    words += [entry.name for entry in entries]
    words += [axis.dim_param for entry in entries for axis in entry.type.tensor_type.shape.dim]
    words += [word for function in model.functions for word in (function.name, function.domain)]
    words += [entry.domain for part in (model, *model.functions) for entry in part.opset_import]
    if not all(isinstance(word, str) for word in words):
        raise FormatError("not an ONNX model: a name in it is not text")


def _opset_versions(model: Any) -> dict[str, int]:
    return {entry.domain: entry.version for entry in model.opset_import}


def inline_functions(onnx: Any, model: Any) -> Any:
    """The model with its own functions written out, of standard ops only."""
    functions = {(function.domain, function.name): function for function in model.functions}
    _require_known(onnx, model.graph.node, _opset_versions(model), functions)
    for function in functions.values():
        opsets = {entry.domain: entry.version for entry in function.opset_import}
        _require_known(onnx, function.node, opsets, functions)
    if not functions:
        return model
    if _count_inlined_ops(model, functions) > _MOST_OPS:
        raise FormatError(f"the model's functions expand to more than {_MOST_OPS} ops; the file looks broken")
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as problem:  # C++ exceptions of many kinds
        raise FormatError(f"the model's functions cannot be expanded: {str(problem)[:200]}") from None


def _require_known(
    onnx: Any, nodes: Iterable[Any], opsets: Mapping[str, int], functions: Mapping[Any, Any]
) -> None:
    """Refuse, by name, ops that are not of the standard and ops that run graphs."""
    unknown: dict[str, None] = {}
    graphs = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type in graphs or attribute.HasField("g") or attribute.graphs:
                raise FormatError(
                    f"op {node.name!r} is {node.op_type}, which runs a graph of its own as often as values"
                    " say; export the model without control flow"
                )
        if (node.domain, node.op_type) in functions:
            continue
        domain = "" if node.domain in _STANDARD else node.domain
        version = opsets.get(domain, opsets.get("ai.onnx") if domain == "" else None)
        if version is None or not onnx.defs.has(node.op_type, version, domain):
            unknown[f"{node.domain}.{node.op_type}".lstrip(".")] = None
    if unknown:
        shown = ", ".join([*unknown][:_FEW]) + ", ..." * (len(unknown) > _FEW)
        raise FormatError(
            f"the model has ops that the ONNX standard does not know: {shown}; export it without fused or"
            " custom ops"
        )


def _count_inlined_ops(model: Any, functions: Mapping[Any, Any]) -> int:
    """How many ops there will be; a function that calls itself is refused."""
    size: dict[Any, int] = {}
    for root in functions:
        open_: dict[Any, None] = {}
        stack = [root]
        while stack:
            key = stack[-1]
            calls = {
                (node.domain, node.op_type)
                for node in functions[key].node
                if (node.domain, node.op_type) in functions
            }
            wanted = [call for call in calls if call not in size]
            if key in size or not wanted:
                size.setdefault(key, _num_ops(functions[key].node, size))
                open_.pop(key, None)
                stack.pop()
            elif any(call in open_ or call == key for call in wanted):
                raise FormatError(f"function {key[1]!r} of the model calls itself; the file is broken")
            else:
                open_[key] = None
                stack += wanted
    return _num_ops(model.graph.node, size)


def _num_ops(nodes: Iterable[Any], size: Mapping[Any, int]) -> int:
    return sum(size.get((node.domain, node.op_type), 1) for node in nodes)


def infer_types(
    onnx: Any, model: Any, axes: Axes, weights: Mapping[str, tuple[Value, int]]
) -> dict[str, Any]:
    """The type of every value by name; what sizes are made of is worked out until nothing more is learnt."""
    for entry in model.graph.input:
        if entry.name not in weights:
            _bind_free_axes(entry, axes)
    for entry in [*model.graph.value_info, *model.graph.output]:
        _forget_free_axes(entry, axes)
    nodes = list(model.graph.node)
    made = [output for node in nodes for output in node.output if output]
    known = _small_values(onnx, model, weights)
    learnt = evaluate_sizes(onnx, nodes, {}, known)  # constants, and what is made of them
    while True:
        _require_axes(nodes, {**known, **learnt})
        types = _infer_types_once(onnx, model, weights, learnt)
        shapes = _fixed_shapes(types) | {name: value.shape for name, (value, _) in weights.items()}
        if all(output in shapes for output in made):
            return types
        more = evaluate_sizes(onnx, nodes, shapes, {**known, **learnt})
        if not more:
            return types
        learnt |= more


def _require_axes(nodes: Iterable[Any], known: Mapping[str, Any]) -> None:
    """Refuse axes beyond any tensor's: onnx takes memory for as many as they say."""
    for node in nodes:
        said = [number for entry in node.attribute if entry.name == "axes" for number in entry.ints]
        if node.op_type in _BY_AXES:
            for name in node.input[1:]:
                said += known[name].reshape(-1).tolist() if name in known else []
        if any(not -MOST_AXES <= number <= MOST_AXES for number in said):
            raise FormatError(
                f"op {node.name!r} ({node.op_type}) names an axis beyond {MOST_AXES}; the file looks broken"
            )


def _small_values(onnx: Any, model: Any, weights: Mapping[str, tuple[Value, int]]) -> dict[str, Any]:
    """The initialisers that may be sizes."""
    found = {}
    for tensor in model.graph.initializer:
        if _may_be_shape(onnx, tensor, weights):
            with contextlib.suppress(Exception):  # broken data stays unknown
                found[tensor.name] = onnx.numpy_helper.to_array(tensor)
    return found


def _infer_types_once(
    onnx: Any, model: Any, weights: Mapping[str, tuple[Value, int]], learnt: Mapping[str, Any]
) -> dict[str, Any]:
    """One pass of onnx's inference; large weights take part by their shape alone."""
    graph = model.graph
    small = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    small.graph.name = "model"
    small.graph.node.extend(node for node in graph.node if not any(name in learnt for name in node.output))
    small.graph.input.extend(entry for entry in graph.input if entry.name not in weights)
    small.graph.output.extend(entry for entry in graph.output if entry.name not in learnt)
    small.graph.value_info.extend(entry for entry in graph.value_info if entry.name not in learnt)
    for tensor in graph.initializer:
        if _may_be_shape(onnx, tensor, weights):
            small.graph.initializer.append(tensor)
        else:
            small.graph.input.append(_declare_value(onnx, tensor, weights[tensor.name][0]))
    for tensor in graph.sparse_initializer:
        small.graph.input.append(_declare_value(onnx, tensor.values, weights[tensor.values.name][0]))
    declared = {}
    for name, value in learnt.items():
        small.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        code = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        declared[name] = onnx.helper.make_tensor_type_proto(code, value.shape)
    try:
        found = onnx.shape_inference.infer_shapes(small).graph
    except Exception as problem:  # C++ exceptions of many kinds
        raise FormatError(f"shapes cannot be inferred: {' '.join(str(problem).split())[:300]}") from None
    return {entry.name: entry.type for entry in [*found.output, *found.value_info, *found.input]} | declared


def _declare_value(onnx: Any, tensor: Any, value: Value) -> Any:
    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, value.shape)


def _fixed_shapes(types: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes that are known to the last axis."""
    found = {}
    for name, kind in types.items():
        if kind.HasField("tensor_type") and kind.tensor_type.HasField("shape"):
            dims = kind.tensor_type.shape.dim
            if all(axis.HasField("dim_value") for axis in dims):
                found[name] = tuple(axis.dim_value for axis in dims)
    return found


def _may_be_shape(onnx: Any, tensor: Any, weights: Mapping[str, tuple[Value, int]]) -> bool:
    """Whether an initialiser's values may be a shape."""
    value = weights[tensor.name][0]
    outside = tensor.data_location == onnx.TensorProto.EXTERNAL
    return not outside and math.prod(value.shape) <= MOST_ELEMENTS


def _bind_free_axes(entry: Any, axes: Axes) -> None:
    """Give the free axes of an input sizes; `entry` is the model's, which is ours."""
    kind = entry.type
    if not kind.HasField("tensor_type"):
        raise FormatError(f"input {entry.name!r} is not a tensor; such models are not supported")
    if not kind.tensor_type.HasField("shape"):
        raise FormatError(f"input {entry.name!r} has no shape; give it one")
    dims = kind.tensor_type.shape.dim
    tokens = len(dims) == 2 and kind.tensor_type.elem_type in (6, 7)  # int32, int64
    for at, axis in enumerate(dims):
        if axis.HasField("dim_value") and axis.dim_value >= 0:
            continue
        size = axes.size(axis.dim_param, at, tokens=tokens)
        if size is None:
            raise FormatError(
                f"axis {at} ({axis.dim_param!r}) of input {entry.name!r} has no fixed size; only a batch and"
                " a sequence can be free: write the file with fixed sizes"
            )
        axis.Clear()
        axis.dim_value = size


def _forget_free_axes(entry: Any, axes: Axes) -> None:
    """Free axes of what is inside: those that were bound have their size, others are inferred."""
    if not entry.type.HasField("tensor_type"):
        return
    for axis in entry.type.tensor_type.shape.dim:
        if axis.HasField("dim_param"):
            size = axes.bound.get(axis.dim_param.lower())
            axis.Clear()
            if size is not None:
                axis.dim_value = size

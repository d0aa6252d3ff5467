"""ONNX files, read with the `onnx` package (extra `[onnx]`), shapes by its own inference; inference graphs.

Initialisers are param ops; their bytes follow from shape and element type, and what a file keeps elsewhere
(external data) is not read. Flops are counted for products, convolutions, attention, recurrent layers and
einsum; every other op of the standard is bound by memory traffic. An op that the standard does not know, and
one that runs graphs of its own (If, Loop, Scan), is refused by name: nothing could be said of its work.

Free axes of the inputs are bound: one named like a batch, or the first, to `batch`; one named like a
sequence, or the second of integers, to `seq`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loadmaster.core.errors import FormatError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Workload
from loadmaster.graph.formats import _flops
from loadmaster.graph.formats._inference import (
    ELEMENTS,
    Recording,
    Row,
    Value,
    check_size,
    module_of_name,
    sort_rows,
)
from loadmaster.graph.formats._onnx import Axes, import_onnx, infer_types, inline_functions, parse_model

_ELEMENT_NAMES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "COMPLEX64": "complex64",
    "COMPLEX128": "complex128",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
    "FLOAT4E2M1": "float4_e2m1",
    "FLOAT6E2M3": "float6_e2m3",
    "FLOAT6E3M2": "float6_e3m2",
}
_FIRST_TAGS = frozenset(b"\x12\x1a\x22\x28\x32\x3a\x42\x72")  # fields 2 to 8 and 14 of a model
_NEWEST_IR = 64
_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"}
_PICKS = {"Gather", "GatherElements", "GatherND", "Slice"}
_IGNORES = {"Shape", "Size"}
_HIDDEN_STATES = {"LSTM", "GRU", "RNN"}


def recognises(data: bytes) -> bool:
    """Whether this begins as a model does: its version, then another field of it."""
    return len(data) > 2 and data[0] == 8 and 0 < data[1] < _NEWEST_IR and data[2] in _FIRST_TAGS


def read(data: bytes, name: str, *, batch: int | None = None, seq: int | None = None) -> Workload:
    """The model's inference; an ONNX file brings no cluster and no costs."""
    return Workload(_build_graph(import_onnx(), data, name, Axes(batch, seq)))


def _build_graph(onnx: Any, data: bytes, name: str, axes: Axes) -> Graph:
    model = inline_functions(onnx, parse_model(onnx, data))
    if not model.graph.node:
        raise FormatError("not an ONNX model: its graph has no node")
    weights = {
        **_dense_initialisers(onnx, model.graph.initializer),
        **_sparse_initialisers(onnx, model.graph.sparse_initializer),
    }
    constants = [node for node in model.graph.node if _is_constant(node)]
    types = infer_types(onnx, model, axes, weights)
    recording = Recording()
    homes = {name: _module_of(node) for node in reversed(model.graph.node) for name in node.input}
    for title, (value, size) in weights.items():
        named = "::" not in title and "/" not in title  # as the model names it, not as an exporter does
        module = title.rpartition(".")[0] if named and "." in title else homes.get(title, "")
        recording.weight(title, value, title=title, module=module, storage_bytes=size)
    for node in constants:
        value = _inferred_value(onnx, types, node.output[0], node)
        recording.weight(
            node.output[0], value, title=_node_title(node), kind="constant", module=_module_of(node)
        )
    for entry in model.graph.input:
        if entry.name not in weights:
            recording.input(entry.name, _inferred_value(onnx, types, entry.name, None), title=entry.name)
    values = {title: value for title, (value, _) in weights.items()}
    rows = [_make_row(onnx, node, types, values) for node in model.graph.node if not _is_constant(node)]
    for row in sort_rows(rows):
        recording.op(row)
    for output in model.graph.output:
        recording.keep(output.name)
    recording.notes += axes.describe_bound_axes()
    return recording.graph(name, "ONNX file, inference")


def _is_constant(node: Any) -> bool:
    return node.op_type == "Constant" and not node.domain and len(node.output) == 1 and not node.input


def _node_title(node: Any) -> str:
    return str(node.name or next((output for output in node.output if output), node.op_type))


def _module_of(node: Any) -> str:
    """The module an op comes from, as the exporter wrote it down."""
    for entry in node.metadata_props:
        if entry.key == "namespace":  # 'conv: torch.nn.Conv2d/conv2d: aten.conv2d'
            path = [part.partition(":")[0].strip() for part in entry.value.split("/")[:-1]]
            return next((part for part in reversed(path) if part), "")
    return module_of_name(node.name)


def _dense_initialisers(onnx: Any, tensors: Iterable[Any]) -> dict[str, tuple[Value, int]]:
    """The initialisers by name, with their bytes."""
    found = {}
    for tensor in tensors:
        value = _make_value(onnx, tensor.data_type, tuple(tensor.dims), f"initialiser {tensor.name!r}")
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not external and tensor.raw_data and len(tensor.raw_data) != value.num_bytes:
            raise FormatError(
                f"initialiser {tensor.name!r} holds {len(tensor.raw_data)} bytes, its shape"
                f" {list(tensor.dims)} needs {value.num_bytes}; the file is broken"
            )
        if tensor.name in found:
            raise FormatError(f"two initialisers are called {tensor.name!r}; the file is broken")
        found[tensor.name] = value, value.num_bytes
    return found


def _sparse_initialisers(onnx: Any, tensors: Iterable[Any]) -> dict[str, tuple[Value, int]]:
    """Sparse initialisers: resident are their values and indices."""
    found = {}
    for tensor in tensors:
        name = tensor.values.name
        value = _make_value(onnx, tensor.values.data_type, tuple(tensor.dims), f"sparse initialiser {name!r}")
        held = (
            _dense_initialisers(onnx, [tensor.values])[name][1]
            + _dense_initialisers(onnx, [tensor.indices])[tensor.indices.name][1]
        )
        found[name] = value, held
    return found


def _make_value(onnx: Any, code: int, shape: tuple[int, ...], what: str) -> Value:
    try:
        word = onnx.TensorProto.DataType.Name(code)
    except ValueError:
        word = str(code)
    element = ELEMENTS.get(_ELEMENT_NAMES.get(word, word.lower()))
    if element is None:
        raise FormatError(f"{what} has elements of type {word}; only numbers are read")
    return check_size(Value(shape, element), what)


def _inferred_value(onnx: Any, types: dict[str, Any], name: str, node: Any) -> Value:
    """The shape of a value, as inferred."""
    what = (
        f"input {name!r}"
        if node is None
        else f"what op {_node_title(node)!r} ({node.op_type}) makes, {name!r},"
    )
    kind = types.get(name)
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        raise FormatError(
            f"{what} has no shape that can be inferred; fix the sizes of the model's inputs or simplify it,"
            " for example with onnxsim"
        )
    shape = []
    for axis in kind.tensor_type.shape.dim:
        if not axis.HasField("dim_value"):
            raise FormatError(
                f"{what} has an axis {axis.dim_param!r} whose size cannot be inferred; fix the sizes of the"
                " model's inputs or simplify it, for example with onnxsim"
            )
        shape.append(axis.dim_value)
    return _make_value(onnx, kind.tensor_type.elem_type, tuple(shape), what)


def _make_row(onnx: Any, node: Any, types: dict[str, Any], weights: dict[str, Value]) -> Row:
    makes = tuple((output, _inferred_value(onnx, types, output, node)) for output in node.output if output)
    values = [_read_input(onnx, node, name, types, weights) if name else None for name in node.input]
    attributes = _attributes_of(onnx, node)
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    flops, title = 0.0, _node_title(node)
    if rule is not None:
        shapes = [None if value is None else value.shape for value in values]
        outputs = [value.shape for _, value in makes]
        flops = _flops.count_or_refuse(
            lambda: rule(shapes, outputs, attributes), f"op {title!r} ({node.op_type})"
        )
    kind = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    is_view = kind in _VIEWS and bool(node.input) and node.input[0] != ""
    return Row(
        title,
        kind,
        _module_of(node),
        tuple(node.input),
        makes,
        signature=_make_signature(kind, values, attributes),
        flops=flops,
        views=(makes[0][0],) if is_view and makes else (),
        picks=kind in _PICKS,
        ignores=kind in _IGNORES,
    )


def _read_input(onnx: Any, node: Any, name: str, types: dict[str, Any], weights: dict[str, Value]) -> Value:
    if name in weights:
        return weights[name]
    if name not in types:
        raise FormatError(f"op {_node_title(node)!r} reads {name!r}, which nothing makes; the file is broken")
    return _inferred_value(onnx, types, name, node)


def _attributes_of(onnx: Any, node: Any) -> dict[str, Any]:
    """Numbers and words; tensors say nothing about cost."""
    plain = onnx.AttributeProto
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type == plain.INT:
            found[attribute.name] = attribute.i
        elif attribute.type == plain.INTS:
            found[attribute.name] = tuple(attribute.ints)
        elif attribute.type == plain.FLOAT:
            found[attribute.name] = attribute.f
        elif attribute.type == plain.STRING:
            found[attribute.name] = attribute.s.decode("utf-8", "replace")
    return found


def _make_signature(kind: str, values: Sequence[Value | None], attributes: dict[str, Any]) -> str:
    words = [f"onnx.{kind}", *(str(value) for value in values)]
    for name, value in sorted(attributes.items()):
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        words.append(f"{name}={shown}")
    return " ".join(words)


_Rule = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], int]


def _gemm_flops(inputs: Sequence[Any], outputs: Sequence[Any], attributes: dict[str, Any]) -> int:
    return _flops.product(inputs[0], inputs[1], outputs[0], transposed=bool(attributes.get("transA", 0)))


def _attention_flops(inputs: Sequence[Any], outputs: Sequence[Any], attributes: dict[str, Any]) -> int:
    """[batch, heads, length, width], or heads and width in one last axis; what was before is attended to."""
    query, key, value = inputs[:3]
    past = inputs[4][-2] if len(inputs) > 4 and inputs[4] is not None else 0
    groups = 1
    if len(query) == 3:  # all heads of the query in one axis, fewer of the value
        groups = attributes["q_num_heads"] // attributes["kv_num_heads"]
    whole = (*key[:-2], key[-2] + past, key[-1])
    return _flops.attention(query, whole, (*value[:-1], value[-1] * groups))


def _recurrent_flops(inputs: Sequence[Any], outputs: Sequence[Any], attributes: dict[str, Any]) -> int:
    return _flops.recurrent(inputs[0], inputs[1:3])


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("MatMul", "MatMulInteger"), lambda i, o, _: _flops.product(i[0], i[1], o[0])),
    "QLinearMatMul": lambda i, o, _: _flops.product(i[0], i[3], o[0]),
    "Gemm": _gemm_flops,
    **dict.fromkeys(
        ("Conv", "ConvInteger", "DeformConv"), lambda i, o, _: _flops.convolution(i[0], i[1], o[0])
    ),
    "QLinearConv": lambda i, o, _: _flops.convolution(i[0], i[3], o[0]),
    "ConvTranspose": lambda i, o, _: _flops.convolution(i[0], i[1], o[0], transposed=True),
    "Attention": _attention_flops,
    **dict.fromkeys(_HIDDEN_STATES, _recurrent_flops),
    "Einsum": lambda i, o, a: _flops.einsum(a["equation"], i),
}

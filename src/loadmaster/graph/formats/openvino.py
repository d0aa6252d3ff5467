"""OpenVINO IR (the .xml; its .bin is not read): layers, ports, edges, shapes, precisions; inference graphs.

Versions 10 and 11. A Const is a param op, of the size the file says; a Parameter is an input, a Result keeps
what it is given. Flops are counted for products, convolutions, attention, recurrent layers and einsum; every
other layer is bound by memory traffic, also one of an extension, which the graph then names. Layers that run
graphs of their own (TensorIterator, Loop, If) are refused by name, and so is an axis without a size.
"""

import re
from collections.abc import Callable, Sequence

from loadmaster.core.errors import FormatError
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
from loadmaster.graph.formats._ir import Document, Layer, Port, parse_ir

_BEGINNING = re.compile(rb"\s*<(\?xml|net\b|!)")
_NET = re.compile(rb"<net\b")
_BEGINNING_BYTES = 4096
_PRECISIONS = {
    "FP64": "float64",
    "FP32": "float32",
    "FP16": "float16",
    "BF16": "bfloat16",
    "F8E4M3": "float8_e4m3fn",
    "F8E5M2": "float8_e5m2",
    "F8E8M0": "float8_e8m0fnu",
    "F4E2M1": "float4_e2m1",
    "NF4": "nfloat4",
    "BOOL": "bool",
    "BOOLEAN": "bool",
    "BIN": "uint1",
    **{f"I{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (1, 2, 3, 4, 6, 8, 16, 32, 64)},
}
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze"}
_PICKS = {"Gather", "GatherElements", "GatherND", "Slice", "StridedSlice"}
_IGNORES = {"ShapeOf", "Reshape"}
_OPSETS = re.compile(r"opset\d+|util|ie_internal_opset|internal|experimental|")
_FEW = 5
_Port = tuple[int, int]  # layer, port


def recognises(data: bytes) -> bool:
    """Whether this is XML whose root is a <net>."""
    return _BEGINNING.match(data) is not None and _NET.search(data[:_BEGINNING_BYTES]) is not None


def read(data: bytes, name: str) -> Workload:
    """The model's inference; an IR brings no cluster and no costs."""
    document = parse_ir(data)
    layers = _layers_by_id(document)
    given = _find_inputs(document, layers)
    recording = Recording()
    rows = []
    for layer in document.layers:
        if layer.type == "Const":
            _record_weight(recording, layer)
        elif layer.type == "Parameter":
            for port in layer.outputs:
                recording.input((layer.id, port), _output_value(layer, port), title=layer.name)
        elif layer.type != "Result":
            rows.append(_make_row(layer, layers, given.get(layer.id, {})))
    for row in sort_rows(rows):
        recording.op(row)
    for layer in document.layers:
        if layer.type == "Result":
            for source in given.get(layer.id, {}).values():
                recording.keep(source)
    _note_extensions(recording, document)
    return Workload(recording.graph(name, "OpenVINO IR file, inference"))


def _layers_by_id(document: Document) -> dict[int, Layer]:
    found: dict[int, Layer] = {}
    for layer in document.layers:
        if layer.id in found:
            raise FormatError(f"two layers have id {layer.id}: {found[layer.id].name!r} and {layer.name!r}")
        found[layer.id] = layer
    return found


def _find_inputs(document: Document, layers: dict[int, Layer]) -> dict[int, dict[int, _Port]]:
    """By layer and input port, the output port that feeds it."""
    found: dict[int, dict[int, _Port]] = {}
    for edge in document.edges:
        for end in (edge.source, edge.target):
            if end not in layers:
                raise FormatError(f"an edge names layer {end}, which does not exist; the file is broken")
        if edge.source_port not in layers[edge.source].outputs:
            raise FormatError(
                f"an edge leaves layer {layers[edge.source].name!r} by port {edge.source_port}, which it does"
                " not have; the file is broken"
            )
        ports = found.setdefault(edge.target, {})
        if edge.target_port in ports:
            raise FormatError(
                f"two edges end at port {edge.target_port} of layer {layers[edge.target].name!r}"
            )
        ports[edge.target_port] = edge.source, edge.source_port
    return found


def _record_weight(recording: Recording, layer: Layer) -> None:
    for port in layer.outputs:
        value = _output_value(layer, port)
        size = layer.data.get("size", "")
        if size and (not size.isascii() or not size.isdigit() or int(size[:20]) != value.num_bytes):
            raise FormatError(
                f"constant {layer.name!r} has {size[:20]} bytes, its shape {list(value.shape)} needs"
                f" {value.num_bytes}; the file is broken"
            )
        title = layer.name or f"const_{layer.id}"
        module = module_of_name(title) if "/" in title else title.removeprefix("self.").rpartition(".")[0]
        recording.weight((layer.id, port), value, title=title, kind="constant", module=module)


def _make_row(layer: Layer, layers: dict[int, Layer], given: dict[int, _Port]) -> Row:
    reads = tuple(given[port] for port in sorted(given))
    missing = [port for port in layer.inputs if port not in given]
    if missing:
        raise FormatError(f"nothing feeds port {missing[0]} of layer {layer.name!r}; the file is broken")
    values = [_output_value(layers[source], port) for source, port in reads]
    makes = tuple(((layer.id, port), _output_value(layer, port)) for port in sorted(layer.outputs))
    shapes = [value.shape for value in values]
    outputs = [value.shape for _, value in makes]
    rule = _RULES.get(layer.type)
    flops = 0.0
    if rule is not None:
        flops = _flops.count_or_refuse(
            lambda: rule(shapes, outputs, layer.data), f"layer {layer.name!r} ({layer.type})"
        )
    words = [
        f"openvino.{layer.type}",
        *map(str, values),
        *(f"{k}={v}" for k, v in sorted(layer.data.items())),
    ]
    return Row(
        layer.name or f"{layer.type}_{layer.id}",
        layer.type,
        module_of_name(layer.name.removesuffix("/WithoutBiases")),
        reads,
        makes,
        signature=" ".join(words),
        flops=flops,
        views=(makes[0][0],) if layer.type in _VIEWS and makes and reads else (),
        picks=layer.type in _PICKS,
        ignores=layer.type in _IGNORES,
    )


def _output_value(layer: Layer, port: int) -> Value:
    """What an output port gives."""
    found: Port = layer.outputs[port]
    what = f"port {port} of layer {layer.name!r} ({layer.type})"
    element = ELEMENTS.get(_PRECISIONS.get(found.precision.upper(), ""))
    if element is None:
        raise FormatError(f"{what} has precision {found.precision!r}; only numbers are read")
    if any(length < 0 for length in found.shape):
        raise FormatError(
            f"{what} has shape {found.shape}, whose -1 is no size; give the inputs fixed sizes with"
            " model.reshape(...) and save it again"
        )
    return check_size(Value(tuple(found.shape), element), what)


def _note_extensions(recording: Recording, document: Document) -> None:
    kinds = {layer.type for layer in document.layers if _OPSETS.fullmatch(layer.opset) is None}
    if kinds:
        shown = ", ".join(sorted(kinds)[:_FEW]) + ", ..." * (len(kinds) > _FEW)
        recording.notes.append(f"for unknown ops only memory traffic is counted: {shown}")


_Shapes = Sequence[tuple[int, ...]]
_Rule = Callable[[_Shapes, _Shapes, dict[str, str]], int]


def _matmul_flops(inputs: _Shapes, outputs: _Shapes, data: dict[str, str]) -> int:
    turned = data.get("transpose_a", "").lower() in ("true", "1")
    return _flops.product(inputs[0], inputs[1], outputs[0], transposed=turned)


def _convolution_rule(weight: int, *, transposed: bool = False) -> _Rule:
    return lambda i, o, _: _flops.convolution(i[0], i[weight], o[0], transposed=transposed)


def _recurrent_rule(first: int) -> _Rule:
    """The two weights stand at `first` and after it."""
    return lambda i, _, __: _flops.recurrent(i[0], i[first : first + 2])


_RULES: dict[str, _Rule] = {
    "MatMul": _matmul_flops,
    **dict.fromkeys(("Convolution", "GroupConvolution", "BinaryConvolution"), _convolution_rule(1)),
    "DeformableConvolution": _convolution_rule(2),
    **dict.fromkeys(
        ("ConvolutionBackpropData", "GroupConvolutionBackpropData"), _convolution_rule(1, transposed=True)
    ),
    "ScaledDotProductAttention": lambda i, _, __: _flops.attention(i[0], i[1], i[2]),
    "LSTMCell": _recurrent_rule(3),
    **dict.fromkeys(("GRUCell", "RNNCell"), _recurrent_rule(2)),
    "LSTMSequence": _recurrent_rule(4),
    **dict.fromkeys(("GRUSequence", "RNNSequence"), _recurrent_rule(3)),
    "Einsum": lambda i, _, d: _flops.einsum(d["equation"], i),
}

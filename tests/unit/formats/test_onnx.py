"""ONNX files: models made with onnx.helper and by torch's exporter, against capture; and broken ones."""

import contextlib
import io
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

onnx = pytest.importorskip("onnx", reason="ONNX files need the extra [onnx]")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from loadmaster.core.errors import FormatError, GraphError, InputError, SchemaError  # noqa: E402
from loadmaster.core.graph import Dtype, Graph, Phase  # noqa: E402
from loadmaster.graph.formats import onnx as reader  # noqa: E402
from loadmaster.graph.models import CaptureOptions  # noqa: E402
from loadmaster.graph.source import read_source  # noqa: E402
from tests.unit.damage import damaged  # noqa: E402
from tests.unit.formats.format_samples import by_name, tensors_of  # noqa: E402

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def node(kind: str, reads: list[str], makes: list[str], **attributes: Any) -> Any:
    return helper.make_node(kind, reads, makes, name=attributes.pop("name", makes[0]), **attributes)


def weight(name: str, *shape: int, dtype: Any = np.float32) -> Any:
    return numpy_helper.from_array(np.zeros(shape, dtype), name)


def value(name: str, shape: Any, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[str], weights: Any = (), **more: Any) -> Any:
    made = [value(name, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, made, list(weights), value_info=more.pop("value_info", []))
    opsets = [
        helper.make_opsetid(domain, version) for domain, version in more.pop("opsets", {"": 23}).items()
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def read(made: Any, **sizes: int) -> Graph:
    return reader.read(made.SerializeToString(), "m", **sizes).graph


def flops(kind: str, *shapes: tuple[int, ...], **attributes: Any) -> float:
    """Of one op on inputs of these shapes."""
    inputs = [value(f"i{at}", shape) for at, shape in enumerate(shapes)]
    reads = [f"i{at}" for at in range(len(shapes))]
    return float(read(model([node(kind, reads, ["y"], **attributes)], inputs, ["y"])).flops.sum())


def net() -> Any:
    """x ─► Conv ─► Relu ─► Flatten ─► Gemm ─► y."""
    nodes = [
        node("Conv", ["x", "conv.weight"], ["c"], name="/conv/Conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="/act/Relu"),
        node("Flatten", ["r"], ["f"], name="/Flatten"),
        node("Gemm", ["f", "fc.weight", "fc.bias"], ["y"], name="/fc/Gemm", transB=1),
    ]
    weights = [weight("conv.weight", 8, 3, 3, 3), weight("fc.weight", 10, 128), weight("fc.bias", 10)]
    return model(nodes, [value("x", [2, 3, 4, 4])], ["y"], weights)


@pytest.mark.parametrize(
    ("kind", "shapes", "attributes", "expected"),
    [
        ("MatMul", [(3, 4), (4, 5)], {}, 2 * 3 * 4 * 5),
        ("MatMul", [(7, 1, 3, 4), (6, 4, 5)], {}, 2 * 42 * 3 * 4 * 5),
        ("MatMul", [(3, 4), (4,)], {}, 0),  # a vector: bound by memory, as in torch's counter
        ("Gemm", [(4, 3), (5, 4)], {"transA": 1, "transB": 1}, 2 * 3 * 4 * 5),
        ("Conv", [(2, 6, 9, 9), (4, 3, 3, 3)], {"group": 2, "strides": [2, 2]}, 2 * 2 * 16 * 4 * 27),
        ("ConvTranspose", [(2, 6, 5, 5), (6, 4, 3, 3)], {}, 2 * 2 * 25 * 6 * 4 * 9),
        ("LSTM", [(5, 3, 7), (2, 32, 7), (2, 32, 8)], {"hidden_size": 8, "direction": "bidirectional"},
         2 * 15 * 2 * 32 * (7 + 8)),
        ("Einsum", [(3, 4, 5), (3, 5, 6)], {"equation": "bij,bjk->bik"}, 2 * 3 * 4 * 5 * 6),
        ("Einsum", [(7, 4, 5), (7, 5, 6)], {"equation": "...ij,...jk"}, 2 * 7 * 4 * 5 * 6),
        ("Einsum", [(4,), (5,)], {"equation": "i,j->ij"}, 0),
        ("Attention", [(2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 10)], {}, 2 * 2 * 4 * 6 * 9 * (8 + 10)),
        ("Attention", [(2, 6, 32), (2, 9, 16), (2, 9, 20)], {"q_num_heads": 4, "kv_num_heads": 2},
         2 * 2 * 6 * 9 * (32 + 40)),
        ("Softmax", [(4, 4)], {}, 0),
    ],
)  # fmt: skip
def test_flops_of_an_op(kind: str, shapes: Any, attributes: Any, expected: float) -> None:
    assert flops(kind, *shapes, **attributes) == expected


def test_initialisers_are_params_and_modules_come_from_names() -> None:
    graph = read(net())
    held = {graph.op_name[op]: int(graph.resident_bytes[op]) for op in np.flatnonzero(graph.resident_bytes)}
    assert held == {"conv.weight": 864, "fc.weight": 5120, "fc.bias": 40}
    assert all(graph.phase[by_name(graph, name)] == Phase.PARAM for name in held)
    modules = {name: graph.module[by_name(graph, name)] for name in ("/conv/Conv", "/fc/Gemm", "fc.weight")}
    assert modules == {"/conv/Conv": "conv", "/fc/Gemm": "fc", "fc.weight": "fc"}
    assert graph.capture == "ONNX file, inference"
    assert tensors_of(graph, "/act/Relu") == [(1024, {"/Flatten"})]


def test_a_reshape_is_a_view_and_an_output_is_kept() -> None:
    graph = read(net())
    view = int(np.flatnonzero(graph.tensor_op == by_name(graph, "/Flatten"))[0])
    assert graph.tensor_op[graph.tensor_storage[view]] == by_name(graph, "/act/Relu")
    kept = {graph.op_name[graph.tensor_op[tensor]] for tensor in np.flatnonzero(graph.keep)}
    assert kept == {"x", "/fc/Gemm"}


def test_constants_are_params_and_a_gather_reads_only_what_it_gives() -> None:
    nodes = [
        node("Constant", [], ["at"], value=numpy_helper.from_array(np.array([1, 2]), "")),
        node("Gather", ["table", "at"], ["y"]),
    ]
    graph = read(model(nodes, [], ["y"], [weight("table", 1000, 16)]))
    assert graph.op_kind[by_name(graph, "at")] == "constant"
    assert graph.resident_bytes[by_name(graph, "at")] == 16
    assert graph.bytes_moved[by_name(graph, "y")] == 128 + 16 + 128


@pytest.mark.parametrize(
    ("kind", "num_bytes", "dtype"),
    [
        (TensorProto.BFLOAT16, 200, Dtype.BFLOAT16),
        (TensorProto.INT4, 50, Dtype.INT8),
        (TensorProto.FLOAT8E4M3FN, 100, Dtype.FLOAT8),
        (TensorProto.DOUBLE, 800, Dtype.FLOAT64),
        (TensorProto.INT16, 200, Dtype.INT32),
    ],
)
def test_data_kept_outside_is_sized_and_not_read(kind: int, num_bytes: int, dtype: Dtype) -> None:
    tensor = TensorProto(name="w", data_type=kind, dims=[10, 10], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/nowhere/at/all.bin")
    made = model([node("Identity", ["w"], ["y"])], [], ["y"], [tensor])
    made.graph.output[0].type.tensor_type.elem_type = kind
    graph = read(made)
    assert graph.resident_bytes[by_name(graph, "w")] == num_bytes
    assert graph.dtype[by_name(graph, "w")] == dtype


def free(*axes: Any, kind: int = FLOAT) -> Any:
    return model([node("MatMul", ["x", "w"], ["y"])], [value("x", axes, kind)], ["y"], [weight("w", 4, 5)])


def test_free_axes_are_bound_to_batch_and_seq_and_the_graph_says_so() -> None:
    graph = read(free("batch_size", "sequence_length", 4), batch=3, seq=7)
    assert graph.flops.sum() == 2 * 3 * 7 * 4 * 5
    assert graph.capture == "ONNX file, inference; free axes batch_size=3, sequence_length=7"
    assert read(free(None, 4)).flops.sum() == 2 * 8 * 4 * 5
    with pytest.raises(FormatError, match=r"axis 1 \('height'\) of input 'x' has no fixed size"):
        read(free("n", "height", 4))
    with pytest.raises(InputError, match="fixed sizes; leave batch"):
        read(free(3, 4), batch=2)


def test_the_arithmetic_of_sizes_is_followed() -> None:
    """Reshape to where(equal(concat(shape(x)[0], -1), -1), 6, ..): more than onnx's own inference does."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "zeros"], ["n1"]),
        node("Concat", ["n1", "minus"], ["target"], axis=0),
        node("Equal", ["target", "minus"], ["is"]),
        node("Where", ["is", "six", "target"], ["shape"]),
        node("Expand", ["one", "shape"], ["y"]),
    ]
    numbers = {"zero": 0, "zeros": [0], "minus": [-1], "six": [6]}
    weights = [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in numbers.items()]
    graph = read(model(nodes, [value("x", ["batch", 2])], ["y"], [*weights, weight("one", 1)]), batch=5)
    assert tensors_of(graph, "y") == [(5 * 6 * 4, set())]


def test_functions_of_the_model_are_written_out() -> None:
    body = [node("MatMul", ["a", "b"], ["t"]), node("Relu", ["t"], ["c"])]
    function = helper.make_function("mine", "Layer", ["a", "b"], ["c"], body, [helper.make_opsetid("", 23)])
    made = model(
        [helper.make_node("Layer", ["x", "w"], ["y"], domain="mine", name="layer")],
        [value("x", [2, 4])], ["y"], [weight("w", 4, 5)], opsets={"": 23, "mine": 1}, functions=[function],
    )  # fmt: skip
    graph = read(made)
    assert graph.flops.sum() == 2 * 2 * 4 * 5
    assert "Relu" in graph.op_kind


def test_functions_that_call_themselves_or_grow_without_bound_are_refused() -> None:
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("f", 1)]

    def calls(name: str, inner: str, times: int) -> Any:
        body = [
            helper.make_node(inner, [f"v{at}"], [f"v{at + 1}"], domain="f", name=f"{name}{at}")
            for at in range(times)
        ]
        return helper.make_function("f", name, ["v0"], [f"v{times}"], body, opsets)

    def called(functions: list[Any]) -> Any:
        first = helper.make_node("F0", ["x"], ["y"], domain="f", name="call")
        return model([first], [value("x", [2])], ["y"], opsets={"": 23, "f": 1}, functions=functions)

    with pytest.raises(FormatError, match="calls itself"):
        read(called([calls("F0", "F1", 1), calls("F1", "F0", 1)]))
    relu = helper.make_function("f", "F9", ["v0"], ["v1"], [node("Relu", ["v0"], ["v1"])], opsets)
    grows = [calls(f"F{at}", f"F{at + 1}", 10) for at in range(9)]
    with pytest.raises(FormatError, match="expand to more than"):
        read(called([*grows, relu]))


def branch() -> Any:
    made = helper.make_graph([node("Identity", ["x"], ["b"])], "then", [], [value("b", [2])])
    choice = node("If", ["c"], ["y"], then_branch=made, else_branch=made)
    return model([choice], [value("x", [2]), value("c", [], TensorProto.BOOL)], ["y"])


def broken_data() -> Any:
    made = net()
    made.graph.initializer[0].dims[0] = 9
    return made


def absurd() -> Any:
    made = net()
    made.graph.initializer[0].ClearField("raw_data")
    made.graph.initializer[0].dims[0] = 2**61
    return made


def cycle() -> Any:
    nodes = [node("Add", ["x", "b"], ["a"], name="one"), node("Relu", ["a"], ["b"], name="two")]
    return model(nodes, [value("x", [2])], ["b"], value_info=[value("a", [2]), value("b", [2])])


def twice() -> Any:
    nodes = [node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])]
    return model(nodes, [value("x", [2])], ["y"])


def huge_axis() -> Any:
    """onnx itself would take memory for 2 to the 62 axes."""
    axes = numpy_helper.from_array(np.array([2**62]), "axes")
    return model([node("Unsqueeze", ["x", "axes"], ["y"])], [value("x", [2])], ["y"], [axes])


def newer(*, opset: int = 23, version: int = 10) -> Any:
    made = net()
    made.ir_version = version
    made.opset_import[0].version = opset
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: model([node("FusedMatMul", ["x"], ["y"], domain="com.microsoft")], [value("x", [2])], ["y"]),
         r"does not know: com\.microsoft\.FusedMatMul; export"),
        (lambda: model([node("Rleu", ["x"], ["y"])], [value("x", [2])], ["y"]), "does not know: Rleu"),
        (branch, "op 'y' is If, which runs a graph of its own"),
        (broken_data, r"'conv.weight' holds 864 bytes, its shape \[9, 3, 3, 3\] needs 972"),
        (absurd, "'conv.weight' has the absurd shape"),
        (cycle, "in a cycle: 'one', 'two'"),
        (twice, "two ops make 'y'|inferred"),
        (lambda: model([node("Relu", ["nowhere"], ["y"])], [], ["y"]), "'y'|'nowhere'"),
        (lambda: model([node("NonZero", ["x"], ["y"])], [value("x", [2])], ["y"]), r"op 'y' \(NonZero\)"),
        (lambda: model([node("Relu", ["x"], ["y"])], [value("x", None)], ["y"]), "input 'x' has no shape"),
        (lambda: model([], [value("x", [2])], ["x"]), "no node"),
        (lambda: model([node("Identity", ["x"], ["y"])], [value("x", [2], TensorProto.STRING)], ["y"]),
         "elements of type STRING"),
        (lambda: newer(opset=999), "opset 999.*upgrade onnx"),
        (lambda: newer(version=999), "IR version 999.*upgrade onnx"),
        (lambda: model([node("Einsum", ["x", "x"], ["y"], equation="ij,jk->ik")], [value("x", [2])], ["z"],
                       value_info=[value("y", [2])]), r"op 'y' \(Einsum\) has inputs of shapes that do not"),
        (huge_axis, "names an axis beyond 64"),
    ],
)  # fmt: skip
def test_a_wrong_model_is_refused_with_the_reason(made: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(made())


def test_a_newer_version_is_a_schema_error() -> None:
    with pytest.raises(SchemaError):
        read(newer(version=999))


def test_a_name_that_is_not_text_is_refused() -> None:
    data = net().SerializeToString().replace(b"/act/Relu", b"/act/\xff\xfe\xfdu")
    with pytest.raises(FormatError, match="not text"):
        reader.read(data, "m")


def test_a_source_is_recognised_by_content_or_name(tmp_path: Path) -> None:
    plain, broken = tmp_path / "model", tmp_path / "broken.onnx"
    plain.write_bytes(net().SerializeToString())
    broken.write_bytes(b"no model")
    assert read_source(plain).graph.digest == read(net()).digest
    plain.write_bytes(free("batch", 4).SerializeToString())
    assert read_source(plain, asked=CaptureOptions(batch=2)).graph.flops.sum() == 2 * 2 * 4 * 5
    with pytest.raises(FormatError, match=r"broken\.onnx: not an ONNX model"):
        read_source(broken)


@cache
def exported(name: str) -> tuple[bytes, Any]:
    """A tiny model in the form torch's exporter gives it, and what capture says of it."""
    pytest.importorskip("torch", reason="torch exports and captures the model")
    import torch

    import loadmaster as lm
    from tests.torch_models import example

    built = example(name)
    for tensor in [*built.model.parameters(), *built.model.buffers()]:
        if tensor.is_floating_point():
            torch.nn.init.uniform_(tensor)  # torch's exporter makes one of two weights that are equal
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            built.model.eval(), built.args, buffer, kwargs=built.kwargs or None, dynamo=False,
            do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
        )  # fmt: skip
    return buffer.getvalue(), lm.capture(built.model.eval(), built.args, built.kwargs, train=False)


@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_a_model_exported_and_captured_counts_the_same(name: str) -> None:
    data, captured = exported(name)
    graph = reader.read(data, name).graph
    assert graph.flops.sum() == captured.flops.sum() > 0
    params = [op for op, kind in enumerate(captured.op_kind) if kind in ("param", "buffer", "constant")]
    counters = sum(int(captured.resident_bytes[op]) for op in params if captured.dtype[op] == Dtype.INT64)
    ours = [op for op, kind in enumerate(graph.op_kind) if kind == "param" and graph.dtype[op] != Dtype.INT64]
    assert graph.resident_bytes[ours].sum() == captured.resident_bytes.sum() - counters


NET = net().SerializeToString()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(NET))
def test_damage_gives_a_graph_or_a_clear_error(data: bytes) -> None:
    with contextlib.suppress(FormatError, GraphError):
        reader.read(data, "x")

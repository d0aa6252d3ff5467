"""OpenVINO IR: a file that OpenVINO 2026.4 itself wrote, and every way such a file can be wrong.

image[2,3,4,4] ─► conv (8 x 3x3x3) ─► relu ─► reshape [2,128] ─► matmul by fc.weight[10,128] (fp16) ─► logits
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from loadmaster.core.errors import FormatError, GraphError, InputError, SchemaError
from loadmaster.core.graph import Dtype, Graph, Phase
from loadmaster.graph.formats import openvino
from loadmaster.graph.models import CaptureOptions
from loadmaster.graph.source import read_source
from tests.unit.damage import damaged
from tests.unit.formats.format_samples import by_name, tensors_of

FILE = Path(__file__).parent / "tiny_openvino_ir.xml"
TEXT = FILE.read_text(encoding="utf-8")


def read(text: str = TEXT) -> Graph:
    return openvino.read(text.encode(), "tiny").graph


def edited(old: str, new: str, count: int = 1) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, count)


def test_layers_become_ops_in_order_with_their_modules() -> None:
    graph = read()
    forward = [name for name, phase in zip(graph.op_name, graph.phase, strict=True) if phase != Phase.PARAM]
    assert forward == [
        "image",
        "conv/Convolution",
        "act/Relu",
        "flat/Reshape",
        "fc.weight/decompressed",
        "fc/MatMul",
    ]
    assert graph.module[by_name(graph, "conv/Convolution")] == "conv"
    assert graph.module[by_name(graph, "fc.weight")] == "fc"
    assert graph.capture == "OpenVINO IR file, inference"


def test_flops_are_those_of_the_formulas() -> None:
    graph = read()
    assert graph.flops[by_name(graph, "conv/Convolution")] == 2 * (2 * 4 * 4) * (8 * 3 * 3 * 3)
    assert graph.flops[by_name(graph, "fc/MatMul")] == 2 * 2 * 128 * 10
    assert np.count_nonzero(graph.flops) == 2


def test_constants_are_resident_with_the_bytes_of_the_file() -> None:
    graph = read()
    held = {graph.op_name[op]: int(graph.resident_bytes[op]) for op in np.flatnonzero(graph.resident_bytes)}
    assert held == {"conv.weight": 864, "shape": 16, "fc.weight": 2560}
    assert graph.dtype[by_name(graph, "fc.weight")] == Dtype.FLOAT16


def test_a_reshape_is_a_view_and_moves_nothing() -> None:
    graph = read()
    view = int(np.flatnonzero(graph.tensor_op == by_name(graph, "flat/Reshape"))[0])
    assert graph.tensor_op[graph.tensor_storage[view]] == by_name(graph, "act/Relu")
    assert graph.bytes_moved[by_name(graph, "flat/Reshape")] == 0
    assert graph.bytes_moved[by_name(graph, "act/Relu")] == 2 * (2 * 8 * 4 * 4 * 4)


def test_edges_say_who_reads_what_and_a_result_keeps_it() -> None:
    graph = read()
    assert tensors_of(graph, "fc.weight") == [(2560, {"fc.weight/decompressed"})]
    assert tensors_of(graph, "fc.weight/decompressed") == [(5120, {"fc/MatMul"})]
    kept = {graph.op_name[graph.tensor_op[tensor]] for tensor in np.flatnonzero(graph.keep)}
    assert kept == {"image", "fc/MatMul"}


def test_layers_may_stand_in_any_order() -> None:
    start, end = TEXT.index('<layer id="8"'), TEXT.index('<layer id="9"')
    moved = TEXT[:start] + TEXT[end:]
    moved = moved.replace("<layers>", f"<layers>{TEXT[start:end]}", 1)
    assert read(moved).op_name[-1] == "fc/MatMul"
    assert read(moved).flops.sum() == read().flops.sum()


def test_a_layer_of_an_extension_counts_its_traffic_and_is_named() -> None:
    graph = read(edited('type="ReLU" version="opset1"', 'type="MyRelu" version="my_extension"'))
    assert graph.capture.endswith("for unknown ops only memory traffic is counted: MyRelu")
    assert graph.bytes_moved[by_name(graph, "act/Relu")] == 2 * 1024


def test_repeated_names_are_made_unique() -> None:
    assert read(edited('name="act/Relu"', 'name="conv/Convolution"')).op_name.count("conv/Convolution.2") == 1


def test_a_source_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "net.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert read_source(path).graph.digest == read().digest
    assert read_source(path, format="openvino").graph.num_ops == read().num_ops
    assert read_source(FILE).graph.name == "tiny_openvino_ir"


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">'
    '<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]><net name="&c;" version="11"/>'
)
OUTSIDE = '<!DOCTYPE net [<!ENTITY x SYSTEM "file:///etc/hostname">]><net name="&x;" version="11"/>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "document type declaration"),
        (OUTSIDE, "document type declaration"),
        ('<!DOCTYPE net SYSTEM "http://example.org/net.dtd"><net version="11"/>', "document type"),
        ('<net version="11" name="&nowhere;"/>', "not an OpenVINO IR: undefined entity"),
        ('<net version="7"><layers/></net>', "version 7, 10 and 11 are read; convert"),
        ('<net version="12"><layers/></net>', "version 12, 10 and 11 are read; upgrade"),
        ("<net><layers/></net>", "version='.*needs a whole number"),
        ('<net version="11"><layers/></net>', "no op"),
        ("<other/>", "no <net>"),
        ("<net version='11'>", "not an OpenVINO IR: no element found"),
        ('<?xml version="1.0" encoding="no-such"?><net/>', "not an OpenVINO IR"),
        ("<a>" * 100, "nests deeper than 64"),
        (edited('type="ReLU"', 'type="TensorIterator"'), "'act/Relu' is a TensorIterator"),
        (edited('type="ReLU"', 'type=""'), "'act/Relu' has no type"),
        (edited("<dim>4</dim>", "<dim>-1</dim>", 99), r"-1 is no size.*model\.reshape"),
        (edited("<dim>4</dim>", "<dim>9999999999999</dim>", 99), "absurd shape"),
        (edited("<dim>4</dim>", "<dim>four</dim>"), "an axis of 'four'"),
        (edited('size="864"', 'size="865"'), "'conv.weight' has 865 bytes.*needs 864"),
        (edited('precision="FP32"', 'precision="STRING"'), "precision 'STRING'"),
        (edited('from-layer="3"', 'from-layer="77"'), "layer 77, which does not exist"),
        (edited('from-layer="3" from-port="1"', 'from-layer="3" from-port="5"'), "by port 5"),
        (edited('from-layer="0" from-port="0" to-layer="2"', 'from-layer="5" from-port="2" to-layer="2"'),
         "in a cycle: 'conv/Convolution', 'act/Relu'"),
        (edited('<edge from-layer="2" from-port="2" to-layer="3" to-port="0" />', ""), "nothing feeds port"),
        (edited('to-layer="2" to-port="1"', 'to-layer="2" to-port="0"'), "two edges end at port 0"),
        (edited('layer id="3"', 'layer id="2"'), "two layers have id 2"),
        (edited('from-layer="1" from-port="0" to-layer="2"', 'from-layer="4" from-port="0" to-layer="9"'),
         "two edges end|nothing feeds"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(text)


def test_a_newer_version_is_a_schema_error() -> None:
    with pytest.raises(SchemaError):
        read(edited('version="11"', 'version="99"'))


def test_batch_and_seq_are_refused() -> None:
    with pytest.raises(InputError, match="no batch"):
        read_source(FILE, asked=CaptureOptions(batch=3))


def test_elements_that_say_nothing_are_passed_over() -> None:
    text = edited("<edges>", "<edges>" + "<nothing><layer id='3'/></nothing>" * 1000)
    assert read(text).digest == read().digest


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(TEXT.encode(), numbers=True) | damaged(TEXT.encode()))
def test_damage_gives_a_graph_or_a_clear_error(data: bytes) -> None:
    with contextlib.suppress(FormatError, GraphError):
        openvino.read(data, "x")

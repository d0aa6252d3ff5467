"""`.pt2` files as torch.export.save writes them, against `capture` of the same model; and broken ones."""

import contextlib
import io
import json
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

torch = pytest.importorskip("torch", reason="torch.export writes the files")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import FormatError, GraphError, InputError, SchemaError  # noqa: E402
from loadmaster.core.graph import Graph, Phase  # noqa: E402
from loadmaster.graph.formats import pt2  # noqa: E402
from loadmaster.graph.models import CaptureOptions  # noqa: E402
from loadmaster.graph.source import read_source  # noqa: E402
from tests.torch_models import example  # noqa: E402
from tests.unit.damage import damaged  # noqa: E402
from tests.unit.formats.format_samples import by_name, tensors_of  # noqa: E402

MODEL_JSON = "models/model.json"
WEIGHTS_JSON = "data/weights/model_weights_config.json"


class Tiny(nn.Module):
    """Convolution, tied weights, a buffer, attention, views, several outputs, a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.fc = nn.Linear(128, 16)
        self.embed = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(4, 16))

    def forward(self, image: Any, tokens: Any) -> Any:
        x = self.fc(torch.relu(self.conv(image)).flatten(1))
        y = self.embed(tokens) + self.table
        q = y.view(2, 4, 2, 8).transpose(1, 2)
        a = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 4, 16)
        z = a + x.unsqueeze(1)
        z.add_(1.0)
        left, right = z.split(8, -1)
        return self.head(torch.cat([right, left], -1)), z


def saved(model: Any, args: Any, kwargs: Any = None, **more: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model.eval(), args, kwargs, strict=False, **more)
        torch.export.save(program, buffer)
    return buffer.getvalue()


def inputs() -> tuple[Any, Any]:
    return torch.zeros(2, 3, 8, 8), torch.zeros(2, 4, dtype=torch.int64)


@cache
def tiny_file() -> bytes:
    return saved(Tiny(), inputs())


@cache
def members() -> dict[str, bytes]:
    """The file's members by name, without the folder that is the archive's own name."""
    with zipfile.ZipFile(io.BytesIO(tiny_file())) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def zipped(changed: dict[str, bytes | None], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The tiny file with members replaced, or left out where None."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in {**members(), **changed}.items():
            if data is not None:
                archive.writestr(f"tiny/{name}", data)
    return buffer.getvalue()


def program(change: Callable[[Any], Any]) -> bytes:
    """The tiny file with its program changed."""
    document = json.loads(members()[MODEL_JSON])
    change(document)
    return zipped({MODEL_JSON: json.dumps(document).encode()})


def read(data: bytes) -> Graph:
    return pt2.read(data, "tiny").graph


def of_phase(graph: Graph, *, param: bool) -> list[str]:
    return [
        name
        for name, phase in zip(graph.op_name, graph.phase, strict=True)
        if (phase == Phase.PARAM) == param
    ]


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "lstm"])
def test_a_file_says_what_capture_says(name: str) -> None:
    built = example(name)
    model = built.model.eval()
    captured = lm.capture(model, built.args, built.kwargs, train=False)
    graph = read(saved(model, built.args, built.kwargs))
    assert of_phase(graph, param=False) == of_phase(captured, param=False)
    assert set(of_phase(graph, param=True)) == set(of_phase(captured, param=True))
    for field in ("flops", "resident_bytes", "dtype", "module", "op_kind"):
        ours = dict(zip(graph.op_name, getattr(graph, field), strict=True))
        theirs = dict(zip(captured.op_name, getattr(captured, field), strict=True))
        assert ours == theirs, field
    assert set(graph.signature_table) == set(captured.signature_table)
    assert graph.flops.sum() > 0


def test_the_tiny_model_has_the_flops_and_weights_worked_out_by_hand() -> None:
    graph = read(tiny_file())
    products = {"conv2d": 2 * (2 * 4 * 4) * (8 * 27), "linear": 2 * 2 * 128 * 16, "linear_1": 2 * 8 * 16 * 11}
    attention = 2 * 2 * (2 * 2) * 4 * 4 * 8
    assert {graph.op_name[op]: graph.flops[op] for op in np.flatnonzero(graph.flops)} == {
        **products,
        "scaled_dot_product_attention": attention,
    }
    held = 4 * (8 * 27 + 8 + 128 * 16 + 16 + 11 * 16 + 4 * 16)
    assert graph.resident_bytes.sum() == held
    assert graph.capture == "pt2 file, inference"


def test_tied_weights_are_one_op_that_both_readers_read() -> None:
    graph = read(tiny_file())
    assert "head.weight" not in graph.op_name
    assert tensors_of(graph, "embed.weight") == [(704, {"embedding", "linear_1"})]


def test_views_hold_no_memory_and_a_write_in_place_comes_before_who_reads_it() -> None:
    graph = read(tiny_file())
    own = {
        graph.op_name[graph.tensor_op[t]]
        for t in np.flatnonzero(graph.tensor_storage == np.arange(graph.num_tensors))
    }
    assert not own & {"flatten", "view", "transpose", "unsqueeze", "split", "getitem", "getitem_1", "add_"}
    assert own >= {"conv2d", "relu", "scaled_dot_product_attention", "cat"}
    written = [op for op, name in enumerate(graph.op_name) if name == "add_"]
    assert len(written) == 1
    split = by_name(graph, "split")
    used = graph.use_tensor[graph.use_op == split]
    assert graph.tensor_op[used].tolist() == written
    assert graph.group[written[0]] == graph.group[by_name(graph, "add_1")] != -1


def test_outputs_and_inputs_are_kept() -> None:
    graph = read(tiny_file())
    kept = {graph.op_name[graph.tensor_op[tensor]] for tensor in np.flatnonzero(graph.keep)}
    assert kept >= {"image", "tokens", "linear_1"}


def test_a_size_that_may_vary_has_the_value_of_the_example() -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    data = saved(nn.Linear(4, 5), (torch.zeros(7, 4),), dynamic_shapes=({0: batch},))
    assert read(data).flops.sum() == 2 * 7 * 4 * 5


def test_regions_without_gradients_are_read_as_ops_of_their_own() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
            return y + 1

    args = (torch.zeros(2, 4),)
    graph = read(saved(Region(), args))
    captured = lm.capture(Region().eval(), args, train=False)
    assert graph.flops.sum() == captured.flops.sum() == 2 * 2 * 4 * 4
    inner = [name for name in graph.op_name if "." in name and name.endswith("linear")]
    assert inner
    assert set(inner) <= set(captured.op_name)


def test_a_custom_op_counts_its_traffic_and_is_named() -> None:
    graph = read(
        program(lambda d: d["graph_module"]["graph"]["nodes"][1].update(target="torch.ops.mine.op.default"))
    )
    assert graph.capture.endswith("for unknown ops only memory traffic is counted: mine.op.default")


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "tiny.pt2"
    path.write_bytes(tiny_file())
    code = (
        "import sys; from loadmaster.graph.source import read_source;"
        f"g = read_source({str(path)!r}).graph; print(g.name, g.num_ops, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tiny", str(read(tiny_file()).num_ops), "False"]


def test_a_source_is_recognised_and_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(tiny_file())
    assert read_source(path).graph.digest == read(tiny_file()).digest
    with pytest.raises(InputError, match="no batch"):
        read_source(path, asked=CaptureOptions(batch=4))


def test_the_older_layout_is_read_too() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("serialized_exported_program.json", members()[MODEL_JSON])
        archive.writestr("version", "8.2")
    assert read(buffer.getvalue()).flops.sum() == read(tiny_file()).flops.sum()


def test_no_pickle_is_ever_loaded() -> None:
    evil = b"\x80\x04c__builtin__\neval\n(S'1/0'\ntR."  # loaded, it would raise
    data = zipped({"data/sample_inputs/model.pt": evil})
    assert read(data).num_ops == read(tiny_file()).num_ops


def set_schema(document: Any, major: int) -> None:
    document["schema_version"]["major"] = major


def set_size(document: Any, size: int) -> None:
    document["graph_module"]["graph"]["tensor_values"]["relu"]["sizes"][0] = {"as_int": size}


def drop_tensor(document: Any) -> None:
    del document["graph_module"]["graph"]["tensor_values"]["relu"]


def unknown_size(document: Any) -> None:
    document["graph_module"]["graph"]["tensor_values"]["relu"]["sizes"][0] = {"as_expr": {"expr_str": "s0"}}


def read_later(document: Any) -> None:
    nodes = document["graph_module"]["graph"]["nodes"]
    nodes[0], nodes[1] = nodes[1], nodes[0]


def same_name(document: Any) -> None:
    document["graph_module"]["graph"]["nodes"][1]["outputs"] = [{"as_tensor": {"name": "conv2d"}}]


def control_flow(document: Any) -> None:
    document["graph_module"]["graph"]["nodes"][1]["target"] = "torch.ops.higher_order.cond"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: set_schema(d, 9), "schema 9 .*8 is read; upgrade loadmaster"),
        (lambda d: set_schema(d, 5), "schema 5 .*export again with torch 2.6"),
        (lambda d: set_size(d, 2**61), "'relu' has the absurd shape"),
        (lambda d: set_size(d, -3), "'relu' has the absurd shape"),
        (unknown_size, "'relu' has a size that is not known"),
        (drop_tensor, "'relu' has no entry in tensor_values"),
        (read_later, "reads 'conv2d', which nothing makes"),
        (same_name, "two ops make 'conv2d'"),
        (control_flow, "cond, whose work depends on values"),
        (lambda d: d["graph_module"]["graph"].pop("nodes"), r"missing required field `nodes`"),
        (lambda d: d["graph_module"]["graph"]["tensor_values"]["relu"].update(dtype=99), "element type 99"),
        (lambda d: d["graph_module"]["graph"]["tensor_values"]["relu"].update(layout=1), "layout 1"),
        (lambda d: d["graph_module"]["graph"]["tensor_values"]["relu"].update(strides=[]), "0 strides"),
    ],
)
def test_a_wrong_program_is_refused_with_the_reason(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(program(change))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: b"PK\x03\x04nothing", "not a whole .pt2 file"),
        (lambda: tiny_file()[: len(tiny_file()) // 2], "not a whole .pt2 file"),
        (lambda: zipped({MODEL_JSON: None}), r"no member models/\*.json"),
        (lambda: zipped({MODEL_JSON: None, "data.pkl": b""}), "pickle of torch.save"),
        (lambda: zipped({"models/other.json": b"{}"}), "holds 2 programs"),
        (lambda: zipped({"data/weights/weight_0": None}), "member .*weight_0', which is missing"),
        (lambda: zipped({"archive_version": b"7"}), "archive_version is '7'"),
        (lambda: zipped({"archive_format": b"zip"}), "archive_format is 'zip'"),
        (lambda: zipped({WEIGHTS_JSON: b"[1]"}), "not the list of weights"),
        (lambda: zipped({MODEL_JSON: b"[" * 100_000}), "nested too deep|not the program"),
    ],
)
def test_a_wrong_archive_is_refused_with_the_reason(data: Callable[[], bytes], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(data())


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadmaster.graph.formats._pt2.MAX_JSON_BYTES", 2**20)
    bomb = zipped({MODEL_JSON: b" " * 2**24}, compression=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 2**20
    with pytest.raises(FormatError, match=r"unpacks to more than 1\.0 MiB"):
        read(bomb)


def test_a_newer_schema_is_a_schema_error() -> None:
    with pytest.raises(SchemaError):
        read(program(lambda d: set_schema(d, 9)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(tiny_file()))
def test_a_damaged_archive_gives_a_graph_or_a_clear_error(data: bytes) -> None:
    with contextlib.suppress(FormatError, GraphError):
        read(data)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(members()[MODEL_JSON], numbers=True))
def test_a_damaged_program_gives_a_graph_or_a_clear_error(data: bytes) -> None:
    with contextlib.suppress(FormatError, GraphError):
        read(zipped({MODEL_JSON: data}))

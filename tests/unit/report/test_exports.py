"""Exports: each is read by the program it is for, or its own library, and says the same there."""

import copy
import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import networkx as nx
import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import UnknownNameError
from loadmaster.core.placement import Placement
from loadmaster.report.exports.registry import FORMATS
from tests.browser.pages import HOSTILE, hostile, two_devices
from tests.builders import graph_of, plan_on, problem_of, star_cluster
from tests.pipeline_steps import Layer, layers_problem

try:
    import torch
except ImportError:  # an extra
    torch = None  # type: ignore[assignment]

AFFINITIES = Path(__file__).with_name("affinities.py")
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "exports"


@pytest.fixture(scope="module")
def transformer() -> Placement:
    return api.plan(
        "gen:transformer:300", "RTX4090, RTX3090, cpu-64GB", algorithm="chain_balance", budget="20x"
    )


@pytest.mark.parametrize("to", [each for each in FORMATS if each != "device_map"])
def test_the_file_is_the_golden_one(to: str) -> None:
    content, lost = api.export(two_devices(), to)
    path = GOLDEN / f"two_devices.{to}"
    assert content == path.read_bytes(), "if this is meant: python -m tests.unit.report.test_exports"
    assert lost
    assert all(not line.endswith(".") for line in lost)


def test_accelerate_places_a_model_by_the_device_map() -> None:
    torch, accelerate = pytest.importorskip("torch"), pytest.importorskip("accelerate")
    from accelerate.utils import check_device_map

    from loadmaster.graph.capture import capture

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    graph = capture(model, torch.zeros(2, 8), optimizer="sgd")
    answer = api.plan(graph, "cpu#0-64MB, cpu#1-64MB", algorithm="round_robin")
    content, lost = api.export(answer, "device_map")
    found = json.loads(content)
    check_device_map(model, found)
    assert accelerate.dispatch_model(model, found, main_device="cpu") is not None
    assert any("without limits" in line for line in lost)


def test_torchtitan_gets_every_module_once_in_order(transformer: Placement) -> None:
    content, lost = api.export(transformer, "torchtitan")
    document = json.loads(content)
    modules = [name for part in document["module_fqns_per_model_part"] for name in part]
    assert len(set(modules)) == len(modules)
    layers = [int(name.split(".")[1]) for name in modules if name.startswith("h.")]
    assert layers == sorted(layers)
    assert len(document["devices"]) == len(document["module_fqns_per_model_part"])
    known = {
        ".".join(path.split(".")[:depth]) for path in transformer.problem.graph.module for depth in (1, 2)
    }
    assert set(modules) <= known
    assert any("rank" in line for line in lost)


class Layered(torch.nn.Module if torch else object):  # type: ignore[misc]
    """A model as torchtitan wants one: its layers are children of its own; what is gone is passed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        nn = torch.nn
        self.tok_embeddings = nn.Embedding(50, 16)
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)]
        named = {str(at): block for at, block in enumerate(blocks)}
        self.layers = nn.ModuleDict(named) if kind == "dict" else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, 50)

    def forward(self, x: Any) -> Any:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values() if hasattr(self.layers, "values") else self.layers:
            x = x + layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def keep_only(whole: Any, names: list[str]) -> Any:
    """A stage as torchtitan cuts it: children of the model that are not named go; lists are thinned out."""
    nn, part = torch.nn, copy.deepcopy(whole)
    for name, child in part.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            wanted = {each.split(".", 1)[1] for each in names if each.startswith(f"{name}.")}
            if isinstance(child, nn.ModuleDict):
                setattr(part, name, nn.ModuleDict({k: v for k, v in child.items() if k in wanted}))
            else:
                kept = [v for at, v in enumerate(child) if str(at) in wanted]
                setattr(part, name, nn.ModuleList(kept))
        elif name not in names:
            setattr(part, name, None)
    return part


@pytest.mark.skipif(torch is None, reason="torch is not installed")
@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("pipeline", ["", "1f1b:4", "interleaved:4"])
def test_stages_cut_as_torchtitan_cuts_them_are_the_whole_model_when_joined(kind: str, pipeline: str) -> None:
    from loadmaster.graph.capture import capture

    torch.manual_seed(0)
    model, batch = Layered(kind), torch.arange(8).reshape(2, 4)
    graph = capture(model, batch, optimizer="sgd")
    words: dict[str, Any] = {"pipeline": pipeline} if pipeline else {"algorithm": "chain_balance"}
    answer = api.plan(graph, "RTX4090, RTX3090", budget="20x", **words)
    content, _ = api.export(answer, "torchtitan")
    document = json.loads(content)
    lists = document["module_fqns_per_model_part"]
    if pipeline and answer.plan is not None and answer.plan.pipeline is not None:
        assert len(lists) == answer.plan.pipeline.num_stages
    stages = [keep_only(model, names) for names in lists]
    owned = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    assert sum(owned) == sum(p.numel() for p in model.parameters())
    value = batch
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(batch))


def test_modules_that_torchtitan_cannot_cut_are_said() -> None:
    deep = graph_of(*({"module": f"model.layers.{at}.linear"} for at in range(4)), {"module": "head.proj"})
    answer = api.plan(problem_of(deep, star_cluster(2), 1.0), algorithm=plan_on([0, 0, 1, 1, 1]))
    content, lost = api.export(answer, "torchtitan")
    lists = json.loads(content)["module_fqns_per_model_part"]
    assert lists == [["model.layers.0", "model.layers.1"], ["model.layers.2", "model.layers.3", "head"]]
    assert any("children of the model itself" in line for line in lost)


def test_openvino_affinities_name_every_forward_op(transformer: Placement) -> None:
    document = json.loads(api.export(transformer, "openvino")[0])
    graph, plan = transformer.problem.graph, transformer.plan
    assert plan is not None
    assert document["device"].startswith("HETERO:")
    used = set(document["device"].removeprefix("HETERO:").split(","))
    assert set(document["affinities"].values()) <= used
    for op, name in enumerate(graph.op_name):
        if graph.phase[op] == 0:
            device = transformer.problem.cluster.device_name[plan.device[op]]
            assert document["affinities"][name] == device.upper().replace("GPU", "GPU.").replace(
                "CPU0", "CPU"
            )


def openvino_says(*words: str | Path) -> Any:
    """What a process with OpenVINO says; it brings threads and a telemetry that no other test should meet."""
    done = subprocess.run(
        [sys.executable, AFFINITIES, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENVINO_TELEMETRY": "0"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_openvino_compiles_and_runs_its_own_model_by_the_affinities(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    model, path = tmp_path / "model.xml", tmp_path / "affinities.json"
    openvino_says("write", model)
    answer = api.plan(str(model), "cpu#0-64MB, cpu#1-64MB", algorithm="round_robin")
    api.export(answer, "openvino", path)
    document = json.loads(path.read_text())
    assert {"layers.0/matmul", "layers.2/relu", "sum"} <= set(document["affinities"])
    found = openvino_says("compile", model, path)
    assert found["off"] == [0.0, 0.0]
    assert found["devices"] == ["CPU"]
    document["affinities"]["layers.1/relu"] = "ELSEWHERE"  # that it reads them at all
    path.write_text(json.dumps(document))
    assert "ELSEWHERE" in openvino_says("compile", model, path)["refused"]


TRACE_SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "tid"],
                "properties": {"ph": {"enum": ["X", "M"]}, "ts": {"type": "number"}, "dur": {"minimum": 0}},
                "if": {"properties": {"ph": {"const": "X"}}},
                "then": {"required": ["ts", "dur", "cat"]},
            },
        }
    },
}


def test_the_trace_follows_the_schema_of_chrome_and_is_read_back(
    transformer: Placement, tmp_path: Path
) -> None:
    content, _ = api.export(transformer, "chrome", tmp_path / "trace.json")
    jsonschema.validate(json.loads(content), TRACE_SCHEMA)
    assert transformer.plan is not None
    timeline = api.simulate(transformer.problem, transformer.plan)
    read = api.load_measured(tmp_path / "trace.json", transformer)
    order = [np.lexsort((t.start_s, t.item, t.kind)) for t in (timeline, read)]
    assert len(read.kind) == len(timeline.kind)
    for name in ("kind", "item", "resource"):
        assert (getattr(read, name)[order[1]] == getattr(timeline, name)[order[0]]).all(), name
    assert read.step_s == pytest.approx(timeline.step_s, rel=1e-6)


@pytest.mark.parametrize("to", ["graphml", "nodelink"])
@pytest.mark.parametrize("make", [two_devices, hostile])
def test_networkx_reads_the_same_graph(to: str, make: Any) -> None:
    answer = make()
    content, _ = api.export(answer, to)
    if to == "graphml":
        graph = nx.read_graphml(io.BytesIO(content), node_type=int)
    else:
        graph = nx.node_link_graph(json.loads(content), edges="links")
    source = answer.problem.graph
    assert graph.number_of_nodes() == source.num_ops
    edges = {
        (int(source.tensor_op[t]), int(o)) for t, o in zip(source.use_tensor, source.use_op, strict=True)
    }
    assert set(graph.edges()) == edges
    names = answer.problem.cluster.device_name
    for op, facts in graph.nodes(data=True):
        if make is two_devices:
            assert facts["name"] == source.op_name[op]
            assert facts["device"] == names[answer.plan.device[op]]
        assert facts["end_s"] - facts["start_s"] == 1.0


def test_a_spreadsheet_sees_no_formula_and_no_line_break_in_a_name() -> None:
    from dataclasses import replace

    answer = hostile()
    named = replace(answer.problem.graph, op_name=("=cmd|'/C calc'!A1", *answer.problem.graph.op_name[1:]))
    answer = replace(answer, problem=replace(answer.problem, graph=named))
    rows = [*csv.DictReader(io.StringIO(api.export(answer, "csv")[0].decode()))]
    assert len(rows) == len(HOSTILE)
    assert rows[0]["name"].startswith("'=cmd")


def test_replicas_and_schedule_that_a_format_cannot_say_are_said() -> None:
    problem = layers_problem([Layer(8.0, 16.0, sent=1)] * 2, [1.0, 1.0], "")
    answer = api.plan(problem, pipeline="auto", budget="60x")
    for to in ("torchtitan", "openvino", "graphml", "csv"):
        _, lost = api.export(answer, to)
        assert any(line.endswith("others of the plan run on ref1") for line in lost), to
        assert any("micro-batches): torchtitan has options" in line for line in lost) == (to == "torchtitan")
    assert not any("replica" in line for line in api.export(answer, "chrome")[1])


def test_what_a_device_map_cannot_say_is_said(transformer: Placement) -> None:
    _, lost = api.export(transformer, "device_map")
    assert any("order" in line for line in lost)


def test_an_unknown_format_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="graphml"):
        api.export(two_devices(), "grapml")


def test_a_device_map_comes_back_as_a_scored_plan(transformer: Placement, tmp_path: Path) -> None:
    api.export(transformer, "device_map", tmp_path / "map.json")
    found, notes = api.import_file(tmp_path / "map.json", transformer)
    assert isinstance(found, Placement)
    assert found.problem.digest == transformer.problem.digest
    assert found.to_device_map() == transformer.to_device_map() if found.fits else found.least_overflow_plan
    assert notes


def test_a_trace_of_the_profiler_is_matched_to_the_plan(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from loadmaster.graph.capture import capture

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 4),
    )
    batch = torch.randn(16, 64)
    answer = api.plan(capture(model, batch, optimizer="sgd"), "cpu", algorithm="single_device")
    for _ in range(2):
        model(batch).sum().backward()
    with torch.profiler.profile(record_shapes=True) as profile:
        model(batch).sum().backward()
    path = tmp_path / "profile.json"
    profile.export_chrome_trace(str(path))
    timeline, notes = api.import_file(path, answer)
    assert not isinstance(timeline, Placement)
    graph = answer.problem.graph
    seen = {
        graph.op_name[op]: float(e - s)
        for op, s, e in zip(timeline.item, timeline.start_s, timeline.end_s, strict=True)
    }
    linear = [op for op in range(graph.num_ops) if graph.op_kind[op] == "linear"]
    assert len(linear) == 3
    assert all(seen[graph.op_name[op]] > 0 for op in linear)
    products = [op for op in range(graph.num_ops) if graph.op_kind[op] == "mm" and graph.phase[op] == 1]
    assert len(products) == 5  # the first layer's input wants no gradient
    assert all(seen[graph.op_name[op]] > 0 for op in products)
    start = {int(op): float(s) for op, s in zip(timeline.item, timeline.start_s, strict=True)}
    for ours in (linear, products):  # they ran in the order of the graph
        assert [start[op] for op in ours] == sorted(start[op] for op in ours)
    assert max(start[op] for op in linear) < min(start[op] for op in products)
    assert any("ops were found" in note for note in notes)
    api.write_report(answer, tmp_path / "page.html", measured=timeline)


def test_ops_inside_of_a_loss_are_found_and_updates_are_not_counted_as_lost(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from loadmaster.graph.capture import capture

    model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Flatten(), torch.nn.Linear(64, 5))
    batch, wanted = torch.randint(0, 20, (8, 4)), torch.zeros(8, dtype=torch.long)

    def loss(out: object) -> object:
        return torch.nn.functional.cross_entropy(out, wanted.to(out.device))  # type: ignore[attr-defined]

    answer = api.plan(capture(model, batch, loss=loss, optimizer="adamw"), "cpu", algorithm="single_device")
    updates = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile() as profile:
        loss(model(batch)).backward()  # type: ignore[attr-defined]
        updates.step()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    timeline, (note,) = api.import_file(tmp_path / "profile.json", answer)
    assert not isinstance(timeline, Placement)
    kinds = {answer.problem.graph.op_kind[op] for op in timeline.item.tolist()}
    assert kinds >= {"_log_softmax", "nll_loss_forward", "nll_loss_backward", "embedding_dense_backward"}
    lost = re.search(r"([0-9]+) events of the forward pass and ([0-9]+) of the backward", note)
    assert lost is not None
    assert int(lost[1]) + int(lost[2]) <= 3, note  # those of the optimizer alone are many more


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for to in FORMATS:
        if to != "device_map":
            (GOLDEN / f"two_devices.{to}").write_bytes(api.export(two_devices(), to)[0])

"""Exports: each is read by the program it is for, or its own library, and says the same there."""

import csv
import io
import json
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

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "exports"


@pytest.fixture(scope="module")
def transformer() -> Placement:
    return api.plan(
        "gen:transformer:300", "RTX4090, RTX3090, cpu-64GB", algorithm="chain_balance", budget="20x"
    )


@pytest.mark.parametrize("to", [each for each in FORMATS if each != "device_map"])
def test_the_file_is_the_golden_one(to: str) -> None:
    content, lost = api.export(two_devices(), to)
    path = GOLDEN / f"two_devices.{to}"
    assert content == path.read_bytes(), "if this is meant: python -m tests.unit.test_exports"
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


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for to in FORMATS:
        if to != "device_map":
            (GOLDEN / f"two_devices.{to}").write_bytes(api.export(two_devices(), to)[0])

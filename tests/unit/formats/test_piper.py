"""The piper reader: a tiny file by hand, bad files, and the public ones against the published cost model."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import ClusterError, CostError, FormatError, GraphError, InputError
from loadmaster.core.graph import NO_MIRROR, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Links, Objective
from loadmaster.graph.formats import piper
from loadmaster.graph.source import read_source
from tests.unit.formats.format_samples import PIPER, by_name, changed

FILES = Path(__file__).resolve().parents[3].parent / "shared" / "graphs" / "msr" / "piper-inputs"
PUBLIC = ("bert32a100", "gnmt", "resnet")


def test_a_node_is_its_kept_input_its_forward_and_its_backward() -> None:
    work = piper.read(json.dumps(PIPER).encode(), "tiny")
    graph = work.graph
    assert set(graph.op_name) == {"embed", "embed.grad", "embed.input", "3", "3.grad", "3.input"}
    assert work.costs is not None
    seconds = dict(zip(graph.op_name, work.costs.compute_s[:, 0].tolist(), strict=True))
    assert seconds == {"embed": 1, "embed.grad": 2, "embed.input": 0, "3": 2, "3.grad": 4, "3.input": 0}
    saved = {
        graph.op_name[op]: size
        for op, size, root in zip(graph.tensor_op, graph.tensor_bytes, graph.tensor_storage, strict=True)
        if root >= 0 and size
    }
    assert saved == {"embed": 81, "embed.input": 20, "3.input": 30}  # 100.5 bytes are rounded up
    assert graph.resident_bytes[by_name(graph, "embed.grad")] == 10
    assert graph.mirror[by_name(graph, "embed.grad")] == by_name(graph, "embed")
    assert graph.mirror[by_name(graph, "3.grad")] == NO_MIRROR
    assert graph.phase[by_name(graph, "3.grad")] == Phase.BACKWARD
    assert len(set(graph.group.tolist())) == 2


def test_an_edge_is_paid_forward_and_backward_at_both_ends() -> None:
    problem = api.problem(
        piper.read(json.dumps(PIPER).encode(), "tiny"),
        objective=None,
        pin={"3": "device1", "embed": "device0"},
    )
    assert (problem.objective, problem.links) == (Objective.THROUGHPUT, Links.HOST)
    placement = api.plan(problem, algorithm="ideal_dp", pipeline="1f1b:8", budget="20x")
    assert placement.plan is not None
    assert placement.plan.pipeline is not None
    assert placement.plan.pipeline.stage_s.tolist() == [3 + 2 * 2, 6 + 2 * 2]
    assert placement.peak_bytes.tolist() == [2 * 101 + 10, 30 + 5]


def test_the_file_brings_its_devices() -> None:
    cluster = piper.read(json.dumps(PIPER).encode(), "tiny").cluster
    assert cluster is not None
    assert cluster.device_name == ("device0", "device1")
    assert cluster.memory_bytes.tolist() == [1000, 1000]


def test_names_that_collide_are_told_apart() -> None:
    odd = json.loads(changed(PIPER, "nodes", 0, "name", to="embed.grad"))
    graph = piper.read(json.dumps(odd).encode(), "odd").graph
    assert len(set(graph.op_name)) == 6


def test_it_is_recognised_whole_and_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(PIPER))
    assert read_source(path).graph.name == "tiny"
    assert "8 micro-batches" in read_source(path, format="piper").graph.capture
    assert piper.recognises(json.dumps(PIPER).encode()[:60])
    assert not piper.recognises(b'{"maxFPGAs": 3}')
    with pytest.raises(InputError, match="limit"):
        read_source(path, max_bytes=10)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (changed(PIPER, "nodes", to=[]), GraphError, "0 nodes"),
        (changed(PIPER, "nodes", 0, "id", to=7), GraphError, r"duplicate id 7: nodes\[0\] and nodes\[1\]"),
        (changed(PIPER, "edges", 0, "destId", to=9), GraphError, "edge 7 -> 9 names node 9"),
        (changed(PIPER, "edges", 0, "destId", to=7), GraphError, "cycle"),
        (changed(PIPER, "edges", 0, "communicationCost", to=-1), GraphError, "communicationCost of edge 7"),
        (changed(PIPER, "nodes", 0, "TMPCs", to={}), FormatError, r"node 3 has no variant.*degrees: none"),
        (changed(PIPER, "nodes", 0, "TMPCs", to={"2": []}), FormatError, "degrees: '2'"),
        (
            changed(PIPER, "nodes", 0, "TMPCs", "1", 0, "id", to="activation recomp"),
            FormatError,
            "add the plain one",
        ),
        (changed(PIPER, "nodes", 0, "TMPCs", "1", 0, "timePerSample", to=-1), CostError, "node 3 is -1"),
        (changed(PIPER, "nodes", 0, "TMPCs", "1", 0, "memoryUsageA", to=-1), GraphError, "memoryUsageA"),
        (changed(PIPER, "nodes", 0, "TMPCs", "1", 0, "memoryUsageB", to=1e30), GraphError, "memoryUsageB"),
        (changed(PIPER, "nodes", 0, "TMPCs", "1", to=3), FormatError, r"TMPCs"),
        (changed(PIPER, "maxDevices", to=0), ClusterError, "maxDevices is 0"),
        (changed(PIPER, "maxDevices", to=10**6), ClusterError, "maxDevices is 1000000"),
        (changed(PIPER, "bandwidth", to=0), ClusterError, "bandwidth is 0"),
        (changed(PIPER, "maxMemoryPerDevice", to=0.5), ClusterError, "maxMemoryPerDevice is 0.5"),
        (b"[]", FormatError, "not a piper graph"),
        (b'{"maxDevices": ' + b"[" * 100_000, FormatError, "nested too deep|not a piper graph"),
    ],
)
def test_a_bad_file_is_refused(data: bytes, error: type[InputError], message: str) -> None:
    with pytest.raises(error, match=message):
        piper.read(data, "bad")


def public(name: str) -> Path:
    path = FILES / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is not there; the public graphs lie beside the repository")
    return path


def published(path: Path, placement: Placement) -> tuple[list[float], list[float]]:
    """Time and memory of every stage by Piper's own formulas, from the file alone."""
    document, plan, graph = json.loads(path.read_bytes()), placement.plan, placement.problem.graph
    assert plan is not None
    assert plan.pipeline is not None
    ids = [node["id"] for node in document["nodes"]]
    of_group = {int(g): int(s) for g, s in zip(graph.group, plan.pipeline.stage, strict=True)}
    stage = {own: of_group[at] for at, own in enumerate(ids)}
    again = {int(s) for s in plan.pipeline.stage[plan.recompute]}
    num = len(plan.pipeline.replicas)
    seconds, memory = [0.0] * num, [0.0] * num
    for node in document["nodes"]:
        s = stage[node["id"]]
        plain, rerun = node["TMPCs"]["1"]
        chosen, y = (rerun if s in again else plain), num - s
        seconds[s] += chosen["timePerSample"]
        memory[s] += chosen["memoryUsageA"] * y + chosen["memoryUsageB"]
    for edge in document["edges"]:
        ends = stage[edge["sourceId"]], stage[edge["destId"]]
        for s in ends if ends[0] != ends[1] else ():
            seconds[s] += 2 * edge["communicationCost"] / document["bandwidth"]
    return seconds, memory


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("reserve", ["0", "tight"])
def test_the_public_files_are_planned_as_published(name: str, reserve: str) -> None:
    """`tight`: so little memory that stages have to be recomputed."""
    path = public(name)
    tight = {"bert32a100": 65e9, "gnmt": 79.2e9, "resnet": 62e9}[name]
    problem = api.problem(path, objective=None, reserve_bytes=0 if reserve == "0" else int(tight))
    placement = api.plan(problem, algorithm="ideal_dp", pipeline="1f1b:1000", budget="4000x")
    assert placement.plan is not None
    assert placement.plan.pipeline is not None
    assert bool(placement.plan.recompute.any()) == (reserve == "tight")
    seconds, memory = published(path, placement)
    assert placement.score_s == pytest.approx(max(seconds), rel=1e-9)
    assert placement.plan.pipeline.stage_s == pytest.approx(seconds, rel=1e-9)
    device = [
        int(placement.plan.device[np.flatnonzero(placement.plan.pipeline.stage == s)[0]])
        for s in range(len(seconds))
    ]
    assert placement.peak_bytes[device] == pytest.approx(memory, rel=1e-3)
    assert max(memory) <= problem.cluster.usable_bytes[0] * (1 + 1e-3)

"""The msr reader: every field of a tiny file by hand, and every bad file has a clear error."""

import json
from typing import Any

import numpy as np
import pytest

from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.errors import ClusterError, CostError, FormatError, GraphError, InputError, PlanError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_STORAGE, Phase
from loadmaster.core.problem import Links, Objective, Origin
from loadmaster.graph.formats import msr
from tests import msr_splits
from tests.unit.formats.format_samples import MSR, by_name, changed, msr_tiny, tensors_of, tiny_problem


def test_msr_ops_stand_in_topological_order_with_unique_names() -> None:
    graph = msr_tiny().graph
    assert graph.name == "tiny"
    assert graph.op_name == ("conv", "conv#5", "join", "grad", "joingrad")
    assert graph.resident_bytes.tolist() == [40, 0, 7, 0, 0]
    assert graph.phase.tolist() == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 2
    assert graph.flops.tolist() == [1e12, 0, 2.5e12, 1e12, 1e12]


def test_msr_backward_node_mirrors_its_colour_class_or_its_name() -> None:
    graph = msr_tiny().graph
    assert graph.mirror.tolist() == [NO_MIRROR] * 3 + [by_name(graph, "conv"), by_name(graph, "join")]
    assert graph.group.tolist() == [6, NO_GROUP, NO_GROUP, 6, 8]


def test_msr_output_is_one_tensor_whose_memory_is_in_the_op() -> None:
    graph = msr_tiny().graph
    assert tensors_of(graph, "conv") == [(16, {"conv#5", "join", "grad"})]  # 15.5 bytes rounded up
    assert tensors_of(graph, "conv#5") == [(12, {"join"})]
    assert tensors_of(graph, "join") == []
    assert set(graph.tensor_storage.tolist()) == {NO_STORAGE}


def test_msr_brings_times_devices_and_question() -> None:
    work = msr_tiny()
    assert (work.objective, work.links) == (Objective.THROUGHPUT, Links.HOST)
    assert work.costs is not None
    assert work.cluster is not None
    assert work.costs.compute_s.tolist() == [[1, 10], [0, 0], [np.inf, 4], [1, 1], [1, 1]]
    cost = dict(zip(work.graph.tensor_op.tolist(), work.costs.transfer_s.tolist(), strict=True))
    assert cost == {0: 0.5, 1: 0.25, 3: 0.125}
    assert set(work.costs.origin.tolist()) == {Origin.GIVEN}
    cluster = work.cluster
    assert cluster.device_name == ("acc0", "acc1", "cpu0")
    assert cluster.memory_bytes.tolist() == [100, 100, UNLIMITED_BYTES]
    assert cluster.on_host[cluster.kind].tolist() == [False, False, True]
    assert len(set(cluster.engine.tolist())) == 3
    assert cluster.route[0, 2].tolist() == [0, 5]  # up link of acc0, down link of cpu0
    assert cluster.link_name[5] == "cpu0 down"


def test_msr_workload_makes_a_problem() -> None:
    problem = tiny_problem()  # raises where the parts do not fit
    assert problem.device_compute_s[2].tolist() == [np.inf, np.inf, 4]


def test_msr_colour_classes_outside_int32_are_renumbered_and_stay_classes() -> None:
    document = json.loads(json.dumps(MSR))
    for node, colour in zip(document["nodes"], (-4, 2**40, 2**40, 5, None), strict=True):
        node["colorClass"] = colour
    graph = msr.read(json.dumps(document).encode(), "").graph
    group = dict(zip(graph.op_name, graph.group.tolist(), strict=True))
    assert group["conv"] == group["conv#5"] >= 0
    assert group["grad"] == NO_GROUP
    assert len({group["join"], group["conv"], group["joingrad"]}) == 3


def test_msr_suffix_never_collides_with_a_name() -> None:
    nodes = [
        {"id": at, "name": name, "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1}
        for at, name in enumerate(["a", "a#2", "a", "a#2"])
    ]
    graph = msr.read(json.dumps({**MSR, "nodes": nodes, "edges": []}).encode(), "").graph
    assert graph.op_name == ("a", "a#2", "a#2#2", "a#2#3")


def test_msr_split_is_extended_by_colour_class() -> None:
    data = json.dumps(MSR).encode()
    ids = msr_splits.ids_in_op_order(data)
    assert ids == [9, 5, 3, 40, 41]
    split = {
        "maxLoad": -1,
        "fpgas": [{"load": -1, "nodes": [5]}, {"nodes": [9]}],
        "cpus": [{"nodes": [3, 41]}],
    }
    device = msr_splits.read_split(json.dumps(split).encode(), msr_tiny(), ids=ids)
    assert device.tolist() == [1, 0, 2, 1, 2]  # 40 follows 9


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"fpgas": [{"nodes": [5, 9]}], "cpus": [{"nodes": [3]}]}, "node 41 has no device"),
        ({"fpgas": [{"nodes": [5, 77]}]}, "node 77"),
        ({"fpgas": [{"nodes": [5, 9]}, {"nodes": [5]}]}, "node 5 is on two devices, 0 and 1"),
        ({"fpgas": [{"nodes": [9]}, {"nodes": [40]}]}, "colour class 6 is on devices 0 and 1"),
        ({"fpgas": [{"nodes": []}, {"nodes": []}, {"nodes": [9]}]}, "the cluster has 2 fpgas"),
    ],
)  # fmt: skip
def test_msr_bad_split_is_refused(split: dict[str, Any], message: str) -> None:
    ids = msr_splits.ids_in_op_order(json.dumps(MSR).encode())
    with pytest.raises(PlanError, match=message):
        msr_splits.read_split(json.dumps(split).encode(), msr_tiny(), ids=ids)
    with pytest.raises(FormatError):
        msr_splits.read_split(b'{"fpgas": 3}', msr_tiny(), ids=ids)
    with pytest.raises(PlanError, match="3 ids"):
        msr_splits.read_split(json.dumps(split).encode(), msr_tiny(), ids=ids[:3])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (changed(MSR, "nodes", 1, "id", to=3), GraphError, r"duplicate id 3: nodes\[0\] and nodes\[1\]"),
        (changed(MSR, "edges", 0, "destId", to=77), GraphError, "edge 5 -> 77 names node 77"),
        (changed(MSR, "edges", 0, "sourceId", to=78), GraphError, "names node 78"),
        (changed(MSR, "nodes", 1, "cpuLatency", to=-1.0), CostError, "cpuLatency of node 9 is -1.0"),
        (changed(MSR, "nodes", 1, "fpgaLatency", to=float("nan")), FormatError, "malformed.*NaN"),
        (changed(MSR, "nodes", 1, "fpgaLatency", to=float("inf")), FormatError, "malformed"),
        (json.dumps(MSR).replace("10.0", "1e999").encode(), FormatError, r"range - at `\$.nodes\[1\].cpuLat"),
        (changed(MSR, "edges", 2, "cost", to=0.6), CostError, "9 -> 5 costs 0.6, but edge 9 -> 3 costs 0.5"),
        (changed(MSR, "edges", 2, "cost", to=-0.5), CostError, "cost of edge 9 -> 5 is -0.5"),
        (changed(MSR, "edges", 3, to={"sourceId": 40, "destId": 3, "cost": 0.125}), GraphError, "backward"),
        (changed(MSR, "edges", 1, to={"sourceId": 3, "destId": 9, "cost": 1}), GraphError, "cycle.*'join'"),
        (changed(MSR, "edges", 1, to={"sourceId": 3, "destId": 3, "cost": 1}), GraphError, "cycle"),
        (changed(MSR, "nodes", to=[]), GraphError, "0 nodes"),
        (changed(MSR, "nodes", 0, "size", to=-1), GraphError, "size of node 3 is -1"),
        (changed(MSR, "nodes", 0, "size", to=1e300), GraphError, "size of node 3"),
        (changed(MSR, "edges", 0, "size", to=-1), GraphError, "size of edge 5 -> 3"),
        (changed(MSR, "maxFPGAs", to=-1), ClusterError, "maxFPGAs is -1"),
        (changed(MSR, "maxFPGAs", to=10**9), ClusterError, "limit is 1024"),
        (changed(MSR, "maxSizePerFPGA", to=0), ClusterError, "maxSizePerFPGA is 0"),
        (changed({**MSR, "maxCPUs": 0}, "maxFPGAs", to=0), ClusterError, "maxFPGAs is 0 and maxCPUs 0"),
        (changed(MSR, "nodes", 2, "supportedOnFpga", to=2), FormatError, r"\$.nodes\[2\].supportedOnFpga"),
        (changed(MSR, "nodes", 2, "id", to="5"), FormatError, r"\$.nodes\[2\].id"),
        (changed(MSR, "nodes", 2, to=None), FormatError, r"\$.nodes\[2\]"),
        (changed(MSR, "nodes", 2, to={"id": 5}), FormatError, "cpuLatency"),
    ],
)  # fmt: skip
def test_msr_bad_file_is_refused(data: bytes, error: type[InputError], message: str) -> None:
    with pytest.raises(error, match=message):
        msr.read(data, "bad")


def test_msr_costs_of_one_source_may_differ_by_a_millionth() -> None:
    msr.read(changed(MSR, "edges", 2, "cost", to=0.5000009), "")
    with pytest.raises(CostError):
        msr.read(changed(MSR, "edges", 2, "cost", to=0.5000011), "")

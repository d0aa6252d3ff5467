"""Tiny hand-made files in the formats that Loadmaster reads, and how to look at what they became."""

import json
from typing import Any

import numpy as np

from loadmaster.core.graph import Graph
from loadmaster.core.problem import Load, Problem, Split, Workload
from loadmaster.graph.formats import msr

# An msr file that needs every rule: ids are neither dense nor sorted, `join` comes before its input
# in the file, two nodes are called `conv`, 40 is the backward node of 9's colour class.
#
#     9 conv ──► 5 conv ──► 3 join        9 ──► 40 (backward) ──► 41 (backward)
#        └────────────────────^
MSR: dict[str, Any] = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {"id": 3, "name": "join", "supportedOnFpga": False, "cpuLatency": 4, "fpgaLatency": 2.5, "size": 7.0},
        {"id": 9, "name": "conv", "supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0,
         "isBackwardNode": 0, "colorClass": 6, "size": 40},
        {"id": 5, "name": "conv", "supportedOnFpga": True, "cpuLatency": 0, "fpgaLatency": 0},
        {"id": 41, "name": "joingrad", "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1,
         "isBackwardNode": 1, "colorClass": 8},
        {"id": 40, "name": "grad", "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1,
         "isBackwardNode": True, "colorClass": 6},
    ],
    "edges": [
        {"sourceId": 5, "destId": 3, "cost": 0.25, "size": 12.0},
        {"sourceId": 9, "destId": 3, "cost": 0.5, "size": 15.5},
        {"sourceId": 9, "destId": 5, "cost": 0.5},
        {"sourceId": 9, "destId": 40, "cost": 0.5, "size": 3},
        {"sourceId": 40, "destId": 41, "cost": 0.125},
    ],
}  # fmt: skip

# 1 ──► 2 ──► 4      layer 2 has a weight of 72 bytes, layer 3 a list of activations
#  └──► 3 ────^
PIPEDREAM = """\
node2 -- Linear(8, 2) -- forward_compute_time=2.0, backward_compute_time=3.5, activation_size=64.0, parameter_size=72.000
node1 -- Input0 -- forward_compute_time=1.0, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
\tnode1 -- node2
\tnode1 -- node3
node3 -- LSTM(4, 4) -- forward_compute_time=0.5, backward_compute_time=1, activation_size=[10.0; 4; 2.0], parameter_size=0.000
node4 -- Add -- forward_compute_time=0, backward_compute_time=0, activation_size=5, parameter_size=0
\tnode2 -- node4
\tnode3 -- node4"""  # noqa: E501


def _variant(name: str, seconds: float, each: float, once: float) -> dict[str, Any]:
    return {
        "id": name,
        "timePerSample": seconds,
        "parameterSize": 1.0,
        "memoryUsageA": each,
        "memoryUsageB": once,
        "syncTimeFw": {},
        "syncTimeBw": {},
    }


# A piper file: 7 ──► 3, which cannot be recomputed
PIPER: dict[str, Any] = {
    "maxDevices": 2,
    "maxMemoryPerDevice": 1000.5,
    "bandwidth": 4.0,
    "mbsInBatch": 8,
    "nodes": [
        {"id": 3, "TMPCs": {"1": [_variant("vanilla", 6.0, 30.0, 5)]}},
        {
            "id": 7,
            "name": "embed",
            "TMPCs": {
                "1": [_variant("vanilla", 3.0, 100.5, 10.0), _variant("activation recomp", 4.0, 20.0, 91.0)],
                "2": [],
            },
        },
    ],
    "edges": [{"sourceId": 7, "destId": 3, "communicationCost": 8}],
}


def changed(document: dict[str, Any], *path: str | int, to: object) -> bytes:
    """The JSON of a document with one value replaced."""
    copy = json.loads(json.dumps(document))
    place = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return json.dumps(copy).encode()


def by_name(graph: Graph, name: str) -> int:
    return graph.op_name.index(name)


def tensors_of(graph: Graph, name: str) -> list[tuple[int, set[str]]]:
    """(bytes, names of users) of each output of an op."""
    found = []
    for tensor in np.flatnonzero(graph.tensor_op == by_name(graph, name)):
        users = graph.use_op[graph.use_tensor == tensor]
        found.append((int(graph.tensor_bytes[tensor]), {graph.op_name[op] for op in users}))
    return found


def msr_tiny() -> Workload:
    return msr.read(json.dumps(MSR).encode(), "tiny")


def tiny_problem() -> Problem:
    work = msr_tiny()
    assert work.cluster is not None
    assert work.costs is not None
    free = np.full(work.graph.num_ops, -1)
    return Problem(
        work.graph, work.cluster, work.costs, work.objective, work.links, Split.CHAIN, Load.SUM, free
    )

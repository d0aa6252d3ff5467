"""The JSON of msr-fiddle/dnn-partitioning: a graph with its devices and times.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS
2020). Its "FPGA" is any accelerator. A transfer time belongs to the source op (one hop between
an accelerator and main memory), an op's size already counts its activations, ops of one colour
class share a device. Numbers are read as seconds, unchanged.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from loadmaster.core.cluster import NO_LINK, UNLIMITED_BYTES, Cluster
from loadmaster.core.errors import ClusterError, CostError, GraphError
from loadmaster.core.graph import NO_MIRROR, NO_STORAGE, Dtype, Graph, Phase
from loadmaster.core.problem import Costs, Links, Objective, Origin, Workload
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.formats._records import (
    REF_FLOPS_PER_S,
    decode,
    group_ids,
    top_keys,
    unique_names,
    whole_bytes,
)

COST_TOLERANCE = 1e-6  # the authors' own, for the costs of one op's out-edges
MAX_DEVICES = 1024  # routes are a D x D table
_ANY_BYTES_PER_S = 1e12  # times are given, so the rates of the cluster do not matter
_WHAT = "an msr graph"
_ACCELERATOR, _CPU = 0, 1  # device kinds, the columns of compute_s


class _Node(
    msgspec.Struct,
    rename={
        "cpu_s": "cpuLatency",
        "accelerator_s": "fpgaLatency",
        "supported": "supportedOnFpga",
        "backward": "isBackwardNode",
        "colour": "colorClass",
        "num_bytes": "size",
    },
):
    id: int
    cpu_s: float
    accelerator_s: float
    supported: bool | Literal[0, 1]
    backward: bool | Literal[0, 1] = False
    colour: int | None = None
    num_bytes: int | float = 0
    name: str | None = None


class _Edge(
    msgspec.Struct, rename={"source": "sourceId", "target": "destId", "cost_s": "cost", "num_bytes": "size"}
):
    source: int
    target: int
    cost_s: float
    num_bytes: int | float = 0


class _File(
    msgspec.Struct,
    rename={"memory_bytes": "maxSizePerFPGA", "num_accelerators": "maxFPGAs", "num_cpus": "maxCPUs"},
):
    memory_bytes: int | float
    num_accelerators: int
    num_cpus: int
    nodes: list[_Node]
    edges: list[_Edge]


def recognises(data: bytes) -> bool:
    """Whether this is a JSON object with the keys of an msr graph."""
    return bool(top_keys(data) & {"maxFPGAs", "maxSizePerFPGA"})


def read(data: bytes, name: str) -> Workload:
    """The graph with its k accelerators, l CPUs and given times."""
    file = _parse_file(data)
    graph, row = _build_graph(file, name)
    nodes = [file.nodes[at] for at in row]
    compute_s = [(node.accelerator_s if node.supported else math.inf, node.cpu_s) for node in nodes]
    cost_of = {edge.source: edge.cost_s for edge in reversed(file.edges)}  # the first edge of a source
    costs = Costs(
        compute_s=np.array(compute_s),
        issue_s=np.zeros(graph.num_ops),
        transfer_s=np.array([cost_of[nodes[op].id] for op in graph.tensor_op.tolist()], dtype=np.float64),
        origin=np.full(graph.num_ops, Origin.GIVEN, dtype=np.int8),
        rel_error=np.zeros(graph.num_ops),
    )
    return Workload(graph, _build_cluster(file, name), costs, Objective.THROUGHPUT, Links.HOST)


def _parse_file(data: bytes) -> _File:
    """The file, every rule of the format checked but acyclicity."""
    file = decode(data, _File, what=_WHAT)
    if not file.nodes:
        raise GraphError("the msr graph has 0 nodes; nothing can be placed")
    at: dict[int, int] = {}
    for row, node in enumerate(file.nodes):
        if node.id in at:
            raise GraphError(f"duplicate id {node.id}: nodes[{at[node.id]}] and nodes[{row}]; ids are unique")
        at[node.id] = row
        _require_time(node.cpu_s, f"cpuLatency of node {node.id}")
        _require_time(node.accelerator_s, f"fpgaLatency of node {node.id}")
    _check_edges(file, at)
    _check_devices(file)
    return file


def _check_edges(file: _File, at: dict[int, int]) -> None:
    first: dict[int, _Edge] = {}
    for edge in file.edges:
        arrow = f"edge {edge.source} -> {edge.target}"
        for end in (edge.source, edge.target):
            if end not in at:
                raise GraphError(f"{arrow} names node {end}, which does not exist; add it or drop the edge")
        _require_time(edge.cost_s, f"cost of {arrow}")
        other = first.setdefault(edge.source, edge)
        if abs(other.cost_s - edge.cost_s) > COST_TOLERANCE:
            raise CostError(
                f"{arrow} costs {edge.cost_s}, but edge {other.source} -> {other.target} costs"
                f" {other.cost_s}; all edges of one source cost the same"
            )
        if file.nodes[at[edge.source]].backward and not file.nodes[at[edge.target]].backward:
            raise GraphError(f"{arrow} goes from a backward to a forward node; turn or drop it")


def _check_devices(file: _File) -> None:
    k, l = file.num_accelerators, file.num_cpus  # noqa: E741  the paper's names
    if min(k, l) < 0 or k + l == 0:
        raise ClusterError(f"maxFPGAs is {k} and maxCPUs {l}; needs counts >= 0, one device at least")
    if k + l > MAX_DEVICES:
        raise ClusterError(f"maxFPGAs + maxCPUs is {k + l}; the limit is {MAX_DEVICES} devices")
    if not 1 <= file.memory_bytes <= UNLIMITED_BYTES:
        raise ClusterError(f"maxSizePerFPGA is {file.memory_bytes}; needs 1..{UNLIMITED_BYTES} bytes")


def _require_time(value: float, label: str) -> None:
    if not 0 <= value < math.inf:
        raise CostError(f"{label} is {value}; a time is a finite number >= 0")


def _build_graph(file: _File, name: str) -> tuple[Graph, list[int]]:
    """The graph, and the row of `file.nodes` of each op."""
    nodes = file.nodes
    labels = [str(node.id) if node.name is None else node.name for node in nodes]
    names = unique_names(labels, (node.id for node in nodes))
    groups = group_ids([node.colour for node in nodes])
    builder = GraphBuilder(name, capture="msr file")
    for row, (node, mirror) in enumerate(zip(nodes, _find_mirrors(nodes), strict=True)):
        builder.op(
            names[row],
            phase=Phase.BACKWARD if node.backward else Phase.FORWARD,
            mirror=mirror,
            group=groups[row],
            flops=node.accelerator_s * REF_FLOPS_PER_S,
            resident_bytes=whole_bytes(node.num_bytes, f"size of node {node.id}"),
        )
    _add_tensors(builder, file)
    graph = builder.build()
    row_of = {unique: row for row, unique in enumerate(names)}
    return graph, [row_of[unique] for unique in graph.op_name]


def _add_tensors(builder: GraphBuilder, file: _File) -> None:
    """One tensor per op with out-edges: its transfer time belongs to the op, not to the edge."""
    op_of = {node.id: row for row, node in enumerate(file.nodes)}
    num_bytes: dict[int, int] = {}
    for edge in file.edges:
        size = whole_bytes(edge.num_bytes, f"size of edge {edge.source} -> {edge.target}")
        num_bytes[edge.source] = max(size, num_bytes.get(edge.source, 0))
    # NO_STORAGE: the node's own size already counts what it puts out.
    tensor = {
        node.id: builder.tensor(op_of[node.id], num_bytes[node.id], storage=NO_STORAGE)
        for node in file.nodes
        if node.id in num_bytes
    }
    for edge in file.edges:
        builder.use(tensor[edge.source], op_of[edge.target])


def _find_mirrors(nodes: Sequence[_Node]) -> list[int]:
    """Forward row of each backward node: alone in its colour class, or named without 'grad'."""
    forward = [(row, node) for row, node in enumerate(nodes) if not node.backward]
    members = Counter(node.colour for _, node in forward)
    by_colour = {node.colour: row for row, node in forward if node.colour is not None}
    by_name = {f"{node.name}grad": row for row, node in forward if node.name is not None}
    mirrors = []
    for node in nodes:
        mirror = NO_MIRROR
        if node.backward and members[node.colour] == 1 and node.colour in by_colour:
            mirror = by_colour[node.colour]
        elif node.backward and node.name is not None:
            mirror = by_name.get(node.name, NO_MIRROR)
        mirrors.append(mirror)
    return mirrors


def _build_cluster(file: _File, name: str) -> Cluster:
    """k accelerators and l CPUs of unlimited memory around main memory, a star."""
    k, num = file.num_accelerators, file.num_accelerators + file.num_cpus
    kind = np.repeat(np.array([_ACCELERATOR, _CPU], dtype=np.int32), [k, file.num_cpus])
    route = np.empty((num, num, 2), dtype=np.int32)
    route[:, :, 0] = np.arange(num)[:, None]
    route[:, :, 1] = num + np.arange(num)
    route[np.arange(num), np.arange(num)] = NO_LINK
    device_name = (*(f"acc{d}" for d in range(k)), *(f"cpu{d}" for d in range(file.num_cpus)))
    memory_bytes = np.where(kind == _ACCELERATOR, math.floor(file.memory_bytes), UNLIMITED_BYTES)
    return Cluster(
        name=name,
        device_name=device_name,
        kind=kind,
        kind_name=("accelerator", "cpu"),
        host=np.zeros(num, dtype=np.int32),
        engine=np.arange(num, dtype=np.int32),
        memory_bytes=memory_bytes.astype(np.int64),
        reserve_bytes=np.zeros(num, dtype=np.int64),
        flops_per_s=np.full((2, len(Dtype)), REF_FLOPS_PER_S),
        memory_bytes_per_s=np.full(2, 1e15),
        overhead_s=np.zeros(2),
        on_host=np.array([False, True]),  # a CPU works in main memory and pays for no transfer
        route=route,
        link_name=tuple(f"{device} {way}" for way in ("up", "down") for device in device_name),
        link_bytes_per_s=np.full(2 * num, _ANY_BYTES_PER_S),
        link_latency_s=np.zeros(2 * num),
    )

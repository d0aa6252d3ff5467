"""The JSON of msr-fiddle/piper: profiled layers of a training step, with and without recomputation.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021). A
node has, for one device, a time of forward and backward together and memory A y + B for y micro-batches in
flight; its variant "activation recomp" takes longer by its forward time and keeps less. Of that we make

    v.input   forward   puts out what is kept when v is recomputed: A of that variant
    v         forward   puts out the rest of A for its backward op; takes what recomputation adds
    v.grad    backward  takes the rest of the time; mirrors v; B is resident

all on one device. Every edge is a tensor forward and one backward, each paid for at both its ends (links
`host`). The B of the variant is not read: it is B and what of A is not kept, but for rounding. A node without
that variant is never recomputed. Variants for several devices (tensor parallelism) are not read. Times are
read as seconds, unchanged.
"""

import math

import msgspec
import numpy as np

from loadmaster.core.cluster import Cluster, star
from loadmaster.core.errors import ClusterError, CostError, FormatError, GraphError
from loadmaster.core.graph import NO_MIRROR, NO_STORAGE, Graph, Phase
from loadmaster.core.problem import Costs, Links, Objective, Origin, Workload
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.formats._records import REF_FLOPS_PER_S, decode, top_keys, unique_names, whole_bytes
from loadmaster.graph.formats.msr import MAX_DEVICES

RECOMPUTED = "activation recomp"
_WHAT = "a piper graph"
_ALONE = "1"  # the tensor-parallel degree of one device
_FORWARD_SHARE = 1 / 3  # of a node's time where nothing says more


class _Variant(
    msgspec.Struct,
    rename={
        "seconds": "timePerSample",
        "each_bytes": "memoryUsageA",
        "once_bytes": "memoryUsageB",
    },
):
    id: str
    seconds: float
    each_bytes: int | float
    once_bytes: int | float


class _Node(msgspec.Struct, rename={"variants": "TMPCs"}):
    id: int
    variants: dict[str, list[_Variant]]
    name: str | None = None


class _Edge(
    msgspec.Struct, rename={"source": "sourceId", "target": "destId", "num_bytes": "communicationCost"}
):
    source: int
    target: int
    num_bytes: int | float


class _File(
    msgspec.Struct,
    rename={"memory_bytes": "maxMemoryPerDevice", "num_devices": "maxDevices", "microbatches": "mbsInBatch"},
):
    memory_bytes: int | float
    num_devices: int
    bandwidth: float
    nodes: list[_Node]
    edges: list[_Edge]
    microbatches: int | float | None = None


class _Layer(msgspec.Struct):
    """A node in numbers."""

    forward_s: float
    backward_s: float
    kept_bytes: int  # of every micro-batch when recomputed
    freed_bytes: int  # of every micro-batch, unless recomputed
    resident_bytes: int
    rerun: bool


def recognises(data: bytes) -> bool:
    """Whether this is a JSON object with the keys of a piper graph."""
    return "maxMemoryPerDevice" in top_keys(data)


def read(data: bytes, name: str) -> Workload:
    """The training graph with its devices and given times."""
    file = _parse_file(data)
    layers = [_make_layer(node) for node in file.nodes]
    graph, seconds = _build_graph(file, layers, name)
    given_s = graph.tensor_bytes / file.bandwidth
    costs = Costs(
        compute_s=np.array([seconds[op] for op in graph.op_name])[:, None],
        issue_s=np.zeros(graph.num_ops),
        transfer_s=given_s,
        origin=np.full(graph.num_ops, Origin.GIVEN, dtype=np.int8),
        rel_error=np.zeros(graph.num_ops),
    )
    return Workload(graph, _build_cluster(file, name), costs, Objective.THROUGHPUT, Links.HOST)


def _parse_file(data: bytes) -> _File:
    """The file, every rule of the format checked but acyclicity."""
    file = decode(data, _File, what=_WHAT)
    if not file.nodes:
        raise GraphError("the piper graph has 0 nodes; nothing can be placed")
    if not 1 <= file.num_devices <= MAX_DEVICES:
        raise ClusterError(f"maxDevices is {file.num_devices}; needs 1 to {MAX_DEVICES}")
    if not 0 < file.bandwidth < math.inf:
        raise ClusterError(f"bandwidth is {file.bandwidth}; needs a number of bytes per second > 0")
    if not 1 <= file.memory_bytes < 2**62:
        raise ClusterError(f"maxMemoryPerDevice is {file.memory_bytes}; needs bytes >= 1 and < 2**62")
    at: dict[int, int] = {}
    for row, node in enumerate(file.nodes):
        if node.id in at:
            raise GraphError(f"duplicate id {node.id}: nodes[{at[node.id]}] and nodes[{row}]; ids are unique")
        at[node.id] = row
    for edge in file.edges:
        for end in (edge.source, edge.target):
            if end not in at:
                arrow = f"edge {edge.source} -> {edge.target}"
                raise GraphError(f"{arrow} names node {end}, which does not exist; add it or drop the edge")
    return file


def _make_layer(node: _Node) -> _Layer:
    """What a node takes on one device, plain and recomputed."""
    variants = node.variants.get(_ALONE)
    if not variants:
        known = ", ".join(map(repr, node.variants)) or "none"
        raise FormatError(
            f"node {node.id} has no variant for one device in TMPCs (degrees: {known}); add '1'"
        )
    for variant in variants:
        if not 0 <= variant.seconds < math.inf:
            raise CostError(
                f"timePerSample of node {node.id} is {variant.seconds}; a time is a finite number >= 0"
            )
    plain = next((variant for variant in variants if variant.id != RECOMPUTED), None)
    if plain is None:
        raise FormatError(f"node {node.id} has only the variant {RECOMPUTED!r}; add the plain one")
    again = next((variant for variant in variants if variant.id == RECOMPUTED), None)
    each = whole_bytes(plain.each_bytes, f"memoryUsageA of node {node.id}")
    kept, forward_s = each, plain.seconds * _FORWARD_SHARE
    if again is not None:
        kept = min(whole_bytes(again.each_bytes, f"memoryUsageA of node {node.id}"), each)
        forward_s = min(max(again.seconds - plain.seconds, 0.0), plain.seconds)
    return _Layer(
        forward_s=forward_s,
        backward_s=plain.seconds - forward_s,
        kept_bytes=kept,
        freed_bytes=each - kept,
        resident_bytes=whole_bytes(plain.once_bytes, f"memoryUsageB of node {node.id}"),
        rerun=again is not None,
    )


def _build_graph(file: _File, layers: list[_Layer], name: str) -> tuple[Graph, dict[str, float]]:
    """The graph, and the seconds of each op by its name."""
    batch = f", {file.microbatches:g} micro-batches in a batch" if file.microbatches is not None else ""
    builder = GraphBuilder(name, capture=f"piper file{batch}")
    num, ids = len(layers), [node.id for node in file.nodes]
    own = [str(node.id) if node.name is None else node.name for node in file.nodes]
    own = unique_names(own, ids)
    names = unique_names([*own, *(f"{n}.grad" for n in own), *(f"{n}.input" for n in own)], ids * 3)
    seconds: dict[str, float] = dict.fromkeys(names[2 * num :], 0.0)
    forward, backward = {}, {}
    for at, (node, layer) in enumerate(zip(file.nodes, layers, strict=True)):
        forward[node.id] = builder.op(names[at], group=at, flops=layer.forward_s * REF_FLOPS_PER_S)
        seconds[names[at]], seconds[names[num + at]] = layer.forward_s, layer.backward_s
        backward[node.id] = builder.op(
            names[num + at],
            phase=Phase.BACKWARD,
            mirror=forward[node.id] if layer.rerun else NO_MIRROR,
            group=at,
            flops=layer.backward_s * REF_FLOPS_PER_S,
            resident_bytes=layer.resident_bytes,
        )
        builder.use(builder.tensor(forward[node.id], layer.freed_bytes), backward[node.id])
        if layer.kept_bytes:
            kept = builder.op(names[2 * num + at], group=at)
            builder.use(builder.tensor(kept, layer.kept_bytes), forward[node.id], backward[node.id])
    for edge in file.edges:
        size = whole_bytes(edge.num_bytes, f"communicationCost of edge {edge.source} -> {edge.target}")
        # NO_STORAGE: A counts what a node keeps, whoever made it.
        ahead = builder.tensor(forward[edge.source], size, storage=NO_STORAGE)
        builder.use(ahead, forward[edge.target])
        back = builder.tensor(backward[edge.target], size, storage=NO_STORAGE)
        builder.use(back, backward[edge.source])
    return builder.build(), seconds


def _build_cluster(file: _File, name: str) -> Cluster:
    """Devices that are alike, each with a port of its own."""
    memory = [math.floor(file.memory_bytes)] * file.num_devices
    return star(name, memory_bytes=memory, bytes_per_s=file.bandwidth, latency_s=0.0, kind="device")

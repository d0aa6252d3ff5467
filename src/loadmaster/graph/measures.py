"""Properties of a graph without a cluster: sizes, depth, width, critical path."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.errors import GraphError
from loadmaster.core.graph import Graph, Phase, edges


@dataclass(frozen=True, slots=True)
class Measures:
    """The sizes of one graph."""

    num_ops: int
    num_edges: int  # distinct (producer, consumer) pairs
    num_tensors: int
    num_ops_of_phase: dict[str, int]  # by lower-case phase name
    depth: int  # ops on the longest path
    width: int  # most ops at equal distance from the sources, an estimate of the parallelism
    flops: float
    critical_path_flops: float  # most flops on one path
    tensor_bytes: int  # views not counted
    parameter_bytes: int  # storages made by parameter ops
    resident_bytes: int  # held beside tensors, all step long


def measure(graph: Graph) -> Measures:
    """Every measure of `graph`."""
    level = levels(graph)
    base = graph.tensor_storage == np.arange(graph.num_tensors)
    weight = base & (graph.phase[graph.tensor_op] == Phase.PARAM)
    count = np.bincount(graph.phase, minlength=len(Phase))
    return Measures(
        num_ops=graph.num_ops,
        num_edges=len(edges(graph)[0]),
        num_tensors=graph.num_tensors,
        num_ops_of_phase={phase.name.lower(): int(count[phase]) for phase in Phase},
        depth=int(level.max()) + 1,
        width=int(np.bincount(level).max()),
        flops=float(graph.flops.sum()),
        critical_path_flops=float(longest_path(graph, graph.flops).max()),
        tensor_bytes=int(graph.tensor_bytes[base].sum()),
        parameter_bytes=int(graph.tensor_bytes[weight].sum()),
        resident_bytes=int(graph.resident_bytes.sum()),
    )


def levels(graph: Graph) -> Ints:
    """[N] most ops on a path before each op; 0 for a source."""
    return longest_path(graph, np.ones(graph.num_ops)).astype(np.int32) - np.int32(1)


def longest_path(graph: Graph, weight: Floats) -> Floats:
    """[N] the heaviest path that ends at each op, that op included, with `weight` [N] on ops.

    One pass over the uses by producer: ops stand in topological order, so a producer's own
    longest path is known when its uses come up.
    """
    if len(weight) != graph.num_ops:
        raise GraphError(f"longest_path got {len(weight)} weights for {graph.num_ops} ops; give one per op")
    producer = graph.tensor_op[graph.use_tensor]
    order = np.argsort(producer, kind="stable")
    before = [0.0] * graph.num_ops
    own = weight.tolist()
    for source, target in zip(producer[order].tolist(), graph.use_op[order].tolist(), strict=True):
        reach = before[source] + own[source]
        if reach > before[target]:
            before[target] = reach
    return np.array(before) + weight

"""The skeleton of a problem: classes of like engines, and the ops between which a transfer may take time.

Everything here is a relaxation, so a bound of the skeleton is one of the problem (`docs/bounds.md`):

* engines with the same kinds of devices, and as much memory, are one class; within it transfers are free;
* between classes a tensor takes what it takes between their two nearest devices;
* an op without time that is tied to nothing (a view) is taken out: its producers then feed its consumers, at
  the least that any place for it costs. Of what both move, a link is charged the smaller. Where it has
  several producers, its output may cross instead of all its inputs, so only one of them is charged to links.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.cluster import NO_LINK, Cluster
from loadmaster.core.graph import units
from loadmaster.core.problem import Links, Problem
from loadmaster.simulator.bounds.favourite_children import pair_table
from loadmaster.simulator.bounds.travel import Travel, compute_travel


@dataclass(frozen=True, slots=True)
class Freight:
    """What one tensor takes of the links at least when it enters or leaves a class."""

    into_s: Floats  # [C]
    out_s: Floats  # [C]


@dataclass(frozen=True, slots=True)
class Edge:
    """What flows between two ops of the skeleton."""

    seconds: Floats  # [C, C] from class to class, 0 on the diagonal
    freight: dict[int, Freight]  # by the tensor that leaves the source


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """N ops (of all, some of them taken out) on C classes."""

    class_of: Ints  # [D]
    engines: Floats  # [C] how many run at once
    ports_in: Floats  # [C] transfers that may enter at once, inf = any number
    ports_out: Floats  # [C]
    memory_bytes: Floats  # [C]
    op_s: Floats  # [N, C] inf = not allowed
    head_s: Floats  # [N, C]
    tail_s: Floats  # [N, C]
    unit: Ints  # [N]
    num_units: int
    edges: dict[tuple[int, int], Edge]  # by source and target
    bound_s: float  # by heads and tails alone


def build_skeleton(problem: Problem) -> Skeleton:
    """Of a step problem."""
    found, cluster = compute_travel(problem), problem.cluster
    class_of = _classify_devices(cluster)
    num = int(class_of.max()) + 1
    ports = _count_ports(cluster, problem.links, class_of, num)
    unit, num_units = units(problem.graph)
    engines = [len(np.unique(cluster.engine[class_of == c])) for c in range(num)]
    return Skeleton(
        class_of=class_of,
        engines=np.array(engines, dtype=np.float64),
        ports_in=ports[1],
        ports_out=ports[0],
        memory_bytes=np.bincount(class_of, cluster.usable_bytes, num).astype(np.float64),
        op_s=_least_by_class(found.op_s, class_of),
        head_s=_least_by_class(found.head_s, class_of),
        tail_s=_least_by_class(found.tail_s, class_of),
        unit=unit,
        num_units=num_units,
        edges=_contract_idle_ops(problem, found, class_of, unit),
        bound_s=found.bound_s,
    )


def _classify_devices(cluster: Cluster) -> Ints:
    """[D] devices whose engines have the same kinds and memories are of one class."""
    key = []
    for d in range(cluster.num_devices):
        mates = np.flatnonzero(cluster.engine == cluster.engine[d])
        key.append(tuple(sorted((int(cluster.kind[m]), int(cluster.usable_bytes[m])) for m in mates)))
    seen: dict[object, int] = {}
    return np.array([seen.setdefault(k, len(seen)) for k in key], dtype=np.int32)


def _least_by_class(of_device: Floats, class_of: Ints) -> Floats:
    """[N, C] the least over the devices of each class."""
    num = int(class_of.max()) + 1
    return np.stack([of_device[:, class_of == c].min(axis=1) for c in range(num)], axis=1)


def _count_ports(cluster: Cluster, links: Links, class_of: Ints, num: int) -> list[Floats]:
    """[C] how many transfers may leave, and enter, a class at once: its links, or its devices."""
    if links == Links.HALF_DUPLEX:
        return [np.bincount(class_of, minlength=num).astype(np.float64)] * 2
    if links != Links.SHARED:
        return [np.full(num, np.inf)] * 2
    first: list[set[int]] = [set() for _ in range(num)]
    last: list[set[int]] = [set() for _ in range(num)]
    for i, j in np.argwhere(class_of[:, None] != class_of[None, :]).tolist():
        route = cluster.route[i, j][cluster.route[i, j] != NO_LINK].tolist()
        first[class_of[i]].add(route[0])
        last[class_of[j]].add(route[-1])
    return [np.array([float(len(used)) for used in ends]) for ends in (first, last)]


def _contract_idle_ops(
    problem: Problem, found: Travel, class_of: Ints, unit: Ints
) -> dict[tuple[int, int], Edge]:
    """Edges by source and target after ops without time or ties are taken out."""
    out: dict[int, dict[int, Edge]] = {}
    into: dict[int, dict[int, Edge]] = {}
    for source, target, edge in _iterate_transfers(problem, class_of):
        _add_edge(out, into, source, target, edge)
    alone = np.bincount(unit)[unit] == 1
    idle = (found.op_s == 0).all(axis=1)  # and allowed everywhere
    for op in np.flatnonzero(alone & idle).tolist():
        before, after = into.get(op, {}), out.get(op, {})
        if len(before) * len(after) > len(before) + len(after):
            continue
        for source in before:
            del out[source][op]
        for target in after:
            del into[target][op]
        charged = max(before, key=lambda source: _largest_freight_s(before[source]), default=None)
        for source, first in before.items():
            for target, then in after.items():
                edge = _chain_edges(first, then)
                _add_edge(out, into, source, target, edge if source == charged else Edge(edge.seconds, {}))
        into[op], out[op] = {}, {}
    return {(u, v): edge for u, rest in out.items() for v, edge in rest.items()}


def _iterate_transfers(problem: Problem, class_of: Ints) -> Iterator[tuple[int, int, Edge]]:
    """Every use of a tensor by another op."""
    graph = problem.graph
    seconds = _least_transfer_s(problem, class_of)
    freight: dict[int, Freight] = {}
    for t, v in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        if t not in freight:
            away = seconds[t] + np.where(np.eye(len(seconds[t]), dtype=np.bool_), np.inf, 0.0)
            freight[t] = Freight(away.min(axis=0), away.min(axis=1))
        yield int(graph.tensor_op[t]), v, Edge(seconds[t], {t: freight[t]})


def _least_transfer_s(problem: Problem, class_of: Ints) -> Floats:
    """[T, C, C] the least seconds of every tensor between two classes."""
    graph, num = problem.graph, int(class_of.max()) + 1
    table = pair_table(problem.cluster, problem.links)
    given, size = problem.costs.transfer_s, graph.tensor_bytes.astype(np.float64)
    seconds = np.zeros((graph.num_tensors, num, num))
    for c in range(num):
        for f in range(num):
            if c == f:
                continue
            least = np.full(graph.num_tensors, np.inf)
            pairs = table[np.ix_(class_of == c, class_of == f)].reshape(-1, 3)
            for latency_s, s_per_byte, hops in np.unique(pairs, axis=0).tolist():
                there = np.where(given >= 0, given * hops, latency_s + size * s_per_byte)
                least = np.minimum(least, there)
            seconds[:, c, f] = least
    return seconds


def _add_edge(
    out: dict[int, dict[int, Edge]], into: dict[int, dict[int, Edge]], source: int, target: int, edge: Edge
) -> None:
    """Two ways between the same ops: both are paid, at the same time."""
    known = out.setdefault(source, {}).get(target)
    if known is not None:
        freight = dict(known.freight)
        for t, load in edge.freight.items():
            mine = freight.get(t, load)
            freight[t] = Freight(np.maximum(mine.into_s, load.into_s), np.maximum(mine.out_s, load.out_s))
        edge = Edge(np.maximum(known.seconds, edge.seconds), freight)
    out[source][target] = edge
    into.setdefault(target, {})[source] = edge


def _largest_freight_s(edge: Edge) -> float:
    """Link seconds of the tensor on an edge that takes most, 0 where none is charged."""
    return max((float(load.into_s.sum()) for load in edge.freight.values()), default=0.0)


def _chain_edges(first: Edge, then: Edge) -> Edge:
    """From the source of one edge to the target of the next, the op between them anywhere."""
    seconds = (first.seconds[:, :, None] + then.seconds[None, :, :]).min(axis=1)
    np.fill_diagonal(seconds, 0.0)
    if not first.freight or not then.freight:
        return Edge(seconds, {})
    largest = max(first.freight, key=lambda t: (float(first.freight[t].into_s.sum()), t))
    mine = first.freight[largest]
    into_s = np.minimum(mine.into_s, np.min([load.into_s for load in then.freight.values()], axis=0))
    out_s = np.minimum(mine.out_s, np.min([load.out_s for load in then.freight.values()], axis=0))
    return Edge(seconds, {largest: Freight(into_s, out_s)})

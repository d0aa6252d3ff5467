"""Cargo: a problem as placers see it, in units that move as one.

Ops of one group are one unit. A unit of parameters alone *rides* with the unit that reads it first:
it costs no time, and far from its reader it would be sent there every step.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, distinct, offsets
from loadmaster.core.graph import Graph, Phase, edges, held_bytes, units
from loadmaster.core.problem import FREE, Problem, allowed_devices


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """U units in forward order; riders are folded into the unit they ride with."""

    of_op: Ints  # [N]
    seconds: Floats  # [U, D] inf = not allowed
    held_bytes: Floats  # [U] at the end of the step
    pinned: Bools  # [U]
    fits: Bools  # [U, D] allowed devices

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.held_bytes)


def load_cargo(problem: Problem, *, acyclic: bool = False) -> Cargo:
    """Units in the order of their first forward op.

    With `acyclic`, units that feed each other in a circle are fused and the order is topological on
    forward edges, so that every cut of the order is a chain.
    """
    of_op = _with_riders(problem)
    if acyclic:
        of_op = _fused(problem, of_op)
    of_op = _in_forward_order(problem, of_op, topological=acyclic)
    num = int(of_op.max()) + 1
    allowed = allowed_devices(problem, of_op, num)
    seconds = np.zeros((num, problem.cluster.num_devices))
    np.add.at(seconds, of_op, problem.device_compute_s)
    held = np.zeros(num)
    np.add.at(held, of_op, held_bytes(problem.graph).astype(np.float64))
    pinned = np.zeros(num, dtype=np.bool_)
    pinned[of_op[problem.pinned != FREE]] = True
    return Cargo(of_op, np.where(allowed, seconds, np.inf), held, pinned, allowed)


def _with_riders(problem: Problem) -> Ints:
    """Units, each parameter-only unit joined to its first reader's where both may share a device."""
    graph = problem.graph
    unit, num = units(graph)
    rides = np.ones(num, dtype=np.bool_)
    rides[unit[(graph.phase != Phase.PARAM) & (graph.phase != Phase.UPDATE)]] = False
    rides[unit[problem.pinned != FREE]] = False
    host = np.arange(num, dtype=np.int32)
    maker = unit[graph.tensor_op[graph.use_tensor]]
    reads = rides[maker] & ~rides[unit[graph.use_op]]
    order = np.argsort(graph.use_op[reads], kind="stable")[::-1]  # the first reader is written last
    host[maker[reads][order]] = unit[graph.use_op[reads][order]]
    allowed = allowed_devices(problem, unit, num)
    apart = ~(allowed & allowed[host]).any(axis=1)
    host[apart] = np.flatnonzero(apart)
    return host[unit]


def _fused(problem: Problem, of_op: Ints) -> Ints:
    """Units joined until forward edges between them have no circle."""
    source, target = _forward_edges(problem, of_op)
    num = int(of_op.max()) + 1
    matrix = csr_array((np.ones(len(source), dtype=np.int8), (source, target)), shape=(num, num))
    _, component = connected_components(matrix, directed=True, connection="strong")
    return component.astype(np.int32)[of_op]


def _in_forward_order(problem: Problem, of_op: Ints, *, topological: bool) -> Ints:
    """Units renumbered by first forward op, the others beside their neighbours; topologically if asked."""
    graph = problem.graph
    num = int(of_op.max()) + 1
    first = np.full(num, graph.num_ops, dtype=np.int64)
    forward = graph.phase == Phase.FORWARD
    ops = np.arange(graph.num_ops)
    np.minimum.at(first, of_op[forward], ops[forward])
    place = first.copy()
    if (first == graph.num_ops).any():
        place = _beside_neighbours(graph, of_op, first)
    present = np.flatnonzero(np.bincount(of_op, minlength=num))
    order = present[np.lexsort((first[present], place[present]))]
    rank = np.zeros(num, dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    of_op = rank[of_op]
    return _topological(problem, of_op) if topological else of_op


def _beside_neighbours(graph: Graph, of_op: Ints, first: Longs) -> Longs:
    """[units] `first`, and for a unit without forward ops the place of the last unit it feeds.

    Backward runs against the forward order, so that is where its gradient comes from. A unit that feeds
    nobody goes to the first unit that feeds it.
    """
    nowhere = graph.num_ops
    place = first.tolist()
    sources, targets = (of_op[side].tolist() for side in edges(graph))
    lost = {u for u, at in enumerate(place) if at == nowhere}
    pairs = [(u, v) for u, v in zip(sources, targets, strict=True) if u != v and (u in lost or v in lost)]
    fed = dict.fromkeys(lost, -1)
    for u, v in reversed(pairs):  # consumers come before their producers
        if u in lost and place[v] != nowhere:
            fed[u] = place[u] = max(fed[u], place[v])
    for u, v in pairs:
        if v in lost and fed[v] == -1:
            place[v] = min(place[v], place[u])
    return np.array(place, dtype=np.int64)


def _topological(problem: Problem, of_op: Ints) -> Ints:
    """Units renumbered along forward edges, the lowest number first; unchanged where already in order."""
    source, target = _forward_edges(problem, of_op)
    if (source < target).all():
        return of_op
    num = int(of_op.max()) + 1
    heads, pointer = target.tolist(), offsets(source, num).tolist()  # edges are sorted by source
    waiting = np.bincount(target, minlength=num).tolist()
    ready = [u for u in range(num) if waiting[u] == 0]
    rank = np.empty(num, dtype=np.int32)
    for place in range(num):  # no circles are left, so that somebody is always ready
        u = heapq.heappop(ready)
        rank[u] = place
        for v in heads[pointer[u] : pointer[u + 1]]:
            waiting[v] -= 1
            if waiting[v] == 0:
                heapq.heappush(ready, v)
    return rank[of_op]


def _forward_edges(problem: Problem, of_op: Ints) -> tuple[Ints, Ints]:
    """Distinct forward edges between different units."""
    graph = problem.graph
    source, target = edges(graph)
    forward = (graph.phase[source] == Phase.FORWARD) & (graph.phase[target] == Phase.FORWARD)
    num = int(of_op.max()) + 1
    pair = distinct(of_op[source[forward]].astype(np.int64) * num + of_op[target[forward]])
    pair = pair[pair // num != pair % num]
    return (pair // num).astype(np.int32), (pair % num).astype(np.int32)

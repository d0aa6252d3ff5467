"""A problem as placers see it, in units that move as one.

Ops of one group are one unit. A unit of parameters alone *rides* with the unit that reads it first:
it costs no time, and far from its reader it would be sent there every step.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, offsets, sorted_unique
from loadmaster.core.check import stage_order
from loadmaster.core.graph import Graph, Phase, edges, held_bytes, home_bytes, units
from loadmaster.core.problem import FREE, Problem, allowed_devices


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """U units in forward order; riders are folded into the unit they ride with."""

    of_op: Ints  # [N]
    seconds: Floats  # [U, D] inf = not allowed
    held_bytes: Floats  # [U] at the end of the step
    made_bytes: Floats  # [U] those, every tensor that is gone by then, and the largest workspace
    fits: Bools  # [U, D] allowed devices

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.held_bytes)


def load_cargo(problem: Problem, *, acyclic: bool = False) -> Cargo:
    """Units in the order of their first forward op.

    With `acyclic`, units that feed each other in a circle are fused, where a device may run them all, and
    the order is topological on forward edges (and on those that order classes without forward ops), so
    that every cut of the order is a chain.
    """
    graph, of_op = problem.graph, _join_parameters(problem)
    if acyclic:
        of_op = _fuse_cycles(problem, of_op)
    of_op = _sort_by_forward_op(problem, of_op, topological=acyclic)
    num = int(of_op.max()) + 1
    allowed = allowed_devices(problem, of_op, num)
    by_kind = [np.bincount(of_op, seconds, num) for seconds in problem.costs.compute_s.T]
    seconds = np.stack(by_kind, axis=1)[:, problem.cluster.kind]
    held = np.zeros(num)
    np.add.at(held, of_op, held_bytes(graph).astype(np.float64))
    made, gone = np.zeros(num), ~graph.keep
    np.maximum.at(made, of_op, graph.workspace_bytes.astype(np.float64))
    made += held
    np.add.at(made, of_op[graph.tensor_op[gone]], home_bytes(graph)[gone].astype(np.float64))
    return Cargo(of_op, np.where(allowed, seconds, np.inf), held, made, allowed)


def _join_parameters(problem: Problem) -> Ints:
    """Units, each parameter-only unit joined to its first reader's where all may share a device."""
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
    apart = np.flatnonzero(~_can_place(problem, host[unit], num)[host])
    host[apart] = apart
    return host[unit]


def _fuse_cycles(problem: Problem, of_op: Ints) -> Ints:
    """Units joined until the order of stages has no circle, but for those no device may run."""
    source, target = _stage_edges(problem, of_op)
    num = int(of_op.max()) + 1
    if (source < target).all():
        return of_op
    from scipy.sparse import csr_array  # slow to load and seldom needed
    from scipy.sparse.csgraph import connected_components

    matrix = csr_array((np.ones(len(source), dtype=np.int8), (source, target)), shape=(num, num))
    count, component = connected_components(matrix, directed=True, connection="strong")
    fused: Ints = component.astype(np.int32)[of_op]
    return np.where(_can_place(problem, fused, count)[fused], fused, count + of_op).astype(np.int32)


def _can_place(problem: Problem, unit: Ints, num: int) -> Bools:
    """[num] whether some device may run the whole unit."""
    return np.asarray(allowed_devices(problem, unit, num).any(axis=1))


def _sort_by_forward_op(problem: Problem, of_op: Ints, *, topological: bool) -> Ints:
    """Units renumbered by first forward op, the others beside their neighbours; then as stages may follow."""
    graph = problem.graph
    first = np.full(int(of_op.max()) + 1, graph.num_ops, dtype=np.int64)
    forward = np.flatnonzero(graph.phase == Phase.FORWARD)
    np.minimum.at(first, of_op[forward], forward)
    of_op, first = _renumber_units(of_op, first)
    lost = first == graph.num_ops
    if lost.any():
        place = np.where(lost, graph.num_ops, np.arange(len(first)))
        of_op, _ = _renumber_units(of_op, _place_beside_neighbours(graph, of_op, place))
    return _rank_topologically(problem, of_op)[of_op] if topological else of_op


def _renumber_units(of_op: Ints, key: Longs) -> tuple[Ints, Longs]:
    """Units in order of their keys, as before where equal, and the keys in that order; empty units go."""
    present = np.flatnonzero(np.bincount(of_op, minlength=len(key)))
    order = present[np.argsort(key[present], kind="stable")]
    rank = np.zeros(len(key), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank[of_op], key[order]


def _place_beside_neighbours(graph: Graph, of_op: Ints, place: Longs) -> Longs:
    """[units] their place; a unit that has none (N: it has no forward ops) gets that of the last it feeds.

    Backward runs against the forward order, so that is where its gradient comes from. A unit that feeds
    nobody goes to the first unit that feeds it.
    """
    nowhere, at = graph.num_ops, place.tolist()
    sources, targets = (of_op[side].tolist() for side in edges(graph))
    lost = {u for u, here in enumerate(at) if here == nowhere}
    pairs = [(u, v) for u, v in zip(sources, targets, strict=True) if u != v and (u in lost or v in lost)]
    fed = dict.fromkeys(lost, -1)
    for u, v in reversed(pairs):  # consumers come before their producers
        if u in lost and at[v] != nowhere:
            fed[u] = at[u] = max(fed[u], at[v])
    for u, v in pairs:
        if v in lost and fed[v] == -1:
            at[v] = min(at[v], at[u])
    return np.array(at, dtype=np.int64)


def _rank_topologically(problem: Problem, of_op: Ints) -> Ints:
    """[units] their rank in an order of stages, the lowest number first."""
    source, target = _stage_edges(problem, of_op)
    num = int(of_op.max()) + 1
    if (source < target).all():
        return np.arange(num, dtype=np.int32)
    heads, pointer = target.tolist(), offsets(source, num).tolist()  # edges are sorted by source
    waiting = np.bincount(target, minlength=num).tolist()
    ready = [u for u in range(num) if waiting[u] == 0]
    rank = np.full(num, -1, dtype=np.int32)
    rest = iter(range(num))
    for place in range(num):
        # Where a circle could not be fused nobody may be ready: then the lowest number is next.
        u = heapq.heappop(ready) if ready else next(u for u in rest if rank[u] < 0)
        rank[u] = place
        for v in heads[pointer[u] : pointer[u + 1]]:
            waiting[v] -= 1
            if waiting[v] == 0 and rank[v] < 0:
                heapq.heappush(ready, v)
    return rank


def _stage_edges(problem: Problem, of_op: Ints) -> tuple[Ints, Ints]:
    """Distinct pairs of different units of which the second may not stand in an earlier stage."""
    source, target = stage_order(problem.graph)
    num = int(of_op.max()) + 1
    pair = sorted_unique(of_op[source].astype(np.int64) * num + of_op[target])
    pair = pair[pair // num != pair % num]
    return (pair // num).astype(np.int32), (pair % num).astype(np.int32)

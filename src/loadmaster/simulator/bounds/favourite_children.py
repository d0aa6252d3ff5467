"""Favourite children: which consumer should stay with which producer, and what no plan can beat.

The programme of small communication times (Hanen and Munier; `small_communication.py` solves it): x_ij = 0
where op j follows op i on its device without a transfer; at most one child does, and it follows at most one
parent.

As published its optimum may exceed the best plan: two ops of 1 s after one of 1 s, transfers of 10 s, gives
7 s, but one device takes 3 s. *Clipped* it never does: c' is c, cut to the times of i's other children and of
j's other parents. In any run let x_ij = 0 where j starts less than c'_ij after the end of i. Such a j sits on
i's device, since on any other it waits c_ij or more. Of two such children of i, on one engine, the later one
starts no sooner than the earlier one's time after i; that is its c' or more, so it is none. Two such parents
likewise. So the x and the starts of the run obey the programme. Nothing is used but that transfers take their
time and an engine runs one op at a time: it holds for every link model, memory, order and issue time.

* p is the least over the devices an op may use, c the least over pairs of different devices its ends may use
  (of one engine or not), for the slowest of an edge's tensors; under `host` links a host-side device reads
  and writes for nothing.
* Ops that can never share a device always pay c in full; for ops that always do, only the clipping limits c'.
* Of two siblings one may also have c' = 0. A sibling without time would cut all others to nothing, so that
  its own c' is set to 0 instead.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import edges, units
from loadmaster.core.problem import Links, Objective, Problem, allowed_devices
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.simulator.bounds.small_communication import (
    Network,
    longest_path_over_edges,
    lower_by_edge,
    solve,
)
from loadmaster.simulator.bounds.small_communication_part import Index

NONE = -1  # no favourite
_MOST_EDGES = 200_000  # a second of passes over all edges, in Python
_EQUAL = 1e-9  # an x this near a threshold is below it
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True, eq=False)
class Favourites:
    """E edges (sorted by source, then target) with their x."""

    source: Ints  # [E]
    target: Ints  # [E]
    seconds: Floats  # [E] transfer time, clipped if so asked
    x: Floats  # [E] 0: the target stays with the source, 1: it need not
    makespan_s: float  # the programme's optimum; 0 if it was not solved
    bound_s: float  # no plan is faster; 0 where nothing is proven
    solved: bool


def find_favourites(problem: Problem, *, clipped: bool = True, effort: float = 1.0) -> Favourites:
    """Solve the programme, clipped or as published.

    `effort` 1 is seconds at worst, counted and not clocked. A programme that takes more is not solved: the
    child with the largest transfer plus way to the end is then favoured, and the bound is what was proven.
    """
    source, target = edges(problem.graph)
    op_s, (apart_s, forced) = _least_op_s(problem), _least_transfer_s(problem, source, target)
    delay_s = np.where(forced, apart_s, 0.0)
    cut_s = _clip_transfers(op_s, source, target, np.where(forced, 0.0, apart_s))
    plain_s = np.where(forced | np.isinf(apart_s), 0.0, apart_s)
    chosen_s = cut_s if clipped else plain_s
    x, makespan_s, bound_s, solved = np.ones(len(source)), 0.0, 0.0, False
    if len(source) <= _MOST_EDGES * effort:
        found = solve(Network(op_s, source, target, delay_s, chosen_s), effort=effort)
        if found.solved:
            x, makespan_s, solved = found.x, found.makespan_s, True
        if problem.objective == Objective.STEP and (chosen_s <= cut_s).all():  # published: rarely so
            # The simulator adds up in another order: stay below what it may round to.
            bound_s = found.proven_s * (1.0 - _EPS * (10_000 + 4 * len(op_s)))
    x = _lower_where_possible(Network(op_s, source, target, delay_s, plain_s), x, np.flatnonzero(~forced))
    return Favourites(source, target, delay_s + chosen_s, x, makespan_s, bound_s, solved)


def match_favourites(found: Favourites, num_ops: int, threshold: float = 0.5) -> Ints:
    """[N] the favourite child of each op, or NONE; no op is the favourite of two.

    Edges with x up to `threshold`, by falling (0.5 - x) seconds; of equals the longer transfer first.
    """
    favourite, taken = [NONE] * num_ops, [False] * num_ops
    wanted = np.flatnonzero(found.x <= threshold + _EQUAL)
    weight, seconds = (0.5 - found.x[wanted]) * found.seconds[wanted], found.seconds[wanted]
    wanted = wanted[np.lexsort((wanted, -seconds, -weight))]
    for i, j in zip(found.source[wanted].tolist(), found.target[wanted].tolist(), strict=True):
        if favourite[i] == NONE and not taken[j]:
            favourite[i], taken[j] = j, True
    return np.array(favourite, dtype=np.int32)


def _lower_where_possible(network: Network, x: Floats, edge: Index) -> Floats:
    """`x` lowered where room is left, first on the edges whose transfer would make the longest path."""
    length = longest_path_over_edges(network, np.zeros(len(x))) + network.transfer_s
    return lower_by_edge(network, x, edge[np.argsort(-length[edge], kind="stable")])


def _least_op_s(problem: Problem) -> Floats:
    """[N] on the best of the devices an op may use."""
    unit, num_units = units(problem.graph)
    kind = problem.cluster.kind
    allowed = np.zeros((num_units, len(problem.cluster.kind_name)), dtype=np.bool_)
    for device, fits in enumerate(allowed_devices(problem, unit, num_units).T):
        allowed[:, kind[device]] |= fits
    least: Floats = np.where(allowed[unit], problem.costs.compute_s, np.inf).min(axis=1)
    return least


def _least_transfer_s(problem: Problem, source: Ints, target: Ints) -> tuple[Floats, Bools]:
    """[E] the least time between different devices the two ends may use, and whether they must differ.

    Infinite where they never do. Of several tensors the slowest counts: all have to arrive.
    """
    graph = problem.graph
    unit, num_units = units(graph)
    rows, kind = _distinct_rows(allowed_devices(problem, unit, num_units))
    kind = kind[unit]
    maker = graph.tensor_op[graph.use_tensor]
    case = np.where(unit[maker] == unit[graph.use_op], -1, kind[maker] * len(rows) + kind[graph.use_op])
    seconds, table = np.full(len(case), np.inf), pair_table(problem.cluster, problem.links)
    size, given = graph.tensor_bytes[graph.use_tensor], problem.costs.transfer_s[graph.use_tensor]
    for code in np.unique(case[case >= 0]).tolist():
        first, then = rows[code // len(rows)], rows[code % len(rows)]
        pairs = table[np.logical_and.outer(first, then) & ~np.eye(len(first), dtype=np.bool_)]
        use = np.flatnonzero(case == code)
        for latency_s, s_per_byte, hops in np.unique(pairs, axis=0).tolist():
            there = np.where(given[use] >= 0, given[use] * hops, latency_s + size[use] * s_per_byte)
            seconds[use] = np.minimum(seconds[use], there)
    slowest, num_ops = np.zeros(len(source)), np.int64(graph.num_ops)
    edge = np.searchsorted(source * num_ops + target, maker * num_ops + graph.use_op)
    np.maximum.at(slowest, edge, seconds)
    return slowest, np.logical_and(rows[kind[source]], rows[kind[target]]).sum(axis=1) == 0


def _distinct_rows(allowed: Bools) -> tuple[Bools, Longs]:
    """Distinct rows [R, D], and which one [U] each unit has."""
    if allowed.all():
        return allowed[:1], np.zeros(len(allowed), dtype=np.int64)
    rows, kind = np.unique(allowed, axis=0, return_inverse=True)
    return rows, kind.reshape(-1).astype(np.int64)


def pair_table(cluster: Cluster, links: Links) -> Floats:
    """[D, D, 3] latency, seconds per byte and number of hops (for given times) of a transfer."""
    latency_s, s_per_byte = route_latency_s(cluster), 1.0 / route_bytes_per_s(cluster)
    if links != Links.HOST:
        return np.stack([latency_s, s_per_byte, np.ones_like(latency_s)], axis=2)
    away = ~cluster.on_host[cluster.kind]
    host = int(away.argmin())  # the first host-side device; without one all times are given
    hops = [np.stack([table[:, host], table[host, :]]) * away for table in (latency_s, s_per_byte)]
    hops.append(np.stack([away, away]).astype(np.float64))
    return np.stack([write[:, None] + read[None, :] for write, read in hops], axis=2)


def _clip_transfers(op_s: Floats, source: Ints, target: Ints, seconds: Floats) -> Floats:
    """[E] cut to the times of the other children and the other parents, so that the programme bounds."""
    ends, live = ((source, target), (target, source)), seconds > 0
    for mine, other in ends:
        several = np.bincount(mine[live], minlength=len(op_s)) > 1
        live = live & ~(several[mine] & (op_s[other] == 0))
    cut = np.where(live, seconds, 0.0)
    for mine, other in ends:
        cut[live] = np.minimum(cut[live], _least_other(mine[live], op_s[other[live]], len(op_s)))
    return np.where(np.isinf(cut), 0.0, cut)  # alone, and never apart


def _least_other(end: Ints, value: Floats, num: int) -> Floats:
    """[E] the least value of the edges that share this end, this edge left out; infinite if it is alone."""
    first, second = np.full(num, np.inf), np.full(num, np.inf)
    np.minimum.at(first, end, value)
    least = value == first[end]
    sole = least & (np.bincount(end[least], minlength=num)[end] == 1)
    np.minimum.at(second, end[~least], value[~least])
    return np.where(sole, second[end], first[end])

"""Grouping: the ops of a graph in at most K groups, each of which a strategy treats alike.

Units (`units.py`) are joined along the heaviest traffic between them, the cheapest group first, unless
one would take more than its share of the time. Ops that split and ops that do not are joined only where
nothing else is left. Groups are numbered by their time on the fastest kind, the longest first: the order
in which a search decides.
"""

import heapq
from itertools import pairwise

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.problem import Problem
from loadmaster.strategies.splitting.forms import Splits
from loadmaster.strategies.splitting.units import find_units

MOST_GROUPS = 40
_BALANCE = 5.0  # times the mean


def find_groups(problem: Problem, splits: Splits, most: int = MOST_GROUPS) -> Ints:
    """[N] the group of each op."""
    graph = problem.graph
    unit, num = find_units(graph, splits)
    seconds = np.where(np.isfinite(problem.costs.compute_s), problem.costs.compute_s, 0.0).min(axis=1)
    weight: Floats = np.zeros(num)
    np.add.at(weight, unit, seconds)
    stuck: Bools = np.zeros(num, dtype=np.bool_)
    stuck[unit[~splits.splits]] = True
    a, b = unit[graph.tensor_op[graph.use_tensor]], unit[graph.use_op]
    size = graph.tensor_bytes[graph.use_tensor].astype(np.float64)
    near: list[dict[int, float]] = [{} for _ in range(num)]
    for i, j, n in zip(a.tolist(), b.tolist(), size.tolist(), strict=True):
        if i != j:
            near[i][j] = near[i].get(j, 0.0) + n
            near[j][i] = near[j].get(i, 0.0) + n
    label = _merge(near, weight, stuck, most)[unit]
    total: Floats = np.zeros(int(label.max()) + 1)
    np.add.at(total, label, seconds)
    first = np.full(len(total), graph.num_ops)
    np.minimum.at(first, label, np.arange(graph.num_ops))
    used = np.flatnonzero(first < graph.num_ops)
    rank = np.empty(len(total), dtype=np.int32)
    rank[used[np.lexsort((first[used], -total[used]))]] = np.arange(len(used), dtype=np.int32)
    found: Ints = rank[label]
    return found


def _merge(
    near: list[dict[int, float]],
    weight: Floats,
    stuck: Bools,
    most: int,
) -> Ints:
    """[units] a label of each; neighbours joined until few enough are left."""
    num = len(near)
    parent = list(range(num))
    alive = num
    room = _BALANCE * float(weight.sum()) / max(most, 1)
    load = weight.tolist()
    queue = [(load[u], u) for u in range(num)]
    heapq.heapify(queue)
    waiting: list[int] = []
    while alive > most and queue:
        cost, u = heapq.heappop(queue)
        if parent[u] != u or cost != load[u]:
            continue
        others = [v for v in near[u] if load[u] + load[v] <= room]
        alike = [v for v in others if stuck[v] == stuck[u]] or others
        if not alike:
            waiting.append(u)
            continue
        v = max(alike, key=lambda w: (near[u][w], -w))
        _join(near, parent, u, v)
        load[v] += load[u]
        stuck[v] |= stuck[u]
        alive -= 1
        heapq.heappush(queue, (load[v], v))
    left = sorted(u for u in range(num) if parent[u] == u)
    while len(left) > most:  # what has no neighbour, or none with room: joined along the graph's order
        u, v = min(pairwise(left), key=lambda pair: load[pair[0]] + load[pair[1]])
        parent[u] = v
        load[v] += load[u]
        left.remove(u)
    return np.array([_root(parent, u) for u in range(num)], dtype=np.int32)


def _join(near: list[dict[int, float]], parent: list[int], u: int, v: int) -> None:
    parent[u] = v
    for w, n in near[u].items():
        near[w].pop(u, None)
        if w != v:
            near[v][w] = near[v].get(w, 0.0) + n
            near[w][v] = near[v][w]
    near[u] = {}


def _root(parent: list[int], u: int) -> int:
    while parent[u] != u:
        u = parent[u]
    return u

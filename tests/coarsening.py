"""Coarse graphs by label, for tests of what contraction keeps.

Ops of equal label and phase become one op; where that closes a circle, the circle becomes one op too.
"""

import heapq

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from loadmaster.core.arrays import Ints, sorted_unique
from loadmaster.core.graph import NO_STORAGE, Graph, Phase, edges
from loadmaster.graph.coarsen import CoarseGraph, _renumber_by_first, contract_to


def coarsen(graph: Graph, label: Ints) -> CoarseGraph:
    """Contract the ops of equal `label` [N], phases apart; the result is acyclic."""
    return contract_to(graph, *_contract_ops(graph, label))


def label_by_module(graph: Graph, depth: int) -> Ints:
    """[N] labels: ops whose module paths agree in their first `depth` names; without a module, alone."""
    seen: dict[str, int] = {}
    cut = [".".join(module.split(".")[:depth]) for module in graph.module]
    label = [seen.setdefault(module, op) if module else op for op, module in enumerate(cut)]
    return np.array(label, dtype=np.int32)


def _contract_ops(graph: Graph, label: Ints) -> tuple[Ints, int]:
    """Coarse op of each op and their number, in topological order, by first member where possible."""
    number = np.unique(label, return_inverse=True)[1].astype(np.int64)
    key = np.unique(number * len(Phase) + graph.phase, return_inverse=True)[1].astype(np.int32)
    source, target = _order_edges(graph)
    num = int(key.max()) + 1
    arrows = coo_array((np.ones(len(source)), (key[source], key[target])), shape=(num, num))
    circle = connected_components(arrows.tocsr(), connection="strong")[1]
    label, num = _renumber_by_first(circle[key])
    pair = sorted_unique(label[source].astype(np.int64) * num + label[target])
    source, target = (pair // num).astype(np.int32), (pair % num).astype(np.int32)
    rank = _rank_topologically(source[source != target], target[source != target], num)
    return rank[label], num


def _order_edges(graph: Graph) -> tuple[Ints, Ints]:
    """Which op comes before which: producer before consumer, and a base before its views."""
    source, target = edges(graph)
    view = np.flatnonzero(graph.tensor_storage != NO_STORAGE)
    base_op, view_op = graph.tensor_op[graph.tensor_storage[view]], graph.tensor_op[view]
    apart = base_op != view_op
    return np.concatenate([source, base_op[apart]]), np.concatenate([target, view_op[apart]])


def _rank_topologically(source: Ints, target: Ints, num: int) -> Ints:
    """Rank of each node, the lowest ready node first (Kahn's algorithm); edges sorted by source."""
    if (source < target).all():
        return np.arange(num, dtype=np.int32)
    pointer = np.searchsorted(source, np.arange(num + 1)).tolist()
    heads = target.tolist()
    waiting = np.bincount(target, minlength=num).tolist()
    ready = [node for node in range(num) if waiting[node] == 0]
    rank = np.empty(num, dtype=np.int32)
    for position in range(num):
        node = heapq.heappop(ready)
        rank[node] = position
        for head in heads[pointer[node] : pointer[node + 1]]:
            waiting[head] -= 1
            if waiting[head] == 0:
                heapq.heappush(ready, head)
    return rank

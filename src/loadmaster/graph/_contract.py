"""Contraction: which ops become one, and in what order the results stand."""

import heapq

import numpy as np

from loadmaster.core.arrays import Ints, sorted_unique
from loadmaster.core.graph import NO_STORAGE, Graph, Phase, edges

__all__: list[str] = []


def contract_ops(graph: Graph, label: Ints) -> tuple[Ints, int]:
    """Coarse op of each op and their number, in topological order, by first member where possible."""
    number = np.unique(label, return_inverse=True)[1].astype(np.int64)
    key = np.unique(number * len(Phase) + graph.phase, return_inverse=True)[1].astype(np.int32)
    source, target = _order_edges(graph)
    circle = label_components(key[source], key[target], int(key.max()) + 1, strong=True)
    label, num = renumber_by_first(circle[key])
    pair = sorted_unique(label[source].astype(np.int64) * num + label[target])
    source, target = (pair // num).astype(np.int32), (pair % num).astype(np.int32)
    rank = _rank_topologically(source[source != target], target[source != target], num)
    return rank[label], num


def label_components(source: Ints, target: Ints, num: int, *, strong: bool) -> Ints:
    """[num] number of the component each node is in."""
    # imported here because scipy takes longer to load than most commands take to run
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    matrix = coo_array((np.ones(len(source)), (source, target)), shape=(num, num))
    _, label = connected_components(matrix.tocsr(), connection="strong" if strong else "weak")
    return np.asarray(label, dtype=np.int32)


def renumber_by_first(label: Ints) -> tuple[Ints, int]:
    """Labels renumbered by first appearance, and their number."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[inverse], len(first)


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

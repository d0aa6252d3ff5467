"""Nets of groups and ties between units, compiled: what the passes of `kernel.py` stand on.

A *net* is a graph of groups in topological order: its edges by tail, each with the seconds its tensors
take to another device. Ops of one *unit* share a device; `Ties` joins units as their ops merge, and
guards their size. Everything is O(groups + edges).
"""

from typing import Any, NamedTuple

import numpy as np

from loadmaster.simulator.jit import kernel

__all__: list[str] = []

NONE = -1


class Net(NamedTuple):
    """Groups joined by edges, none twice, none to itself."""

    ptr: Any  # [groups + 1] into the edges
    tail: Any  # [E] sorted
    head: Any  # [E]
    cost_s: Any  # [E] to send what the edge carries to another device
    firm: Any  # [E] leads to a branch that was merged into its join: counts, whatever other paths there are


class Ties(NamedTuple):
    """Units that share a device, as a forest; the other columns hold for its roots."""

    up: Any  # [units]
    seconds: Any  # [units]
    held: Any  # [units] bytes
    mask: Any  # [units, words] bits of the devices allowed; no words: all may go everywhere


class Limit(NamedTuple):
    """How large what is tied together may become."""

    seconds: float
    num_bytes: float


class Groups(NamedTuple):
    """What is known of each group of a net."""

    unit: Any  # [groups] of one of its ops
    kind: Any  # [groups] only groups of one kind may merge
    own_s: Any  # [groups]
    joined: Any  # [groups] a branch was merged into a join of it


@kernel
def make_net(num: int, tail: Any, head: Any, cost_s: Any, firm: Any) -> Net:
    """The net of edges in any order: sorted by tail, equal ones added up, loops dropped."""
    ptr = np.zeros(num + 1, dtype=np.int32)
    for e in range(len(tail)):
        if tail[e] != head[e]:
            ptr[tail[e] + 1] += 1
    for u in range(num):
        ptr[u + 1] += ptr[u]
    place = ptr[:-1].copy()
    order = np.empty(ptr[num], dtype=np.int32)
    for e in range(len(tail)):
        if tail[e] != head[e]:
            order[place[tail[e]]] = e
            place[tail[e]] += 1
    out_tail = np.empty(len(order), dtype=np.int32)
    out_head = np.empty(len(order), dtype=np.int32)
    out_cost = np.empty(len(order), dtype=np.float64)
    out_firm = np.empty(len(order), dtype=np.bool_)
    seen = np.full(num, NONE, dtype=np.int32)  # last edge to each head
    count = begin = 0
    for u in range(num):
        first, end = count, ptr[u + 1]
        for at in range(begin, end):
            e = order[at]
            v = head[e]
            if seen[v] >= first:
                out_cost[seen[v]] += cost_s[e]
                out_firm[seen[v]] |= firm[e]
                continue
            seen[v] = count
            out_tail[count], out_head[count] = u, v
            out_cost[count], out_firm[count] = cost_s[e], firm[e]
            count += 1
        begin = end
        ptr[u + 1] = count
    return Net(
        ptr,
        out_tail[:count].copy(),
        out_head[:count].copy(),
        out_cost[:count].copy(),
        out_firm[:count].copy(),
    )


@kernel
def contract_net(net: Net, root: Any, order: Any, branch: Any) -> Any:
    """The net of the roots, numbered along `order`, and the number of each old group's new one.

    `branch` [groups] was merged into a join: edges to it are firm from now on.
    """
    num_old = len(root)
    number = np.empty(num_old, dtype=np.int32)
    num = 0
    for at in range(num_old):
        if root[order[at]] == order[at]:
            number[order[at]] = num
            num += 1
    for v in range(num_old):
        if root[v] != v:
            number[v] = number[root[v]]
    firm = np.empty(len(net.tail), dtype=np.bool_)
    for e in range(len(firm)):
        firm[e] = net.firm[e] or branch[net.head[e]]
    return number, make_net(num, number[net.tail], number[net.head], net.cost_s, firm)


@kernel
def longest_path_s(ptr: Any, head: Any, seconds: Any) -> float:
    """Seconds of the longest path."""
    before = np.zeros(len(seconds), dtype=np.float64)
    longest = 0.0
    for u in range(len(seconds)):
        reach = before[u] + seconds[u]
        longest = max(longest, reach)
        for e in range(ptr[u], ptr[u + 1]):
            before[head[e]] = max(before[head[e]], reach)
    return longest


@kernel
def count_epochs(ptr: Any, head: Any, rank: Any) -> Any:
    """[N] how often the ranks of ops fall, at most, on a path to each op.

    (epoch, rank) never falls along an edge; so ops that merge within one value of it close no circle with
    ops of another.
    """
    epoch = np.zeros(len(rank), dtype=np.int32)
    for u in range(len(rank)):
        for e in range(ptr[u], ptr[u + 1]):
            v = head[e]
            epoch[v] = max(epoch[v], epoch[u] + (rank[u] > rank[v]))
    return epoch


@kernel
def build_forest(net: Net) -> Any:
    """Level of each group, and its place and size in a forest of longest paths (by number of ops).

    A group is an ancestor of those whose `place` is within `size` of its own. Returns level, parent,
    place, size.
    """
    num = len(net.ptr) - 1
    level = np.zeros(num, dtype=np.int32)
    parent = np.full(num, NONE, dtype=np.int32)
    for e in range(len(net.tail)):
        u, v = net.tail[e], net.head[e]
        if level[u] + 1 > level[v]:
            level[v] = level[u] + 1
            parent[v] = u
    size = np.ones(num, dtype=np.int32)
    for v in range(num - 1, -1, -1):
        if parent[v] != NONE:
            size[parent[v]] += size[v]
    place = np.zeros(num, dtype=np.int32)
    free = np.zeros(num, dtype=np.int32)
    next_tree = 0
    for v in range(num):
        if parent[v] == NONE:
            place[v] = next_tree
            next_tree += size[v]
        else:
            place[v] = free[parent[v]]
            free[parent[v]] += size[v]
        free[v] = place[v] + 1
    return level, parent, place, size


@kernel
def find_needed_edges(net: Net) -> Any:
    """[E] False where the forest knows a longer path between the ends of an edge, unless it is firm."""
    _, parent, place, size = build_forest(net)
    real = np.empty(len(net.tail), dtype=np.bool_)
    for e in range(len(real)):
        u, v = net.tail[e], net.head[e]
        inside = place[u] <= place[v] < place[u] + size[u]
        real[e] = net.firm[e] or parent[v] == u or not inside
    return real


@kernel
def find_root(up: Any, unit: int) -> int:
    """The root of a unit."""
    while up[unit] != unit:
        up[unit] = up[up[unit]]
        unit = up[unit]
    return unit


@kernel
def may_share(ties: Ties, a: int, b: int) -> bool:
    """Whether some device may run both."""
    words = ties.mask.shape[1]
    for word in range(words):
        if ties.mask[a, word] & ties.mask[b, word]:
            return True
    return bool(words == 0)


@kernel
def tie_roots(ties: Ties, one: int, other: int) -> None:
    """Two different roots become one."""
    a, b = min(one, other), max(one, other)
    ties.up[b] = a
    ties.seconds[a] += ties.seconds[b]
    ties.held[a] += ties.held[b]
    for word in range(ties.mask.shape[1]):
        ties.mask[a, word] &= ties.mask[b, word]


@kernel
def tie_pairs(ties: Ties, one: Any, other: Any) -> None:
    """Tie units pair by pair, where a device may run both."""
    for at in range(len(one)):
        a, b = find_root(ties.up, one[at]), find_root(ties.up, other[at])
        if a != b and may_share(ties, a, b):
            tie_roots(ties, a, b)


@kernel
def try_tie(ties: Ties, one: int, other: int, own_s: float, limit: Limit) -> bool:
    """Tie the units of two groups that take `own_s` together, if the result is not too large.

    What adds nothing may join something that is too large already.
    """
    a, b = find_root(ties.up, one), find_root(ties.up, other)
    if a == b:
        return own_s <= limit.seconds
    both_s, both = ties.seconds[a] + ties.seconds[b], ties.held[a] + ties.held[b]
    if both_s > limit.seconds and both_s > max(ties.seconds[a], ties.seconds[b]):
        return False
    if both > limit.num_bytes and both > max(ties.held[a], ties.held[b]):
        return False
    if not may_share(ties, a, b):
        return False
    tie_roots(ties, a, b)
    return True


@kernel
def try_tie_source(ties: Ties, one: int, other: int, limit: Limit) -> bool:
    """Tie a source to its consumer: whatever the time, if it is not large itself.

    Its output must be where the consumer runs anyway.
    """
    a, b = find_root(ties.up, one), find_root(ties.up, other)
    if a == b:
        return True
    if ties.held[a] > limit.num_bytes or not may_share(ties, a, b):
        return False
    tie_roots(ties, a, b)
    return True

"""Passes that merge groups, compiled, and why no circle can arise.

Every pass names a root for each group; `contracted` makes the next net of the roots. Each kind of pass is
acyclic on its own:

* `merge_into_consumers`: u goes to v when v is all that follows u. Roots are the last of their group, and
  whatever a member feeds beside its root comes after the root too. So an edge from group X to group Y
  means a path from root X to root Y: the order of roots is topological.
* `merge_into_producers`: the same, seen against the edges; roots are the first of their group.
* `merge_siblings`: groups of one level. Every edge leads to a higher level.
* `merge_rows`: neighbours in a topological order. Every edge leads to the same row or a later one.

An edge u -> w beside a longer path u -> ... -> w says nothing new about order: `find_needed_edges` finds most
of those. `follow_homes` then merges ops of other phases alike, with a potential that never rises along an
edge. All passes are O(groups + edges).
"""

from typing import Any

import numpy as np

from loadmaster.placers.grouping.net import (
    NONE,
    Groups,
    Limit,
    Net,
    Ties,
    build_forest,
    find_needed_edges,
    find_root,
    may_share,
    tie_roots,
    try_tie,
    try_tie_source,
)
from loadmaster.simulator.jit import kernel

__all__: list[str] = []

TOP = 2**62 + 1  # a potential above every other; odd


@kernel
def find_lone_edges(net: Net, real: Any) -> Any:
    """The only real edge out of each group, or NONE, and how many real edges lead into each."""
    num = len(net.ptr) - 1
    lone = np.full(num, NONE, dtype=np.int32)
    num_in = np.zeros(num, dtype=np.int32)
    for u in range(num):
        count = 0
        for e in range(net.ptr[u], net.ptr[u + 1]):
            if real[e]:
                count += 1
                num_in[net.head[e]] += 1
                lone[u] = e
        if count != 1:
            lone[u] = NONE
    return lone, num_in


@kernel
def group_by_head(net: Net, lone: Any) -> Any:
    """Groups with a lone edge, by its head: row pointer and groups."""
    num = len(lone)
    ptr = np.zeros(num + 1, dtype=np.int32)
    for u in range(num):
        if lone[u] != NONE:
            ptr[net.head[lone[u]] + 1] += 1
    for v in range(num):
        ptr[v + 1] += ptr[v]
    place = ptr[:-1].copy()
    group = np.empty(ptr[num], dtype=np.int32)
    for u in range(num):
        if lone[u] != NONE:
            v = net.head[lone[u]]
            group[place[v]] = u
            place[v] += 1
    return ptr, group


@kernel
def merge_into_consumers(
    net: Net, groups: Groups, ties: Ties, limit: Limit, branches: bool, single: bool
) -> Any:
    """Root of each group, which were merged as part of a branch, and how many merged.

    Into a join go what takes no time, sources that are cheaper to run than to send (whatever their time while
    groups are `single` ops), and of the true branches one (with `branches`): the one that saves most, if it
    is cheaper to run than to send. `own_s` and `joined` are brought up to date for the roots.
    """
    unit, own_s, joined = groups.unit, groups.own_s, groups.joined
    num = len(unit)
    lone, num_in = find_lone_edges(net, find_needed_edges(net))
    ptr, group = group_by_head(net, lone)
    fed = np.zeros(num, dtype=np.bool_)
    fed[net.head] = True
    root = np.arange(num).astype(np.int32)
    branch = np.zeros(num, dtype=np.bool_)
    count = 0
    for v in range(num):
        best, best_s, left = NONE, -1.0, num_in[v]
        for at in range(ptr[v], ptr[v + 1]):
            u = group[at]
            saved_s = net.cost_s[lone[u]] - own_s[u]
            chain, source = num_in[v] == 1, not fed[u] and saved_s >= 0
            merged = False
            if source and single and not chain:
                merged = try_tie_source(ties, unit[u], unit[v], limit)
            elif chain or source or own_s[u] == 0:
                merged = try_tie(ties, unit[u], unit[v], own_s[u] + own_s[v], limit)
            elif saved_s > best_s:
                best, best_s = u, saved_s
            if merged:
                root[u] = v
                own_s[v] += own_s[u]
                joined[v] |= joined[u]
                count += 1
                left -= 1
        if best_s < 0 or joined[v] or left == 1 or not branches:
            continue  # what is left alone is no branch, but the next pass's chain
        if try_tie(ties, unit[best], unit[v], own_s[best] + own_s[v], limit):
            root[best] = v
            own_s[v] += own_s[best]
            joined[v] = branch[best] = True
            count += 1
    for v in range(num - 1, -1, -1):
        into = root[v]
        branch[v] |= branch[into]  # what merged into a branch is part of it
        root[v] = root[into]
    return root, branch, count


@kernel
def merge_into_producers(net: Net, groups: Groups, ties: Ties, limit: Limit) -> Any:
    """Root of each group and how many merged: what takes no time goes to the one op that feeds it."""
    unit, own_s, joined = groups.unit, groups.own_s, groups.joined
    num = len(unit)
    real = find_needed_edges(net)
    num_in = np.zeros(num, dtype=np.int32)
    only = np.full(num, NONE, dtype=np.int32)
    for e in range(len(real)):
        if real[e]:
            num_in[net.head[e]] += 1
            only[net.head[e]] = net.tail[e]
    root = np.arange(num).astype(np.int32)
    count = 0
    for v in range(num):
        if num_in[v] == 1 and own_s[v] == 0:
            u = root[only[v]]
            if try_tie(ties, unit[u], unit[v], own_s[u], limit):
                root[v] = u
                joined[u] |= joined[v]
                count += 1
    return root, count


@kernel
def merge_siblings(net: Net, groups: Groups, ties: Ties, limit: Limit, width: int) -> Any:
    """Root of each group, the order of groups by level, and how many merged.

    Only where a level has more than `width` groups, which stay that many: each gets an equal share.
    """
    unit, own_s, joined = groups.unit, groups.own_s, groups.joined
    num = len(unit)
    level, _, place, _ = build_forest(net)
    depth = 0
    for v in range(num):
        depth = max(depth, int(level[v]) + 1)
    ptr = np.zeros(depth + 1, dtype=np.int32)
    level_s = np.zeros(depth, dtype=np.float64)
    by_place = np.empty(num, dtype=np.int32)
    for v in range(num):
        ptr[level[v] + 1] += 1
        level_s[level[v]] += own_s[v]
        by_place[place[v]] = v
    for k in range(depth):
        ptr[k + 1] += ptr[k]
    order = np.empty(num, dtype=np.int32)
    fill = ptr[:-1].copy()
    for at in range(num):  # those under one parent stand side by side
        v = by_place[at]
        order[fill[level[v]]] = v
        fill[level[v]] += 1
    root = np.arange(num).astype(np.int32)
    count = 0
    for k in range(depth):
        if ptr[k + 1] - ptr[k] <= width:
            continue
        first = order[ptr[k]]
        for at in range(ptr[k] + 1, ptr[k + 1]):
            v = order[at]
            both_s = own_s[first] + own_s[v]
            equal = groups.kind[first] == groups.kind[v]
            if equal and both_s <= level_s[k] / width and try_tie(ties, unit[first], unit[v], both_s, limit):
                root[v] = first
                own_s[first] = both_s
                joined[first] |= joined[v]
                count += 1
            else:
                first = v
    return root, order, count


@kernel
def order_depth_first(net: Net, module: Any) -> Any:
    """A topological order that goes on with what has just become ready, in the same module if it can."""
    num = len(net.ptr) - 1
    waiting = np.zeros(num, dtype=np.int32)
    for e in range(len(net.head)):
        waiting[net.head[e]] += 1
    stack = np.empty(num, dtype=np.int32)
    top = 0
    for v in range(num - 1, -1, -1):
        if waiting[v] == 0:
            stack[top] = v
            top += 1
    order = np.empty(num, dtype=np.int32)
    for at in range(num):
        top -= 1
        u = stack[top]
        order[at] = u
        for same in (False, True):
            for e in range(net.ptr[u + 1] - 1, net.ptr[u] - 1, -1):
                v = net.head[e]
                if (module[v] == module[u]) == same:
                    waiting[v] -= 1
                    if waiting[v] == 0:
                        stack[top] = v
                        top += 1
    return order


@kernel
def merge_rows(net: Net, groups: Groups, ties: Ties, limit: Limit, order: Any) -> Any:
    """Root of each group and how many merged: neighbours in `order`, if the row before feeds the next."""
    unit, own_s, joined = groups.unit, groups.own_s, groups.joined
    num = len(unit)
    root = np.arange(num).astype(np.int32)
    fed = np.full(num, NONE, dtype=np.int32)  # the last row that feeds a group
    count, first = 0, NONE
    for v in order:
        both_s = own_s[v] + (own_s[first] if first != NONE else 0.0)
        if first != NONE and fed[v] == first and try_tie(ties, unit[first], unit[v], both_s, limit):
            root[v] = first
            own_s[first] = both_s
            joined[first] |= joined[v]
            count += 1
        else:
            first = v
        for e in range(net.ptr[v], net.ptr[v + 1]):
            fed[net.head[e]] = first
    return root, count


@kernel
def follow_homes(
    net: Net, kind: Any, phase: Any, group: Any, num_groups: int, home: Any, unit: Any, ties: Ties
) -> Any:
    """Ops without a group go where their `home` op went: [N] leader and [N] potential of each.

    Ops merge within one `kind` and one home. The potential is twice the number of the home's group, odd for
    ops left alone, and never rises along an edge between ops of a kind: an op that would make it rise is
    left alone. So a circle of merged ops would have one potential, and there is but one such group.
    """
    num = len(kind)
    lead = np.full((4, num_groups), NONE, dtype=np.int32)
    most = np.full(num, TOP, dtype=np.int64)
    leader = np.arange(num).astype(np.int32)
    potential = np.zeros(num, dtype=np.int64)
    for u in range(num):
        if group[u] != NONE:
            continue
        value = most[u] - 1 if most[u] % 2 == 0 else most[u]
        at = group[home[u]] if home[u] != NONE else NONE
        if at != NONE and 2 * at <= most[u]:
            first = lead[phase[u], at]
            if first == NONE:
                lead[phase[u], at] = u
                value = 2 * at
            elif kind[first] == kind[u]:
                a, b = find_root(ties.up, unit[first]), find_root(ties.up, unit[u])
                if a == b or may_share(ties, a, b):
                    if a != b:
                        tie_roots(ties, a, b)
                    leader[u] = first
                    value = 2 * at
        potential[u] = value
        for e in range(net.ptr[u], net.ptr[u + 1]):
            v = net.head[e]
            if kind[v] == kind[u]:
                most[v] = min(most[v], value)
    return leader, potential

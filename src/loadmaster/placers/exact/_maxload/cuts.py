"""The least load of a device that holds one class, or holds one and not another: minimum cuts, compiled.

The set of a device is one side of a cut: a class in it pays its time, a net whose home is in it and some user
is not pays a write, a net with a user in it and its home outside pays a read. That is a network (one node for
every class, two for every net), and the least load of all sets that hold class h is the maximum flow from h;
of those that do not hold u, with u on the other side. Dinic's algorithm, stopped above a limit.
"""

from typing import Any

import numpy as np

from loadmaster.placers._copies import copy_into
from loadmaster.simulator.jit import kernel

ENDLESS = np.int64(2**60)


@kernel
def least_load(
    ptr: Any,  # [nodes + 1] into arcs
    arc: Any,  # arcs out of each node
    head: Any,  # [arcs] arc a and a ^ 1 are each other's reverse
    capacity: Any,  # [arcs]
    first: Any,  # the class that is in
    barred: Any,  # a class that is not, or -1
    sink: Any,
    limit: Any,
    residual: Any,
    level: Any,
    spot: Any,
    queue: Any,
    path: Any,
) -> Any:
    """The least load, or some value above the limit."""
    nodes = len(ptr) - 1
    copy_into(residual, capacity)
    if barred >= 0:
        residual[2 * barred] = ENDLESS  # its arc to the sink
    flow = np.int64(0)
    while flow <= limit:
        for v in range(nodes):
            level[v] = -1
        level[first] = 0
        queue[0] = first
        begin, end = 0, 1
        while begin < end and level[sink] < 0:
            v = queue[begin]
            begin += 1
            for i in range(ptr[v], ptr[v + 1]):
                a = arc[i]
                if residual[a] > 0 and level[head[a]] < 0:
                    level[head[a]] = level[v] + 1
                    queue[end] = head[a]
                    end += 1
        if level[sink] < 0:
            return flow
        for v in range(nodes):
            spot[v] = ptr[v]
        size, v = 0, first
        while True:
            if v == sink:
                least = ENDLESS
                for i in range(size):
                    least = min(least, residual[path[i]])
                flow += least
                if flow > limit:
                    return flow
                back = size
                for i in range(size - 1, -1, -1):
                    residual[path[i]] -= least
                    residual[path[i] ^ 1] += least
                    if residual[path[i]] == 0:
                        back = i
                size = back
                v = head[path[back] ^ 1]
                continue
            found = False
            while spot[v] < ptr[v + 1]:
                a = arc[spot[v]]
                if residual[a] > 0 and level[head[a]] == level[v] + 1:
                    found = True
                    break
                spot[v] += 1
            if found:
                path[size] = arc[spot[v]]
                size += 1
                v = head[arc[spot[v]]]
            elif v == first:
                break
            else:
                level[v] = -1
                size -= 1
                v = head[path[size] ^ 1]
    return flow


@kernel
def least_loads(
    ptr: Any, arc: Any, head: Any, capacity: Any, inside: Any, outside: Any, sink: Any, limit: Any
) -> Any:
    """[P] least load of sets that hold `inside[i]` and not `outside[i]` (-1: whatever else)."""
    nodes = len(ptr) - 1
    found = np.empty(len(inside), np.int64)
    residual = np.empty(len(capacity), np.int64)
    level = np.empty(nodes, np.int32)
    spot = np.empty(nodes, np.int64)
    queue = np.empty(nodes + 1, np.int64)
    path = np.empty(nodes + 1, np.int64)
    for i in range(len(inside)):
        found[i] = least_load(
            ptr, arc, head, capacity, inside[i], outside[i], sink, limit, residual, level, spot, queue, path
        )
    return found

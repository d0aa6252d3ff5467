"""The same dynamic programme along one topological order, compiled: stages are intervals of the order.

`best[i, s]` is the least busiest load of the first i classes with the devices of state s, a count of every
type. For every end the begin of the last stage goes back class by class; its transfers change by the nets of
the class that joins. O(C w S) for C classes, stages of at most w classes and S states.
"""

from typing import Any

import numpy as np

from loadmaster.simulator.jit import kernel

SUM, MAX2 = 0, 1


@kernel
def cut_linearly(
    order: Any,  # [C] classes in topological order
    seconds: Any,  # [C, T]
    num_bytes: Any,
    room: Any,
    column: Any,
    load: Any,
    home_ptr: Any,
    home_net: Any,
    user_ptr: Any,
    user_net: Any,
    net_home: Any,
    net_ptr: Any,
    read_s: Any,
    write_s: Any,
    stride: Any,  # [T]
    step_ptr: Any,
    step: Any,  # states that may take one more device of a type
    states: Any,
    limit_s: Any,  # stages above it are not looked at
) -> Any:
    """The least busiest load (inf: none under the limit), and begin and type of the stages, last first."""
    num, types, columns = len(order), len(room), len(read_s)
    best = np.full((num + 1, states), np.inf)
    came_from = np.zeros((num + 1, states), np.int32)
    came_by = np.full((num + 1, states), -1, np.int8)
    place = np.empty(num, np.int32)
    for i in range(num):
        place[order[i]] = i
    held = np.zeros(len(net_home), np.int32)  # users of a net in the stage
    seen = np.full(len(net_home), -1, np.int32)
    reads, writes = np.zeros(columns), np.zeros(columns)
    taken = np.zeros(types)
    for s in range(states):
        best[0, s] = 0.0
    for end in range(1, num + 1):
        size = 0
        for t in range(types):
            taken[t] = 0.0
        for q in range(columns):
            reads[q], writes[q] = 0.0, 0.0
        for begin in range(end - 1, -1, -1):
            v = order[begin]
            size += num_bytes[v]
            any_fits = False
            for t in range(types):
                taken[t] += seconds[v, t]
                if taken[t] <= limit_s and size <= room[t]:
                    any_fits = True
            if not any_fits:
                break
            for i in range(home_ptr[v], home_ptr[v + 1]):
                e = home_net[i]
                if seen[e] != end:
                    seen[e], held[e] = end, 0
                for q in range(columns):
                    if held[e] > 0:
                        reads[q] -= read_s[q, e]
                    if held[e] < net_ptr[e + 1] - net_ptr[e]:
                        writes[q] += write_s[q, e]
            for i in range(user_ptr[v], user_ptr[v + 1]):
                e = user_net[i]
                if seen[e] != end:
                    seen[e], held[e] = end, 0
                held[e] += 1
                at = place[net_home[e]]
                if begin <= at < end:
                    if held[e] == net_ptr[e + 1] - net_ptr[e]:
                        for q in range(columns):
                            writes[q] -= write_s[q, e]
                elif held[e] == 1:
                    for q in range(columns):
                        reads[q] += read_s[q, e]
            for t in range(types):
                if taken[t] > limit_s or size > room[t]:
                    continue
                q = column[t]
                if load == SUM:
                    cost = taken[t] + reads[q] + writes[q]
                elif load == MAX2:
                    cost = max(taken[t], reads[q] + writes[q])
                else:
                    cost = max(taken[t], max(reads[q], writes[q]))
                if cost > limit_s:
                    continue
                for i in range(step_ptr[t], step_ptr[t + 1]):
                    s = step[i]
                    value = max(best[begin, s], cost)
                    if value < best[end, s + stride[t]]:
                        best[end, s + stride[t]] = value
                        came_from[end, s + stride[t]] = begin
                        came_by[end, s + stride[t]] = t
        for t in range(types):  # a device may stay empty
            for i in range(step_ptr[t], step_ptr[t + 1]):
                s = step[i]
                if best[end, s] < best[end, s + stride[t]]:
                    best[end, s + stride[t]] = best[end, s]
                    came_from[end, s + stride[t]] = end
                    came_by[end, s + stride[t]] = t
    begins = np.empty(num + 1, np.int32)
    kinds = np.empty(num + 1, np.int8)
    count, end, s = 0, num, states - 1
    value = best[num, s]
    while end > 0 and value < np.inf:
        t, begin = came_by[end, s], came_from[end, s]
        if begin < end:
            begins[count], kinds[count] = begin, t
            count += 1
        s -= stride[t]
        end = begin
    return value, begins[:count].copy(), kinds[:count].copy()

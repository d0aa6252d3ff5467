"""The event loop, compiled: one plan run to the end.

One function on purpose: a compiled call that passes many arrays counts a reference for each of them,
which costs more than the work. The drawing of an instant is in `kernel.py`; the steps are numbered:

    1 an op ends: its engine is free, its inputs are let go, local consumers are fed, outputs are booked
    2 a transfer arrives: its source is let go, consumers there are fed (or: a write to host memory ends)
    3 an op is issued          4 a transfer starts: its copy takes memory, its arrival becomes an event
    5 ops whose last input came join their engine's queue          6 idle engines start their next op

Transfers that end on one resource (the last link of their route, or a device's port) run one after the
other in the order of their booking. They queue in a *lane*; only its first is in the heap, which so stays
as small as the cluster.
"""

from typing import Any

import numpy as np

from loadmaster.simulator.events.kernel import (
    EMPTY,
    HALF_DUPLEX,
    HOST,
    IN_ORDER,
    LOCAL,
    NO_HOLD,
    PARALLEL,
    SHARED,
    ProblemArrays,
    drop_first,
    group_by_engine,
    list_holds,
    list_moves,
    pop_ready,
    push,
    push_ready,
    sort_by_priority,
)
from loadmaster.simulator.jit import kernel


@kernel
def hop_s(fixed: ProblemArrays, t: int, device: int, write: bool) -> Any:
    """HOST: seconds between a device and host memory, over the route to the first host-side device."""
    if fixed.transfer_s[t] >= 0:
        return fixed.transfer_s[t]
    host = (device + 1) % len(fixed.kind)
    for d in range(len(fixed.kind)):
        if fixed.on_host[d]:
            host = d
            break
    source, target = (device, host) if write else (host, device)
    return fixed.latency_s[source, target] + fixed.tensor_bytes[t] / fixed.bytes_per_s[source, target]


@kernel
def held_bytes(hold: int, home_bytes: Any, tensor_bytes: Any, move_tensor: Any) -> Any:
    """Bytes of a hold: of a tensor at home, or of the copy a move makes."""
    if hold < len(home_bytes):
        return home_bytes[hold]
    return tensor_bytes[move_tensor[hold - len(home_bytes)]]


@kernel
def run_events(
    fixed: ProblemArrays, device: Any, priority: Any, dispatch: int, links: int, issue: bool
) -> Any:
    """Run a plan.

    Returns op_start, op_end, start_rank [N], peak [D], move_tensor, move_target [M], move_start, move_end
    [M + W] (W writes to host memory, by tensor, under HOST; end < 0 = none), and how many ops finished.
    """
    out_ptr, out_tensor, in_ptr = fixed.out_ptr, fixed.out_tensor, fixed.in_ptr
    use_ptr, use_op, tensor_op = fixed.use_ptr, fixed.use_op, fixed.tensor_op
    tensor_bytes, home_bytes, storage = fixed.tensor_bytes, fixed.home_bytes, fixed.storage
    transfer_s, workspace, issue_s, compute_s = (
        fixed.transfer_s,
        fixed.workspace,
        fixed.issue_s,
        fixed.compute_s,
    )
    kind, on_host, route = fixed.kind, fixed.on_host, fixed.route
    latency_s, bytes_per_s, num_engines = fixed.latency_s, fixed.bytes_per_s, fixed.num_engines
    num_ops, num_tensors, num_devices, hops = len(device), len(tensor_op), len(kind), route.shape[2]
    host, in_order = links == HOST, dispatch == IN_ORDER

    move_ptr, move_target, move_tensor, move_of_use = list_moves(fixed, device)
    num_moves = len(move_target)
    hold_of, hold_of_input, holders = list_holds(fixed, move_ptr, move_target, move_of_use, device, host)
    writes = num_tensors if host else 0
    arrivals_end = num_ops + num_moves + writes  # codes: ops, arrivals, issues, transfer starts
    issues_end = arrivals_end + num_ops
    num_lanes = fixed.num_links if links == SHARED else num_devices
    capacity = num_engines + num_lanes + num_moves + writes + (num_ops if issue else 0) + 1
    heap_time, heap_code, heap_size = np.empty(capacity), np.empty(capacity, dtype=np.int64), 0

    engine_of_op = np.empty(num_ops, dtype=np.int32)
    used = np.zeros(num_devices, dtype=np.int64)
    waiting = np.empty(num_ops, dtype=np.int32)
    for i in range(num_ops):
        engine_of_op[i] = fixed.engine[device[i]]
        used[device[i]] += fixed.resident[i]
        waiting[i] = in_ptr[i + 1] - in_ptr[i] + issue
    peak = used.copy()
    order = sort_by_priority(priority) if in_order else priority
    queue_ptr, queue = group_by_engine(order, engine_of_op, num_engines, in_order)
    queue_len = np.zeros(num_engines, dtype=np.int32)  # in order: how many were started
    first_come = not in_order and priority.min() == priority.max()  # then a queue serves, no heap is needed
    queue_head = np.zeros(num_engines, dtype=np.int32)
    busy = np.zeros(num_engines, dtype=np.bool_)
    dirty = np.ones(num_engines, dtype=np.bool_)  # engines to look at in step 6, and the list of them
    dirty_list, num_dirty = np.arange(num_engines).astype(np.int32), num_engines
    ready_s = np.zeros(num_ops)
    fed, num_fed = np.empty(num_ops, dtype=np.int32), 0
    to_book, num_to_book = np.empty(num_tensors + 1, dtype=np.int32), 0
    pending, num_pending = np.empty(num_moves + writes + 1, dtype=np.int32), 0
    free_s = np.zeros(num_lanes)
    lane_last = np.full(num_lanes, EMPTY, dtype=np.int32)
    lane_of = np.empty(num_moves + writes, dtype=np.int32)
    next_in_lane = np.full(num_moves + writes, EMPTY, dtype=np.int32)
    op_start, op_end, start_rank = np.zeros(num_ops), np.zeros(num_ops), np.zeros(num_ops, dtype=np.int32)
    move_start, move_end = np.zeros(num_moves + writes), np.full(num_moves + writes, -1.0)
    num_started, num_done, num_issued, now = 0, 0, 0, 0.0
    issuing, clock = issue, 0.0

    for i in range(num_ops):
        if waiting[i] == 0:
            fed[num_fed] = i
            num_fed += 1

    while True:
        while True:
            while issuing and num_issued < num_ops:  # the host thread issues until it must run an op itself
                i = order[num_issued]
                num_issued += 1
                clock += issue_s[i]
                push(heap_time, heap_code, heap_size, clock, arrivals_end + i)
                heap_size += 1
                issuing = not (on_host[device[i]] and compute_s[i, kind[device[i]]] > 0)
            if heap_size == 0 or heap_time[0] != now:
                break
            code = heap_code[0]
            drop_first(heap_time, heap_code, heap_size)
            heap_size -= 1
            after = EMPTY  # who follows in the lane that is free now
            if code < num_ops:  # 1
                here, e = device[code], engine_of_op[code]
                busy[e] = False
                num_done += 1
                if not dirty[e]:
                    dirty[e] = True
                    dirty_list[num_dirty] = e
                    num_dirty += 1
                used[here] -= workspace[code]
                for at in range(in_ptr[code], in_ptr[code + 1]):
                    hold = hold_of_input[at]
                    if hold != NO_HOLD:
                        holders[hold] -= 1
                        if holders[hold] == 0:
                            used[here] -= held_bytes(hold, home_bytes, tensor_bytes, move_tensor)
                for at in range(out_ptr[code], out_ptr[code + 1]):
                    t = out_tensor[at]
                    for use in range(use_ptr[t], use_ptr[t + 1]):
                        if move_of_use[use] == LOCAL:
                            waiting[use_op[use]] -= 1
                            if waiting[use_op[use]] == 0:
                                fed[num_fed] = use_op[use]
                                num_fed += 1
                    if move_ptr[t + 1] > move_ptr[t]:
                        if host and not on_host[here]:
                            begin = max(now, free_s[here])
                            end = begin + hop_s(fixed, t, here, True)
                            free_s[here] = end
                            w = num_moves + t
                            move_start[w] = begin
                            move_end[w] = end
                            lane_of[w] = here
                            if begin == now:
                                pending[num_pending] = w
                                num_pending += 1
                            else:
                                next_in_lane[lane_last[here]] = w
                            lane_last[here] = w
                        else:
                            to_book[num_to_book] = t
                            num_to_book += 1
                    hold = hold_of[t]
                    if hold != NO_HOLD:
                        holders[hold] -= 1
                        if holders[hold] == 0:
                            used[here] -= held_bytes(hold, home_bytes, tensor_bytes, move_tensor)
                if issue and on_host[here] and compute_s[code, kind[here]] > 0:
                    issuing, clock = True, now
            elif code < arrivals_end:  # 2
                m = code - num_ops
                if lane_of[m] != EMPTY:
                    after = next_in_lane[m]
                    if lane_last[lane_of[m]] == m:
                        lane_last[lane_of[m]] = EMPTY
                written = m >= num_moves
                t = m - num_moves if written else move_tensor[m]
                source = device[tensor_op[t]]
                hold = hold_of[t]
                if hold != NO_HOLD and (written or not host or on_host[source]):
                    holders[hold] -= 1
                    if holders[hold] == 0:
                        used[source] -= held_bytes(hold, home_bytes, tensor_bytes, move_tensor)
                if written:
                    to_book[num_to_book] = t
                    num_to_book += 1
                else:
                    for use in range(use_ptr[t], use_ptr[t + 1]):
                        if move_of_use[use] == m:
                            waiting[use_op[use]] -= 1
                            if waiting[use_op[use]] == 0:
                                fed[num_fed] = use_op[use]
                                num_fed += 1
            elif code < issues_end:  # 3
                i = code - arrivals_end
                waiting[i] -= 1
                if waiting[i] == 0:
                    fed[num_fed] = i
                    num_fed += 1
            else:
                m = code - issues_end
                pending[num_pending] = m
                num_pending += 1
                if lane_of[m] != EMPTY and move_end[m] == now:  # it takes no time: nor does who comes after
                    after = next_in_lane[m]
                    next_in_lane[m] = EMPTY

            while after != EMPTY:  # what takes no time lets the next one start at the same instant
                if move_start[after] > now:
                    push(heap_time, heap_code, heap_size, move_start[after], issues_end + after)
                    heap_size += 1
                    break
                pending[num_pending] = after
                num_pending += 1
                if move_end[after] > now:
                    break
                follower = next_in_lane[after]
                next_in_lane[after] = EMPTY
                after = follower

            for b in range(num_to_book):  # when each move runs: after all it shares a resource with
                t = to_book[b]
                source = device[tensor_op[t]]
                for m in range(move_ptr[t], move_ptr[t + 1]):
                    target = move_target[m]
                    begin, lane = now, target
                    if links == SHARED:
                        for hop in range(hops):
                            link = route[source, target, hop]
                            if link >= 0:
                                begin, lane = max(begin, free_s[link]), link
                    elif links == HALF_DUPLEX:
                        begin = max(begin, free_s[source], free_s[target])
                    elif host and not on_host[target]:
                        begin = max(begin, free_s[target])
                    end = begin
                    if host:
                        if not on_host[target]:
                            end = begin + hop_s(fixed, t, target, False)
                            free_s[target] = end
                    elif transfer_s[t] >= 0:
                        end = begin + transfer_s[t]
                    else:
                        end = begin + (
                            latency_s[source, target] + tensor_bytes[t] / bytes_per_s[source, target]
                        )
                    if links == SHARED:
                        for hop in range(hops):
                            link = route[source, target, hop]
                            if link >= 0:
                                free_s[link] = end
                    elif links == HALF_DUPLEX:
                        free_s[source] = end
                        free_s[target] = end
                    move_start[m] = begin
                    move_end[m] = end
                    if links == PARALLEL or (host and on_host[target]):
                        lane = EMPTY  # nothing to queue for
                    lane_of[m] = lane
                    if begin == now:
                        pending[num_pending] = m
                        num_pending += 1
                    elif lane != EMPTY and lane_last[lane] != EMPTY:
                        next_in_lane[lane_last[lane]] = m
                    else:
                        push(heap_time, heap_code, heap_size, begin, issues_end + m)
                        heap_size += 1
                    if lane != EMPTY:
                        lane_last[lane] = m
            num_to_book = 0

        for p in range(num_pending):  # 4
            m = pending[p]
            push(heap_time, heap_code, heap_size, move_end[m], num_ops + m)
            heap_size += 1
            if m >= num_moves:  # a write to host memory takes no memory of a device
                continue
            t = move_tensor[m]
            if storage[t] >= 0:
                used[move_target[m]] += tensor_bytes[t]
                peak[move_target[m]] = max(peak[move_target[m]], used[move_target[m]])
        num_pending = 0

        for f in range(num_fed):  # 5
            i = fed[f]
            e = engine_of_op[i]
            ready_s[i] = now
            if first_come:
                at, head = queue_ptr[e] + queue_len[e], queue_ptr[e] + queue_head[e]
                while at > head and queue[at - 1] > i and ready_s[queue[at - 1]] == now:
                    queue[at] = queue[at - 1]
                    at -= 1
                queue[at] = i
                queue_len[e] += 1
            elif not in_order:
                push_ready(queue, queue_ptr[e], queue_len[e], priority, ready_s, i)
                queue_len[e] += 1
            if not dirty[e]:
                dirty[e] = True
                dirty_list[num_dirty] = e
                num_dirty += 1
        num_fed = 0

        for at in range(num_dirty):  # 6
            e = dirty_list[at]
            dirty[e] = False
            if busy[e]:
                continue
            if in_order:
                position = queue_ptr[e] + queue_len[e]
                if position == queue_ptr[e + 1] or waiting[queue[position]] > 0:
                    continue
                i = queue[position]
                queue_len[e] += 1
            elif first_come:
                if queue_head[e] == queue_len[e]:
                    continue
                i = queue[queue_ptr[e] + queue_head[e]]
                queue_head[e] += 1
            else:
                if queue_len[e] == 0:
                    continue
                i = pop_ready(queue, queue_ptr[e], queue_len[e], priority, ready_s)
                queue_len[e] -= 1
            here = device[i]
            busy[e] = True
            start_rank[i] = num_started
            num_started += 1
            op_start[i] = now
            op_end[i] = now + compute_s[i, kind[here]]
            taken = workspace[i]
            for out in range(out_ptr[i], out_ptr[i + 1]):
                t = out_tensor[out]
                if hold_of[t] == t:
                    taken += home_bytes[t]
            used[here] += taken
            peak[here] = max(peak[here], used[here])
            push(heap_time, heap_code, heap_size, op_end[i], i)
            heap_size += 1
        num_dirty = 0
        if heap_size == 0:
            break
        now = heap_time[0]

    return op_start, op_end, start_rank, peak, move_tensor, move_target, move_start, move_end, num_done

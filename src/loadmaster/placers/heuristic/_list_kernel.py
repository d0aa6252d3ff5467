"""List scheduling, compiled: one pass through simulated time in which every decision places an op.

    on op ready:     for each device it may use: push (when its inputs would be there, op) to waiting[d]
    idle device d:   what has arrived moves from waiting[d] to runnable[d], best key first
                     a first whose inputs would now come later (links got busy) goes back to waiting[d]
    choose:          over the idle devices the best key; for one op the least finish, then the least arrival
    commit:          send the inputs that are not there yet, start the op, fix its unit's device

A device whose last op has a favourite child may stay idle for it (the awake rules of m-SCT). Memory is what
a unit holds when the forward pass is over, plus copies of such tensors sent to it: it only grows while
placing, so a device that shuts an op out does so for good. One function on purpose, and what a transfer
takes is written out at each place: calls that pass many arrays cost more than the work. O((ops + uses) x
devices x log ops), at any width of the graph.
"""

from typing import Any, NamedTuple

import numpy as np

from loadmaster.placers._heaps import heap_drop, heap_push
from loadmaster.simulator.events.kernel import HALF_DUPLEX, HOST, SHARED, ProblemArrays
from loadmaster.simulator.jit import kernel

NOWHERE = -1
NEVER, PUBLISHED, WAITING = 0, 1, 2  # when a device is awake for the favourite child of its last op


class Rules(NamedTuple):
    """What a pass decides by."""

    unit: Any  # [N] unit of each op
    allowed: Any  # [U, D]
    footprint: Any  # [U] bytes a unit holds
    standing: Any  # [T] copies of this tensor are held too
    room: Any  # [D] bytes
    key: Any  # [N] lower first
    favourite: Any  # [N] the consumer an op would like to keep on its device, or NOWHERE
    patience_s: Any  # [N] how long its device waits for it: the transfer it saves
    awake: int  # NEVER, PUBLISHED or WAITING
    first_come: bool  # ops that became ready earlier come first, whatever their key
    links: int


@kernel
def upward_rank(fixed: ProblemArrays, mean_s: Any, transfer_s: Any) -> Any:
    """[N] mean time of an op plus the longest way from it to an end, transfers included."""
    num_ops = len(mean_s)
    rank = np.zeros(num_ops)
    for i in range(num_ops - 1, -1, -1):
        longest = 0.0
        for out in range(fixed.out_ptr[i], fixed.out_ptr[i + 1]):
            t = fixed.out_tensor[out]
            for use in range(fixed.use_ptr[t], fixed.use_ptr[t + 1]):
                longest = max(longest, transfer_s[t] + rank[fixed.use_op[use]])
        rank[i] = mean_s[i] + longest
    return rank


@kernel
def downward_rank(fixed: ProblemArrays, mean_s: Any, transfer_s: Any) -> Any:
    """[N] the longest way from a start to an op, transfers included, the op itself left out."""
    num_ops = len(mean_s)
    rank = np.zeros(num_ops)
    for i in range(num_ops):
        for out in range(fixed.out_ptr[i], fixed.out_ptr[i + 1]):
            t = fixed.out_tensor[out]
            for use in range(fixed.use_ptr[t], fixed.use_ptr[t + 1]):
                later = rank[i] + mean_s[i] + transfer_s[t]
                rank[fixed.use_op[use]] = max(rank[fixed.use_op[use]], later)
    return rank


@kernel
def construct_plan(fixed: ProblemArrays, rules: Rules) -> Any:
    """Place every op; returns device [N], position [N] in the order of starts, when the last op ends, and the
    bytes [D] that were counted on each device.

    What memory shuts out everywhere goes where most room is left.
    """
    unit, allowed, footprint, standing = rules.unit, rules.allowed, rules.footprint, rules.standing
    room, key, links, favourite = rules.room, rules.key.copy(), rules.links, rules.favourite
    in_ptr, in_use, use_tensor, tensor_op = fixed.in_ptr, fixed.in_use, fixed.use_tensor, fixed.tensor_op
    out_ptr, out_tensor, use_ptr, use_op = fixed.out_ptr, fixed.out_tensor, fixed.use_ptr, fixed.use_op
    compute_s, kind, engine, tensor_bytes = fixed.compute_s, fixed.kind, fixed.engine, fixed.tensor_bytes
    transfer_s, latency_s, bytes_per_s, route = (
        fixed.transfer_s,
        fixed.latency_s,
        fixed.bytes_per_s,
        fixed.route,
    )
    hops, ports = route.shape[2], links in (HALF_DUPLEX, HOST)
    num_ops, num_devices, num_engines = len(unit), len(kind), fixed.num_engines
    device = np.full(num_ops, NOWHERE, dtype=np.int32)
    position = np.empty(num_ops, dtype=np.int32)
    unit_device = np.full(len(footprint), NOWHERE, dtype=np.int32)
    used = np.zeros(num_devices)
    made_s = np.zeros(len(tensor_op))
    arrival = np.full((len(tensor_op), num_devices), np.inf)
    free_s = np.zeros(max(fixed.num_links, num_devices))
    busy = np.zeros(num_engines, dtype=np.bool_)
    awake_s = np.zeros(num_devices)  # a device waits for a favourite at most until then
    wake_s = np.full(num_devices, np.inf)  # when a device that waits looks again
    last = np.full(num_devices, NOWHERE, dtype=np.int32)
    missing = np.empty(num_ops, dtype=np.int32)
    wait_key = np.empty(num_devices * num_ops)
    wait_op = np.empty(num_devices * num_ops, dtype=np.int32)
    wait_len = np.zeros(num_devices, dtype=np.int64)
    run_key = np.empty(num_devices * num_ops)
    run_op = np.empty(num_devices * num_ops, dtype=np.int32)
    run_len = np.zeros(num_devices, dtype=np.int64)
    urgent_len = 0  # an op that memory shut out becomes ready twice
    urgent_key, urgent_op = np.empty(2 * num_ops), np.empty(2 * num_ops, dtype=np.int32)
    end_time, end_op, num_running = np.empty(num_engines), np.empty(num_engines, dtype=np.int32), 0
    fresh, num_fresh = np.empty(num_ops, dtype=np.int32), 0
    estimate = np.empty(num_devices)
    num_placed, num_ready, now, over_s = 0, 0, 0.0, 0.0
    for i in range(num_ops):
        missing[i] = in_ptr[i + 1] - in_ptr[i]
        if missing[i] == 0:
            fresh[num_fresh] = i
            num_fresh += 1

    while num_placed < num_ops:
        for f in range(num_fresh):  # an op became ready: when could it start on each device?
            o = fresh[f]
            if rules.first_come:
                key[o] = num_ready
            num_ready += 1
            fixed_to = unit_device[unit[o]]
            for d in range(num_devices):
                estimate[d] = now
            for read in range(in_ptr[o], in_ptr[o + 1]):
                t = use_tensor[in_use[read]]
                s = device[tensor_op[t]]
                for d in range(num_devices):
                    there = arrival[t, d]
                    if there == np.inf:
                        there = made_s[t]
                        if links == SHARED:
                            for hop in range(hops):
                                link = route[s, d, hop]
                                if link >= 0:
                                    there = max(there, free_s[link])
                        elif ports:
                            there = max(there, free_s[s], free_s[d])
                        if transfer_s[t] >= 0:
                            there += transfer_s[t]
                        else:
                            there += latency_s[s, d] + tensor_bytes[t] / bytes_per_s[s, d]
                    estimate[d] = max(estimate[d], there)
            latest = now
            for d in range(num_devices):
                if not allowed[unit[o], d] or (fixed_to != NOWHERE and fixed_to != d):
                    continue
                latest = max(latest, estimate[d])
                if estimate[d] <= now:
                    heap_push(run_key, run_op, d * num_ops, run_len[d], key[o], o)
                    run_len[d] += 1
                else:
                    heap_push(wait_key, wait_op, d * num_ops, wait_len[d], estimate[d], o)
                    wait_len[d] += 1
            if rules.awake == PUBLISHED:
                heap_push(urgent_key, urgent_op, 0, urgent_len, latest, o)
                urgent_len += 1
        num_fresh = 0

        best_op, best_d, best_finish, best_at = NOWHERE, NOWHERE, np.inf, np.inf
        for d in range(num_devices):
            if busy[engine[d]]:
                continue
            while wait_len[d] > 0 and wait_key[d * num_ops] <= now:
                o = wait_op[d * num_ops]
                heap_drop(wait_key, wait_op, d * num_ops, wait_len[d])
                wait_len[d] -= 1
                if device[o] == NOWHERE and (unit_device[unit[o]] == NOWHERE or unit_device[unit[o]] == d):
                    heap_push(run_key, run_op, d * num_ops, run_len[d], key[o], o)
                    run_len[d] += 1
            wake_s[d] = np.inf
            first = NOWHERE  # an op that comes before every runnable one
            if rules.awake != NEVER and last[d] != NOWHERE:
                f = favourite[last[d]]
                if f != NOWHERE and (
                    device[f] != NOWHERE
                    or not allowed[unit[f], d]
                    or (unit_device[unit[f]] != NOWHERE and unit_device[unit[f]] != d)
                    or (unit_device[unit[f]] == NOWHERE and used[d] + footprint[unit[f]] > room[d])
                ):
                    f = NOWHERE
                if f != NOWHERE:
                    here, elsewhere = np.inf, np.inf  # when it could start on d, and at best on another
                    if missing[f] == 0:
                        for other in range(num_devices):
                            at = now
                            for read in range(in_ptr[f], in_ptr[f + 1]):
                                t = use_tensor[in_use[read]]
                                there = arrival[t, other]
                                if there == np.inf:
                                    s = device[tensor_op[t]]
                                    there = made_s[t]
                                    if links == SHARED:
                                        for hop in range(hops):
                                            link = route[s, other, hop]
                                            if link >= 0:
                                                there = max(there, free_s[link])
                                    elif ports:
                                        there = max(there, free_s[s], free_s[other])
                                    if transfer_s[t] >= 0:
                                        there += transfer_s[t]
                                    else:
                                        there += latency_s[s, other] + tensor_bytes[t] / bytes_per_s[s, other]
                                at = max(at, there)
                            if other == d:
                                here = at
                            elif allowed[unit[f], other]:
                                elsewhere = min(elsewhere, at)
                    if rules.awake == WAITING:
                        if here <= now:
                            first = f
                        elif now < awake_s[d] and (num_running > 0 or here < np.inf):
                            wake_s[d] = min(here, awake_s[d])
                            continue
                    elif missing[f] == 0 and here <= elsewhere:
                        while urgent_len > 0 and device[urgent_op[0]] != NOWHERE:
                            heap_drop(urgent_key, urgent_op, 0, urgent_len)
                            urgent_len -= 1
                        u = urgent_op[0] if urgent_len > 0 else NOWHERE
                        if u != NOWHERE and urgent_key[0] <= now and u != f:
                            first = NOWHERE  # an op that could start anywhere goes first, by its key
                        elif here <= now:
                            first = f
                        else:
                            wake_s[d] = min(here, urgent_key[0]) if u != NOWHERE else here
                            if wake_s[d] > now:
                                continue
            while run_len[d] > 0 or first != NOWHERE:
                o = first if first != NOWHERE else run_op[d * num_ops]
                if device[o] != NOWHERE or (unit_device[unit[o]] != NOWHERE and unit_device[unit[o]] != d):
                    heap_drop(run_key, run_op, d * num_ops, run_len[d])
                    run_len[d] -= 1
                    continue
                at, more = 0.0, 0.0
                for read in range(in_ptr[o], in_ptr[o + 1]):
                    t = use_tensor[in_use[read]]
                    there = arrival[t, d]
                    if there == np.inf:
                        s = device[tensor_op[t]]
                        there = made_s[t]
                        if links == SHARED:
                            for hop in range(hops):
                                link = route[s, d, hop]
                                if link >= 0:
                                    there = max(there, free_s[link])
                        elif ports:
                            there = max(there, free_s[s], free_s[d])
                        if transfer_s[t] >= 0:
                            there += transfer_s[t]
                        else:
                            there += latency_s[s, d] + tensor_bytes[t] / bytes_per_s[s, d]
                        if standing[t]:
                            more += tensor_bytes[t]
                    at = max(at, there)
                if at > now and first == NOWHERE:  # its inputs would come later than promised
                    heap_drop(run_key, run_op, d * num_ops, run_len[d])
                    run_len[d] -= 1
                    heap_push(wait_key, wait_op, d * num_ops, wait_len[d], at, o)
                    wait_len[d] += 1
                    continue
                if unit_device[unit[o]] == NOWHERE and used[d] + footprint[unit[o]] + more > room[d]:
                    roomiest = d
                    for other in range(num_devices):
                        if (
                            allowed[unit[o], other]
                            and room[other] - used[other] > room[roomiest] - used[roomiest]
                        ):
                            roomiest = other
                    fits = used[roomiest] + footprint[unit[o]] <= room[roomiest]
                    if roomiest != d or fits:  # memory only grows: never here
                        if first == NOWHERE:
                            heap_drop(run_key, run_op, d * num_ops, run_len[d])
                            run_len[d] -= 1
                        first = NOWHERE
                        continue
                finish = now + compute_s[o, kind[d]]
                if (
                    best_op == NOWHERE
                    or (o != best_op and (key[o] < key[best_op] or (key[o] == key[best_op] and o < best_op)))
                    or (o == best_op and (finish < best_finish or (finish == best_finish and at < best_at)))
                ):
                    best_op, best_d, best_finish, best_at = o, d, finish, at
                break

        if best_op == NOWHERE:  # nothing can start: go to the next end, arrival or awakening
            after = np.inf
            for r in range(num_running):
                after = min(after, end_time[r])
            for d in range(num_devices):
                if not busy[engine[d]]:
                    if wait_len[d] > 0 and wait_key[d * num_ops] > now:
                        after = min(after, wait_key[d * num_ops])
                    if wake_s[d] > now:
                        after = min(after, wake_s[d])
            if after == np.inf:  # memory shut an op out of every device: its unit gets the roomiest
                for o in range(num_ops):
                    if device[o] == NOWHERE and missing[o] == 0:
                        fresh[0], num_fresh = o, 1
                        if unit_device[unit[o]] != NOWHERE:
                            break
                        roomiest = NOWHERE
                        for d in range(num_devices):
                            if allowed[unit[o], d] and (
                                roomiest == NOWHERE or room[d] - used[d] > room[roomiest] - used[roomiest]
                            ):
                                roomiest = d
                        unit_device[unit[o]] = roomiest
                        used[roomiest] += footprint[unit[o]]
                        break
                continue
            now = after
            r = 0
            while r < num_running:
                if end_time[r] > now:
                    r += 1
                    continue
                o = end_op[r]
                num_running -= 1
                end_time[r], end_op[r] = end_time[num_running], end_op[num_running]
                busy[engine[device[o]]] = False
                for out in range(out_ptr[o], out_ptr[o + 1]):
                    t = out_tensor[out]
                    for use in range(use_ptr[t], use_ptr[t + 1]):
                        missing[use_op[use]] -= 1
                        if missing[use_op[use]] == 0:
                            fresh[num_fresh] = use_op[use]
                            num_fresh += 1
            continue

        o, d = best_op, best_d
        device[o] = d
        position[o] = num_placed
        num_placed += 1
        last[d] = o
        if unit_device[unit[o]] == NOWHERE:
            unit_device[unit[o]] = d
            used[d] += footprint[unit[o]]
        for read in range(in_ptr[o], in_ptr[o + 1]):
            t = use_tensor[in_use[read]]
            if arrival[t, d] == np.inf:
                s = device[tensor_op[t]]
                there = made_s[t]
                if links == SHARED:
                    for hop in range(hops):
                        link = route[s, d, hop]
                        if link >= 0:
                            there = max(there, free_s[link])
                elif ports:
                    there = max(there, free_s[s], free_s[d])
                if transfer_s[t] >= 0:
                    there += transfer_s[t]
                else:
                    there += latency_s[s, d] + tensor_bytes[t] / bytes_per_s[s, d]
                arrival[t, d] = there
                if links == SHARED:
                    for hop in range(hops):
                        link = route[s, d, hop]
                        if link >= 0:
                            free_s[link] = arrival[t, d]
                elif ports:
                    free_s[s] = arrival[t, d]
                    free_s[d] = arrival[t, d]
                if standing[t]:
                    used[d] += tensor_bytes[t]
        finish = now + compute_s[o, kind[d]]
        over_s = max(over_s, finish)
        busy[engine[d]] = True
        awake_s[d] = finish + rules.patience_s[o]
        for out in range(out_ptr[o], out_ptr[o + 1]):
            t = out_tensor[out]
            arrival[t, d] = finish
            made_s[t] = finish
        end_time[num_running], end_op[num_running] = finish, o
        num_running += 1
    return device, position, over_s, used

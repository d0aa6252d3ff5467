"""Insertion scheduling, compiled: ops in a given order, each into the idle gap where it ends first."""

from typing import Any

import numpy as np

from loadmaster.placers._heaps import heap_drop, heap_push
from loadmaster.placers.heuristic._list_kernel import NOWHERE, Rules
from loadmaster.simulator.events.kernel import ProblemArrays
from loadmaster.simulator.jit import kernel


@kernel
def ready_order(fixed: ProblemArrays, key: Any) -> Any:
    """[N] ops in topological order, the least key first among those whose producers are all out."""
    in_ptr, out_ptr, out_tensor = fixed.in_ptr, fixed.out_ptr, fixed.out_tensor
    use_ptr, use_op = fixed.use_ptr, fixed.use_op
    num_ops = len(key)
    order = np.empty(num_ops, dtype=np.int32)
    missing = np.empty(num_ops, dtype=np.int32)
    keys, ops, size = np.empty(num_ops), np.empty(num_ops, dtype=np.int32), 0
    for i in range(num_ops):
        missing[i] = in_ptr[i + 1] - in_ptr[i]
        if missing[i] == 0:
            heap_push(keys, ops, 0, size, key[i], i)
            size += 1
    for at in range(num_ops):
        o = ops[0]
        heap_drop(keys, ops, 0, size)
        size -= 1
        order[at] = o
        for out in range(out_ptr[o], out_ptr[o + 1]):
            t = out_tensor[out]
            for use in range(use_ptr[t], use_ptr[t + 1]):
                missing[use_op[use]] -= 1
                if missing[use_op[use]] == 0:
                    heap_push(keys, ops, 0, size, key[use_op[use]], use_op[use])
                    size += 1
    return order


@kernel
def insert_ops(fixed: ProblemArrays, rules: Rules, order: Any, wanted: Any) -> Any:
    """Place ops in `order`, a topological one; `wanted` [N] names a device to take if allowed, or NOWHERE.

    Transfers are free of contention. A device without room is taken only if none has, the least overfull
    first. Gaps that end before an op's inputs are there are skipped by bisection. Returns device and start
    [N].
    """
    unit, allowed, footprint, standing = rules.unit, rules.allowed, rules.footprint, rules.standing
    in_ptr, in_use, use_tensor, tensor_op = fixed.in_ptr, fixed.in_use, fixed.use_tensor, fixed.tensor_op
    compute_s, kind, engine, tensor_bytes = fixed.compute_s, fixed.kind, fixed.engine, fixed.tensor_bytes
    transfer_s, latency_s, bytes_per_s = fixed.transfer_s, fixed.latency_s, fixed.bytes_per_s
    num_ops, num_devices, num_engines = len(order), len(kind), fixed.num_engines
    device = np.full(num_ops, NOWHERE, dtype=np.int32)
    unit_device = np.full(len(footprint), NOWHERE, dtype=np.int32)
    used, room = np.zeros(num_devices), rules.room
    start, end = np.zeros(num_ops), np.zeros(num_ops)
    sent = np.zeros((len(tensor_op), num_devices), dtype=np.bool_)
    slot_start, slot_end = np.empty((num_engines, num_ops)), np.empty((num_engines, num_ops))
    slots = np.zeros(num_engines, dtype=np.int64)
    for at in range(num_ops):
        o = order[at]
        u = unit[o]
        hint = wanted[o] if unit_device[u] == NOWHERE else unit_device[u]
        if hint != NOWHERE and not allowed[u, hint]:
            hint = NOWHERE
        best, best_finish, best_begin, best_slot, best_over = NOWHERE, np.inf, 0.0, 0, np.inf
        full = False
        for turn in range(num_devices + 1):
            if turn == 0:  # the device asked for comes first; if it has room no other is looked at
                if hint == NOWHERE:
                    continue
                d = hint
            else:
                d = turn - 1
                if hint != NOWHERE and (d == hint or not full or unit_device[u] != NOWHERE):
                    continue
            if not allowed[u, d]:
                continue
            ready, more = 0.0, 0.0
            for read in range(in_ptr[o], in_ptr[o + 1]):
                t = use_tensor[in_use[read]]
                s = device[tensor_op[t]]
                there = end[tensor_op[t]]
                if s != d:
                    if transfer_s[t] >= 0:
                        there += transfer_s[t]
                    else:
                        there += latency_s[s, d] + tensor_bytes[t] / bytes_per_s[s, d]
                    if standing[t] and not sent[t, d]:
                        more += tensor_bytes[t]
                ready = max(ready, there)
            over = 0.0
            if unit_device[u] == NOWHERE:
                over = max(0.0, used[d] + footprint[u] + more - room[d])
            e = engine[d]
            seconds = compute_s[o, kind[d]]
            low, high = 0, slots[e]
            while low < high:
                middle = (low + high) >> 1
                if slot_end[e, middle] <= ready:
                    low = middle + 1
                else:
                    high = middle
            begin = ready
            while low < slots[e] and begin + seconds > slot_start[e, low]:
                begin = max(begin, slot_end[e, low])
                low += 1
            if turn == 0:
                full = over > 0.0
            if over < best_over or (over == best_over and begin + seconds < best_finish):
                best, best_finish, best_begin, best_slot, best_over = d, begin + seconds, begin, low, over
        d, e = best, engine[best]
        device[o], start[o], end[o] = d, best_begin, best_finish
        if unit_device[u] == NOWHERE:
            unit_device[u] = d
            used[d] += footprint[u]
        for read in range(in_ptr[o], in_ptr[o + 1]):
            t = use_tensor[in_use[read]]
            if device[tensor_op[t]] != d and not sent[t, d]:
                sent[t, d] = True
                if standing[t]:
                    used[d] += tensor_bytes[t]
        if best_finish > best_begin:
            for k in range(slots[e], best_slot, -1):
                slot_start[e, k] = slot_start[e, k - 1]
                slot_end[e, k] = slot_end[e, k - 1]
            slot_start[e, best_slot] = best_begin
            slot_end[e, best_slot] = best_finish
            slots[e] += 1
    return device, start

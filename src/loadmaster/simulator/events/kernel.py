"""What the event loop stands on, compiled: moves, holds, heaps and sequences.

At one instant: ends, frees, arrivals, then starts. Events are kept in one binary heap of
(time, code); codes order the events of an instant:

    op end < arrival of a transfer < issue of an op < start of a transfer        then: starts of ops

A *move* is one tensor sent to one device. A *hold* is one storage on one device: it is taken when its
producer (or its move) starts and given back when its last holder lets go. Holders are the producer,
every use on that device, every outgoing move until its end; a `keep` tensor stays to the end of the step.
"""

from typing import Any, NamedTuple

import numpy as np

from loadmaster.simulator.jit import kernel

READY, IN_ORDER = 0, 1
SHARED, PARALLEL, HALF_DUPLEX, HOST = 0, 1, 2, 3
LOCAL = -1  # a use on its tensor's own device
NO_HOLD = -1
EMPTY = -1  # a lane without transfers, a transfer without a follower


class ProblemArrays(NamedTuple):
    """What a problem fixes, as arrays (see `engine.prepare`)."""

    out_ptr: Any  # [N + 1] into out_tensor
    out_tensor: Any  # [T] tensors by producer
    use_ptr: Any  # [T + 1] into use_op
    use_op: Any  # [U] consumers by tensor, in op order
    use_tensor: Any  # [U]
    in_ptr: Any  # [N + 1] into in_use
    in_use: Any  # [U] positions in use_op of each op's inputs
    tensor_op: Any  # [T]
    tensor_bytes: Any  # [T]
    home_bytes: Any  # [T] bytes taken where it is made (0: resident, or a view)
    storage: Any  # [T]
    keep: Any  # [T]
    transfer_s: Any  # [T] given, or negative
    resident: Any  # [N]
    workspace: Any  # [N]
    issue_s: Any  # [N]
    compute_s: Any  # [N, K]
    kind: Any  # [D]
    engine: Any  # [D] dense
    on_host: Any  # [D]
    route: Any  # [D, D, H]
    latency_s: Any  # [D, D]
    bytes_per_s: Any  # [D, D]
    num_engines: int
    num_links: int


@kernel
def list_moves(fixed: ProblemArrays, device: Any) -> Any:
    """One move per (tensor, other device that uses it), in order of the first consumer.

    Returns ptr [T + 1] into the moves of each tensor, target [M], tensor [M], and of_use [U]: the move
    that serves a use, or LOCAL.
    """
    tensor_op, use_ptr, use_op = fixed.tensor_op, fixed.use_ptr, fixed.use_op
    num_tensors, num_devices = len(tensor_op), len(fixed.kind)
    ptr = np.empty(num_tensors + 1, dtype=np.int32)
    target = np.empty(len(use_op), dtype=np.int32)
    tensor = np.empty(len(use_op), dtype=np.int32)
    of_use = np.empty(len(use_op), dtype=np.int32)
    stamp = np.full(num_devices, -1, dtype=np.int32)
    slot = np.empty(num_devices, dtype=np.int32)
    count = 0
    for t in range(num_tensors):
        ptr[t] = count
        home = device[tensor_op[t]]
        for use in range(use_ptr[t], use_ptr[t + 1]):
            there = device[use_op[use]]
            if there == home:
                of_use[use] = LOCAL
                continue
            if stamp[there] != t:
                stamp[there] = t
                slot[there] = count
                target[count] = there
                tensor[count] = t
                count += 1
            of_use[use] = slot[there]
    ptr[num_tensors] = count
    return ptr, target[:count].copy(), tensor[:count].copy(), of_use


@kernel
def list_holds(
    fixed: ProblemArrays, move_ptr: Any, move_target: Any, move_of_use: Any, device: Any, host: bool
) -> Any:
    """Count the holders of every storage on every device it reaches.

    Hold t is tensor t at home, hold T + m the copy made by move m. Returns of_tensor [T] (a view shares
    the hold of its base), of_input [U] (by position in in_use) and holders [T + M].
    """
    out_ptr, out_tensor, in_ptr, in_use = fixed.out_ptr, fixed.out_tensor, fixed.in_ptr, fixed.in_use
    use_ptr, use_tensor, storage, keep = fixed.use_ptr, fixed.use_tensor, fixed.storage, fixed.keep
    on_host = fixed.on_host
    num_tensors = len(storage)
    of_tensor = np.full(num_tensors, NO_HOLD, dtype=np.int32)
    holders = np.zeros(num_tensors + len(move_target), dtype=np.int32)
    for i in range(len(out_ptr) - 1):
        for at in range(out_ptr[i], out_ptr[i + 1]):
            t = out_tensor[at]
            base = storage[t]
            if base < 0:
                continue
            mine = t
            if base != t:  # a view: it lives where its op's input of the same storage lives
                for read in range(in_ptr[i], in_ptr[i + 1]):
                    use = in_use[read]
                    if storage[use_tensor[use]] == base:
                        move = move_of_use[use]
                        mine = of_tensor[use_tensor[use]] if move == LOCAL else num_tensors + move
                        break
                else:
                    for other in range(out_ptr[i], out_ptr[i + 1]):
                        if out_tensor[other] == base:
                            mine = base
            of_tensor[t] = mine
            first, last = move_ptr[t], move_ptr[t + 1]
            outgoing = last - first
            if host and outgoing > 0 and not on_host[device[i]]:
                outgoing = 1  # one write to host memory serves all
            holders[mine] += 1 + keep[t] + outgoing
            for m in range(first, last):
                holders[num_tensors + m] += keep[t]
            for use in range(use_ptr[t], use_ptr[t + 1]):
                move = move_of_use[use]
                holders[mine if move == LOCAL else num_tensors + move] += 1
    of_input = np.empty(len(in_use), dtype=np.int32)
    for at in range(len(in_use)):
        use = in_use[at]
        hold = of_tensor[use_tensor[use]]
        if hold != NO_HOLD and move_of_use[use] != LOCAL:
            hold = num_tensors + move_of_use[use]
        of_input[at] = hold
    return of_tensor, of_input, holders


@kernel
def push(heap_time: Any, heap_code: Any, size: int, time: float, code: int) -> None:
    """Add an event to a heap of `size` events."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        above = heap_time[parent]
        if above < time or (above == time and heap_code[parent] <= code):
            break
        heap_time[at] = above
        heap_code[at] = heap_code[parent]
        at = parent
    heap_time[at] = time
    heap_code[at] = code


@kernel
def drop_first(heap_time: Any, heap_code: Any, size: int) -> None:
    """Remove the earliest of `size` events."""
    size -= 1
    time, code = heap_time[size], heap_code[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap_time[right] < heap_time[child]
            or (heap_time[right] == heap_time[child] and heap_code[right] < heap_code[child])
        ):
            child = right
        below = heap_time[child]
        if time < below or (time == below and code <= heap_code[child]):
            break
        heap_time[at] = below
        heap_code[at] = heap_code[child]
        at = child
    heap_time[at] = time
    heap_code[at] = code


@kernel
def comes_before(priority: Any, ready_s: Any, a: int, b: int) -> Any:
    """READY order of two ops: lower priority, earlier ready, lower index."""
    if priority[a] != priority[b]:
        return priority[a] < priority[b]
    if ready_s[a] != ready_s[b]:
        return ready_s[a] < ready_s[b]
    return a < b


@kernel
def push_ready(queue: Any, root: int, size: int, priority: Any, ready_s: Any, op: int) -> None:
    """Add an op to the heap of `size` ops at `root`."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if comes_before(priority, ready_s, queue[root + parent], op):
            break
        queue[root + at] = queue[root + parent]
        at = parent
    queue[root + at] = op


@kernel
def pop_ready(queue: Any, root: int, size: int, priority: Any, ready_s: Any) -> Any:
    """Take the first op of the heap of `size` ops at `root`."""
    size -= 1
    first = queue[root]
    op = queue[root + size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and comes_before(priority, ready_s, queue[root + child + 1], queue[root + child]):
            child += 1
        if comes_before(priority, ready_s, op, queue[root + child]):
            break
        queue[root + at] = queue[root + child]
        at = child
    queue[root + at] = op
    return first


@kernel
def sort_by_priority(priority: Any) -> Any:
    """Ops by (priority, index): by counting where priorities are dense, as ranks are."""
    num_ops, low, high = len(priority), priority.min(), priority.max()
    if high - low > 4 * num_ops:
        return np.argsort(priority, kind="mergesort").astype(np.int32)
    place = np.zeros(high - low + 2, dtype=np.int32)
    for i in range(num_ops):
        place[priority[i] - low + 1] += 1
    for p in range(1, len(place)):
        place[p] += place[p - 1]
    order = np.empty(num_ops, dtype=np.int32)
    for i in range(num_ops):
        order[place[priority[i] - low]] = i
        place[priority[i] - low] += 1
    return order


@kernel
def group_by_engine(order: Any, engine_of_op: Any, num_engines: int, fill: bool) -> Any:
    """Room for the ops of each engine, filled in that order if asked: ptr [E + 1] and queue [N]."""
    ptr = np.zeros(num_engines + 1, dtype=np.int32)
    for i in range(len(order)):
        ptr[engine_of_op[i] + 1] += 1
    for e in range(num_engines):
        ptr[e + 1] += ptr[e]
    filled = ptr[:-1].copy()
    queue = np.empty(len(order), dtype=np.int32)
    if not fill:
        return ptr, queue
    for at in range(len(order)):
        e = engine_of_op[order[at]]
        queue[filled[e]] = order[at]
        filled[e] += 1
    return ptr, queue

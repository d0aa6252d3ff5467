"""Orders and packings that memory-first placement begins with, compiled."""

from typing import Any

import numpy as np

from loadmaster.simulator.jit import kernel

_NOWHERE = -1


@kernel
def best_fit(unit_bytes: Any, order: Any, allowed: Any, room: Any) -> Any:
    """[U] each unit in turn to the fullest device that still has room for it, else to the emptiest."""
    device, free = np.empty(len(order), dtype=np.int32), room.copy()
    for u in order:
        choice, has_room = _NOWHERE, False
        for d in range(len(free)):
            if not allowed[u, d]:
                continue
            room_here = free[d] >= unit_bytes[u]
            if (
                choice == _NOWHERE
                or (room_here and not has_room)
                or (room_here and free[d] < free[choice])
                or (not room_here and not has_room and free[d] > free[choice])
            ):
                choice, has_room = d, room_here
        device[u] = choice
        free[choice] -= unit_bytes[u]
    return device


@kernel
def order_depth_first(ptr: Any, target: Any) -> Any:
    """[N] place of each op in the topological order that follows a branch to its end before the next one."""
    num_ops = len(ptr) - 1
    waiting = np.zeros(num_ops, dtype=np.int32)
    for at in range(len(target)):
        waiting[target[at]] += 1
    stack, height = np.empty(num_ops, dtype=np.int32), 0
    for op in range(num_ops - 1, -1, -1):
        if waiting[op] == 0:
            stack[height] = op
            height += 1
    place = np.empty(num_ops, dtype=np.int64)
    for turn in range(num_ops):
        height -= 1
        op = stack[height]
        place[op] = turn
        for at in range(ptr[op + 1] - 1, ptr[op] - 1, -1):
            waiting[target[at]] -= 1
            if waiting[target[at]] == 0:
                stack[height] = target[at]
                height += 1
    return place

"""The tree of all plans of a small problem, walked depth first, compiled.

A plan appends ops one at a time, each with its device. Without issue times only the sequence of each engine
matters, so an op may follow another only if it starts no sooner in the *free timeline*, where transfers never
wait for each other; of ops that start together the lower index comes first, unless it waited for the other.
Every set of engine sequences is then met once: take, again and again, the available op that starts first.

The free timeline is a relaxation of the simulator for the same sequences: starts are longest paths, and
waiting transfers or issue times only lengthen them. A branch is cut when its free timeline cannot end before
the best plan known:

    op v, placed        end(v) + tail(v, d)
    op v, to come       min over d of  max(now, free(d), arrivals at d, head(v, d)) + p(v, d) + tail(v, d)
    all engines         (sum of max(now, free) + what is left at its least) / number of engines

or when a device cannot hold what its units keep to the end of the step, or what stands there while the op
that was placed last runs: its inputs, outputs and workspace, and what ops before it on that device made or
read, and ops after it there read. Leaves are judged by the simulator.
"""

from typing import Any

import numpy as np

from loadmaster.simulator.events.kernel import ProblemArrays
from loadmaster.simulator.jit import kernel

DEPTH, NODES = 0, 1  # of the counters
PAUSE, LEAF, END = 0, 1, 2  # why a walk stopped


@kernel
def walk_tree(
    fixed: ProblemArrays,
    issue: bool,
    tables: Any,
    unit: Any,
    twin: Any,
    only: Any,
    held: Any,
    room: Any,
    walk: Any,
    enough_s: float,
    most_nodes: int,
) -> int:
    """Go on with a walk for at most so many nodes, to the next whole plan, or to the end of the tree.

    `tables`: op_s, head_s, tail_s [N, D] and move_s [T, D, D]. `twin` [D]: a like device that must be used
    before this one, or -1. `only` [N]: the one device that may run an op, or -1. `held` [U]: bytes of units
    at the end of the step, `room` [D].
    `walk`: counts [2], choice [N + 1], op_at [N], start, end [N], device [N], unit_device, unit_ops [U],
    free [E], free_before [N], filled [D], units_on [D]. Plans that take `enough_s` are not looked for.
    """
    op_s, _, _, move_s = tables
    counts, choice, op_at, start, end, device, unit_device, unit_ops, free, free_before, filled, units_on = (
        walk
    )
    num_ops, num_devices = op_s.shape
    in_ptr, in_use, use_tensor, tensor_op = fixed.in_ptr, fixed.in_use, fixed.use_tensor, fixed.tensor_op
    engine, num_engines = fixed.engine, fixed.num_engines
    last_node = counts[NODES] + most_nodes
    while counts[NODES] < last_node:
        k = counts[DEPTH]
        stepped = False
        if k < num_ops:
            now, last = (start[op_at[k - 1]], op_at[k - 1]) if k > 0 else (0.0, -1)
            while choice[k] < num_ops * num_devices and not stepped:
                v, d = choice[k] // num_devices, choice[k] % num_devices
                choice[k] += 1
                if device[v] >= 0 or op_s[v, d] == np.inf:
                    continue
                u = unit[v]
                if unit_device[u] >= 0 and unit_device[u] != d:
                    continue
                new = unit_device[u] < 0
                if new and (filled[d] + held[u] > room[d] or (twin[d] >= 0 and units_on[twin[d]] == 0)):
                    continue
                began, ready, waited = free[engine[d]], True, last >= 0 and engine[device[last]] == engine[d]
                for at in range(in_ptr[v], in_ptr[v + 1]):
                    t = use_tensor[in_use[at]]
                    maker = tensor_op[t]
                    if device[maker] < 0:
                        ready = False
                        break
                    began = max(began, end[maker] + move_s[t, device[maker], d])
                    waited = waited or maker == last
                if not ready:
                    continue
                if not issue and (began < now or (began == now and v < last and not waited)):
                    continue
                counts[NODES] += 1
                op_at[k], device[v], start[v], end[v] = v, d, began, began + op_s[v, d]
                free_before[k], free[engine[d]] = free[engine[d]], began + op_s[v, d]
                if new:
                    unit_device[u] = d
                    filled[d] += held[u]
                    units_on[d] += 1
                unit_ops[u] += 1
                counts[DEPTH] = k + 1
                choice[k + 1] = 0
                stepped = True
            if (
                stepped
                and _least_end(
                    in_ptr, in_use, use_tensor, tensor_op, engine, tables, unit, walk, enough_s, num_engines
                )
                < enough_s * (1.0 - 1e-12)
                and _least_bytes(fixed, unit, only, walk) <= room[device[op_at[k]]]
            ):
                if k + 1 == num_ops:
                    return LEAF
                continue
        if counts[DEPTH] == 0:
            return END
        k = counts[DEPTH] - 1  # take the last op back
        counts[DEPTH] = k
        v = op_at[k]
        d, u = device[v], unit[v]
        free[engine[d]] = free_before[k]
        device[v] = -1
        unit_ops[u] -= 1
        if unit_ops[u] == 0:
            unit_device[u] = -1
            filled[d] -= held[u]
            units_on[d] -= 1
    return PAUSE


@kernel
def _least_end(
    in_ptr: Any,
    in_use: Any,
    use_tensor: Any,
    tensor_op: Any,
    engine: Any,
    tables: Any,
    unit: Any,
    walk: Any,
    enough_s: float,
    num_engines: int,
) -> float:
    """What no plan that begins like this ends before; no better than `enough_s` is looked for."""
    op_s, head_s, tail_s, move_s = tables
    counts, _, op_at, start, end, device, unit_device, _, free, _, _, _ = walk
    num_ops, num_devices = op_s.shape
    now = start[op_at[counts[DEPTH] - 1]]
    left, busy, least = 0.0, 0.0, 0.0
    for v in range(num_ops):
        if device[v] >= 0:
            least = max(least, end[v] + tail_s[v, device[v]])
            continue
        soonest, shortest = np.inf, np.inf
        for d in range(num_devices):
            if op_s[v, d] == np.inf or (unit_device[unit[v]] >= 0 and unit_device[unit[v]] != d):
                continue
            began = max(now, free[engine[d]], head_s[v, d])
            for at in range(in_ptr[v], in_ptr[v + 1]):
                t = use_tensor[in_use[at]]
                maker = tensor_op[t]
                if device[maker] >= 0:
                    began = max(began, end[maker] + move_s[t, device[maker], d])
            soonest = min(soonest, began + op_s[v, d] + tail_s[v, d])
            shortest = min(shortest, op_s[v, d])
        least = max(least, soonest)
        if least >= enough_s:
            return least
        left += shortest
    for e in range(num_engines):
        busy += max(now, free[e])
    return max(least, (busy + left) / num_engines)


@kernel
def _least_bytes(fixed: ProblemArrays, unit: Any, only: Any, walk: Any) -> Any:
    """What stands on the device of the op placed last while that op runs, at least.

    An op without a place runs later, and there if its unit is there or it may be nowhere else. Copies under
    way, what waits to be sent, and what views look into are left out.
    """
    counts, _, op_at, _, _, device, unit_device, _, _, _, _, _ = walk
    use_ptr, use_op, tensor_op = fixed.use_ptr, fixed.use_op, fixed.tensor_op
    last = op_at[counts[DEPTH] - 1]
    here = device[last]
    total = fixed.workspace[last]
    for v in range(len(device)):
        if unit_device[unit[v]] == here or only[v] == here:
            total += fixed.resident[v]
    for t in range(len(tensor_op)):
        maker = tensor_op[t]
        if device[maker] < 0:
            continue
        at_home = device[maker] == here
        size = fixed.home_bytes[t] if at_home else fixed.tensor_bytes[t]
        if size == 0 or fixed.storage[t] < 0:
            continue
        stands = at_home and (maker == last or fixed.keep[t])
        begun, again = at_home, False
        for use in range(use_ptr[t], use_ptr[t + 1]):
            v = use_op[use]
            stands = stands or v == last
            if device[v] == here:
                begun = True
            elif device[v] < 0 and (unit_device[unit[v]] == here or only[v] == here):
                again = True
        if stands or (begun and (again or fixed.keep[t])):
            total += size
    return total

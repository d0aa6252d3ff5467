"""Units moved between devices until what stands there fits, compiled.

Annealing on the frontier. A unit that shares a tensor with another device is offered to a device of one of
its neighbours; the change of every load is counted exactly, in O(degree). A move that costs something is
taken now and then, ever more seldom, so that chains of moves (one in, two out) are found; the best state on
the way is the answer. Few units are on the frontier, and hardly others are tried, however large the graph.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from loadmaster.placers._copies import copy_into
from loadmaster.simulator.jit import kernel

NOWHERE = -1
_WIDE = 32  # a tensor with more users than this brings nobody to the frontier
_PER_UNIT = 20  # tries for each unit of the frontier before it is drawn again
_ASTRAY = 15  # all but one of 16 tries stay on the frontier, and among the devices of neighbours
_STEEP = 30  # e to the minus this is never drawn
# Knuth's MMIX generator; its upper bits are the random ones. Unsigned: signed overflow is undefined.
_MULTIPLIER, _STEP, _HIGH = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(33)
_RANGE = 2.0**31


class Standing(NamedTuple):
    """Bytes that stay, of U units, and M nets: a tensor that needs a copy wherever a pin of it is."""

    unit_bytes: Any  # [U] wherever the unit is
    net_bytes: Any  # [M] of a copy
    net_root: Any  # [M] the unit on whose device no copy is needed, or NOWHERE
    pin_ptr: Any  # [M + 1] into pin
    pin: Any  # [P] units, the root not among them
    net_ptr: Any  # [U + 1] into net
    net: Any  # nets of each unit: those it is the root of, and those it is a pin of


class Terms(NamedTuple):
    """What a move is judged by. Beside what stands, a device needs what its heaviest unit needs to run."""

    room_bytes: Any  # [D]
    heavy_unit: Any  # [H] units that need something to run, the heaviest first
    heavy_bytes: Any  # [H + 1] how much; the last is 0
    heavy_rank: Any  # [U] place of each unit in that list, H = not in it
    seconds: Any  # [U, D] inf = not allowed
    limit_s: float  # busy seconds of a device that cost nothing
    bytes_per_s: float  # what a second beyond costs


class Schedule(NamedTuple):
    """How a search goes: from `hot` to `cold`, the loss in bytes that one try in e takes."""

    hot: float
    cold: float
    soft: float  # the price of a byte without room at the beginning, in copied bytes
    stiff: float  # and at the end
    num_tries: int
    seed: int
    stop: bool  # as soon as all fits


@kernel
def count_pins(standing: Standing, device: Any, num_devices: int) -> Any:
    """[M, D] pins of each net on each device."""
    count = np.zeros((len(standing.net_bytes), num_devices), dtype=np.int32)
    for m in range(len(standing.net_bytes)):
        for at in range(standing.pin_ptr[m], standing.pin_ptr[m + 1]):
            count[m, device[standing.pin[at]]] += 1
    return count


@kernel
def loads_of(standing: Standing, device: Any, count: Any) -> Any:
    """[D] bytes standing on each device, and how many of all are copies."""
    load, copied = np.zeros(count.shape[1], dtype=np.int64), 0
    for u in range(len(device)):
        load[device[u]] += standing.unit_bytes[u]
    for m in range(len(count)):
        root = standing.net_root[m]
        home = device[root] if root != NOWHERE else NOWHERE
        for d in range(count.shape[1]):
            if count[m, d] > 0 and d != home:
                load[d] += standing.net_bytes[m]
                copied += standing.net_bytes[m]
    return load, copied


@kernel
def list_frontier(standing: Standing, device: Any, on_frontier: Any, frontier: Any) -> Any:
    """List the units of nets that reach more than one device; returns how many."""
    on_frontier[:] = False
    num = 0
    for m in range(len(standing.net_bytes)):
        begin, end, root = standing.pin_ptr[m], standing.pin_ptr[m + 1], standing.net_root[m]
        home = device[root] if root != NOWHERE else device[standing.pin[begin]]
        cut = False
        for at in range(begin, end):
            cut = cut or device[standing.pin[at]] != home
        if not cut:
            continue
        for at in range(begin - (root != NOWHERE), end):
            u = standing.pin[at] if at >= begin else root
            if not on_frontier[u]:
                on_frontier[u] = True
                frontier[num] = u
                num += 1
    return num


@kernel
def undo_moves(device: Any, moved: Any, came_from: Any, num_moved: int, into: Any) -> None:
    """Write the devices [U] as they were `num_moved` moves ago."""
    copy_into(into, device)
    for at in range(num_moved - 1, -1, -1):
        into[moved[at]] = came_from[at]


@kernel
def anneal_partition(standing: Standing, start: Any, terms: Terms, schedule: Schedule) -> Any:
    """Anneal from `start` [U], allowed devices all of them.

    Returns the best devices [U], the bytes they lack, the bytes they copy, and the number of tries. One
    function: compiled functions that pass many arrays to each other count references more than they work.
    """
    unit_bytes, net_bytes, net_root = standing.unit_bytes, standing.net_bytes, standing.net_root
    pin_ptr, pin, net_ptr, net = standing.pin_ptr, standing.pin, standing.net_ptr, standing.net
    room, seconds, limit_s, pace = terms.room_bytes, terms.seconds, terms.limit_s, terms.bytes_per_s
    heavy_unit, heavy, rank = terms.heavy_unit, terms.heavy_bytes, terms.heavy_rank
    num_units, num_devices, num_heavy = len(start), len(room), len(heavy_unit)
    device, best = start.copy(), start.copy()
    # The moves since the best state, to be taken back; when they are too many, that state is stored instead.
    moved, came_from = np.empty(num_units + 64, dtype=np.int32), np.empty(num_units + 64, dtype=np.int32)
    num_moved, stored = 0, False
    count = count_pins(standing, device, num_devices)
    load, copied = loads_of(standing, device, count)
    busy_s = np.zeros(num_devices)
    top = np.full(num_devices, num_heavy, dtype=np.int64)  # rank of the heaviest unit on each device
    for i in range(num_units):
        busy_s[device[i]] += seconds[i, device[i]]
        top[device[i]] = min(top[device[i]], rank[i])
    over, late_s = 0, 0.0
    for d in range(num_devices):
        over += max(0, load[d] + heavy[top[d]] - room[d])
        late_s += max(0.0, busy_s[d] - limit_s)
    best_over, best_cost, best_copied = over, copied + pace * late_s, copied
    frontier, on_frontier = np.empty(num_units, dtype=np.int32), np.zeros(num_units, dtype=np.bool_)
    state, tries = np.uint64(schedule.seed), 0
    for _ in range(8):  # small seeds are alike at first
        state = state * _MULTIPLIER + _STEP

    while tries < schedule.num_tries and num_devices > 1 and not (schedule.stop and best_over == 0):
        num = list_frontier(standing, device, on_frontier, frontier)
        done = tries / schedule.num_tries
        warm = schedule.hot * (schedule.cold / schedule.hot) ** done
        price = schedule.soft * (schedule.stiff / schedule.soft) ** done
        until = min(schedule.num_tries, tries + max(_PER_UNIT * num, num_units // 4, 64))
        while tries < until:
            tries += 1
            state = state * _MULTIPLIER + _STEP
            draw = np.int64(state >> _HIGH)
            astray = num == 0 or draw & _ASTRAY == 0
            u = (draw >> 4) % num_units if astray else frontier[(draw >> 4) % num]
            a = device[u]
            state = state * _MULTIPLIER + _STEP
            draw = np.int64(state >> _HIGH)
            degree = net_ptr[u + 1] - net_ptr[u]
            if draw & _ASTRAY == 0 or degree == 0:
                b = (draw >> 4) % num_devices
            else:
                m = net[net_ptr[u] + (draw >> 4) % degree]
                state = state * _MULTIPLIER + _STEP
                pins = pin_ptr[m + 1] - pin_ptr[m]
                at = np.int64(state >> _HIGH) % (pins + (net_root[m] != NOWHERE))
                b = device[pin[pin_ptr[m] + at]] if at < pins else device[net_root[m]]
            if a == b or seconds[u, b] == np.inf:
                continue

            less, more = -unit_bytes[u], unit_bytes[u]
            for at in range(net_ptr[u], net_ptr[u + 1]):
                m = net[at]
                root = net_root[m]
                if root == u:
                    if count[m, a] > 0:
                        less += net_bytes[m]
                    if count[m, b] > 0:
                        more -= net_bytes[m]
                else:
                    home = device[root] if root != NOWHERE else NOWHERE
                    if home != a and count[m, a] == 1:
                        less -= net_bytes[m]
                    if home != b and count[m, b] == 0:
                        more += net_bytes[m]
            top_a, top_b = top[a], min(top[b], rank[u])
            if top_a == rank[u] and top_a < num_heavy:
                top_a += 1
                while top_a < num_heavy and device[heavy_unit[top_a]] != a:
                    top_a += 1
            new_over = (
                over
                - max(0, load[a] + heavy[top[a]] - room[a])
                - max(0, load[b] + heavy[top[b]] - room[b])
                + max(0, load[a] + less + heavy[top_a] - room[a])
                + max(0, load[b] + more + heavy[top_b] - room[b])
            )
            new_late_s = (
                late_s
                - max(0.0, busy_s[a] - limit_s)
                - max(0.0, busy_s[b] - limit_s)
                + max(0.0, busy_s[a] - seconds[u, a] - limit_s)
                + max(0.0, busy_s[b] + seconds[u, b] - limit_s)
            )
            worse = less + more + price * (new_over - over) + pace * (new_late_s - late_s)
            if worse > 0:
                state = state * _MULTIPLIER + _STEP
                if worse > _STEEP * warm or np.int64(state >> _HIGH) >= _RANGE * math.exp(-worse / warm):
                    continue

            if num_moved == len(moved):
                undo_moves(device, moved, came_from, num_moved, best)
                num_moved, stored = 0, True
            if not stored:
                moved[num_moved], came_from[num_moved] = u, a
                num_moved += 1
            device[u] = b
            top[a], top[b] = top_a, top_b
            load[a] += less
            load[b] += more
            busy_s[a] -= seconds[u, a]
            busy_s[b] += seconds[u, b]
            copied += less + more
            over, late_s = new_over, new_late_s
            for at in range(net_ptr[u], net_ptr[u + 1]):
                m = net[at]
                if net_root[m] != u:
                    count[m, a] -= 1
                    count[m, b] += 1
                begin, end = pin_ptr[m], pin_ptr[m + 1]
                if end - begin > _WIDE:
                    continue
                for near in range(begin - (net_root[m] != NOWHERE), end):
                    v = pin[near] if near >= begin else net_root[m]
                    if not on_frontier[v]:
                        on_frontier[v] = True
                        frontier[num] = v
                        num += 1
            cost = copied + pace * late_s
            if over < best_over or (over == best_over and cost < best_cost):
                best_over, best_cost, best_copied = over, cost, copied
                num_moved, stored = 0, False
                if schedule.stop and over == 0:
                    break
    if not stored:
        undo_moves(device, moved, came_from, num_moved, best)
    return best, best_over, best_copied, tries

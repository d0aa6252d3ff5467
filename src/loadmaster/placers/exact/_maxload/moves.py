"""Annealing of a split without any condition on its shape, compiled: moves and swaps of O(degree).

A net costs its home's device a write if any user is elsewhere, and every other device with a user a read. So
with the number of users of each net on each device, moving a class changes the loads of two devices only.
Because the busiest load is flat, what is searched is the busiest load plus a little of how uneven the loads
are; the best state by the busiest load alone is the answer. Room is never overrun.
"""

import math
from typing import Any

import numpy as np

from loadmaster.placers._copies import copy_into
from loadmaster.simulator.jit import kernel

SUM, MAX2 = 0, 1
_UNEVEN = 0.02
_STEEP = 30.0  # e to the minus this is never drawn
# Knuth's MMIX generator; its upper bits are the random ones.
_MULTIPLIER, _STEP, _HIGH = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(33)
_RANGE = 2.0**31


@kernel
def _draw_number(state: Any, below: Any) -> Any:
    state[0] = state[0] * _MULTIPLIER + _STEP
    return np.int64((state[0] >> _HIGH) * np.uint64(below) >> np.uint64(31))


@kernel
def _combine_load(load: Any, compute: Any, reads: Any, writes: Any) -> Any:
    if load == SUM:
        return compute + reads + writes
    if load == MAX2:
        return max(compute, reads + writes)
    return max(compute, max(reads, writes))


@kernel
def _evaluate_loads(load_s: Any, a: Any, load_a: Any, b: Any, load_b: Any) -> Any:
    """Busiest load and a little of the mean square, with other loads at two devices."""
    top, square, mean = 0.0, 0.0, 0.0
    for d in range(len(load_s)):
        value = load_a if d == a else load_b if d == b else load_s[d]
        top = max(top, value)
        square += value * value
        mean += value
    return top, top + _UNEVEN * square / max(mean, 1e-300)


@kernel
def _transfer_change(
    i: Any,
    a: Any,
    b: Any,
    device: Any,
    held: Any,
    kind: Any,
    home_ptr: Any,
    home_net: Any,
    user_ptr: Any,
    user_net: Any,
    net_home: Any,
    net_size: Any,
    read_s: Any,
    write_s: Any,
) -> Any:
    """Reads and writes that a and b gain when class i goes from a to b."""
    ta, tb = kind[a], kind[b]
    read_a, write_a, read_b, write_b = 0.0, 0.0, 0.0, 0.0
    for k in range(home_ptr[i], home_ptr[i + 1]):
        e = home_net[k]
        if held[e, a] < net_size[e]:
            write_a -= write_s[ta, e]
        if held[e, a] > 0:
            read_a += read_s[ta, e]
        if held[e, b] > 0:
            read_b -= read_s[tb, e]
        if held[e, b] < net_size[e]:
            write_b += write_s[tb, e]
    for k in range(user_ptr[i], user_ptr[i + 1]):
        e = user_net[k]
        home = device[net_home[e]]
        if home == a:
            if held[e, a] == net_size[e]:
                write_a += write_s[ta, e]
        elif held[e, a] == 1:
            read_a -= read_s[ta, e]
        if home == b:
            if held[e, b] == net_size[e] - 1:
                write_b -= write_s[tb, e]
        elif held[e, b] == 0:
            read_b += read_s[tb, e]
    return read_a, write_a, read_b, write_b


@kernel
def _move_class(
    i: Any,
    a: Any,
    b: Any,
    device: Any,
    held: Any,
    user_ptr: Any,
    user_net: Any,
    moved: Any,
    compute: Any,
    reads: Any,
    writes: Any,
    room_used: Any,
    seconds: Any,
    num_bytes: Any,
    kind: Any,
) -> None:
    """Move class i; `moved` is the change of reads and writes."""
    device[i] = b
    for k in range(user_ptr[i], user_ptr[i + 1]):
        e = user_net[k]
        held[e, a] -= 1
        held[e, b] += 1
    compute[a] -= seconds[i, kind[a]]
    compute[b] += seconds[i, kind[b]]
    reads[a] += moved[0]
    writes[a] += moved[1]
    reads[b] += moved[2]
    writes[b] += moved[3]
    room_used[a] -= num_bytes[i]
    room_used[b] += num_bytes[i]


@kernel
def anneal(
    start: Any,  # [C] device of each class
    kind: Any,  # [D] type of each device
    seconds: Any,
    num_bytes: Any,
    room: Any,  # [D]
    load: Any,
    home_ptr: Any,
    home_net: Any,
    user_ptr: Any,
    user_net: Any,
    net_home: Any,
    net_ptr: Any,
    net_user: Any,
    read_s: Any,
    write_s: Any,
    hot: Any,
    cold: Any,
    tries: Any,
    seed: Any,
    stop_s: Any,  # a busiest load that is good enough
) -> Any:
    """The best assignment found and its busiest load."""
    num, devices, nets = len(start), len(kind), len(net_home)
    state = np.full(1, np.uint64(seed) * np.uint64(2) + np.uint64(1), np.uint64)
    device = start.copy()
    net_size = np.empty(nets, np.int32)
    held = np.zeros((nets, devices), np.int32)
    compute, reads, writes = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    room_used = np.zeros(devices, np.int64)
    for i in range(num):
        compute[device[i]] += seconds[i, kind[device[i]]]
        room_used[device[i]] += num_bytes[i]
    for e in range(nets):
        net_size[e] = net_ptr[e + 1] - net_ptr[e]
        for k in range(net_ptr[e], net_ptr[e + 1]):
            held[e, device[net_user[k]]] += 1
        for d in range(devices):
            if d == device[net_home[e]]:
                if held[e, d] < net_size[e]:
                    writes[d] += write_s[kind[d], e]
            elif held[e, d] > 0:
                reads[d] += read_s[kind[d], e]
    load_s = np.empty(devices)
    for d in range(devices):
        load_s[d] = _combine_load(load, compute[d], reads[d], writes[d])
    top, value = _evaluate_loads(load_s, 0, load_s[0], 0, load_s[0])
    best, best_device = top, device.copy()
    heat = hot
    cooling = (cold / hot) ** (1.0 / max(tries, 1))
    for _ in range(tries):
        heat *= cooling
        if best <= stop_s:
            break
        i = _draw_number(state, num)
        choice = _draw_number(state, 8)
        if choice < 3:  # something of the busiest device
            busiest = 0
            for d in range(devices):
                if load_s[d] > load_s[busiest]:
                    busiest = d
            for _k in range(16):
                if device[i] == busiest:
                    break
                i = _draw_number(state, num)
        a = device[i]
        b = _draw_number(state, devices)
        links = home_ptr[i + 1] - home_ptr[i] + user_ptr[i + 1] - user_ptr[i]
        if choice != 0 and choice != 7 and links > 0:  # to a device where a neighbour is
            k = _draw_number(state, links)
            if k < home_ptr[i + 1] - home_ptr[i]:
                e = home_net[home_ptr[i] + k]
                b = device[net_user[net_ptr[e] + _draw_number(state, net_size[e])]]
            else:
                e = user_net[user_ptr[i] + k - (home_ptr[i + 1] - home_ptr[i])]
                pin = _draw_number(state, net_size[e] + 1)
                b = device[net_home[e]] if pin == net_size[e] else device[net_user[net_ptr[e] + pin]]
        if a == b or seconds[i, kind[b]] == np.inf:
            continue
        swap = choice >= 6
        j = i
        if swap:
            for _k in range(16):
                j = _draw_number(state, num)
                if device[j] == b:
                    break
            if device[j] != b or seconds[j, kind[a]] == np.inf:
                continue
            if room_used[a] + num_bytes[j] - num_bytes[i] > room[a]:
                continue
            if room_used[b] + num_bytes[i] - num_bytes[j] > room[b]:
                continue
        elif room_used[b] + num_bytes[i] > room[b]:
            continue
        moved = _transfer_change(
            i,
            a,
            b,
            device,
            held,
            kind,
            home_ptr,
            home_net,
            user_ptr,
            user_net,
            net_home,
            net_size,
            read_s,
            write_s,
        )
        if swap:
            _move_class(
                i,
                a,
                b,
                device,
                held,
                user_ptr,
                user_net,
                moved,
                compute,
                reads,
                writes,
                room_used,
                seconds,
                num_bytes,
                kind,
            )
            back = _transfer_change(
                j,
                b,
                a,
                device,
                held,
                kind,
                home_ptr,
                home_net,
                user_ptr,
                user_net,
                net_home,
                net_size,
                read_s,
                write_s,
            )
            _move_class(
                j,
                b,
                a,
                device,
                held,
                user_ptr,
                user_net,
                back,
                compute,
                reads,
                writes,
                room_used,
                seconds,
                num_bytes,
                kind,
            )
            load_a = _combine_load(load, compute[a], reads[a], writes[a])
            load_b = _combine_load(load, compute[b], reads[b], writes[b])
        else:
            load_a = _combine_load(
                load, compute[a] - seconds[i, kind[a]], reads[a] + moved[0], writes[a] + moved[1]
            )
            load_b = _combine_load(
                load, compute[b] + seconds[i, kind[b]], reads[b] + moved[2], writes[b] + moved[3]
            )
        new_top, new = _evaluate_loads(load_s, a, load_a, b, load_b)
        worse = new - value
        taken = worse <= 0
        if not taken and worse < _STEEP * heat:
            state[0] = state[0] * _MULTIPLIER + _STEP
            taken = np.float64(state[0] >> _HIGH) < _RANGE * math.exp(-worse / heat)
        if not taken:
            if swap:
                undo = (-back[2], -back[3], -back[0], -back[1])
                _move_class(
                    j,
                    a,
                    b,
                    device,
                    held,
                    user_ptr,
                    user_net,
                    undo,
                    compute,
                    reads,
                    writes,
                    room_used,
                    seconds,
                    num_bytes,
                    kind,
                )
                undo = (-moved[2], -moved[3], -moved[0], -moved[1])
                _move_class(
                    i,
                    b,
                    a,
                    device,
                    held,
                    user_ptr,
                    user_net,
                    undo,
                    compute,
                    reads,
                    writes,
                    room_used,
                    seconds,
                    num_bytes,
                    kind,
                )
            continue
        if not swap:
            _move_class(
                i,
                a,
                b,
                device,
                held,
                user_ptr,
                user_net,
                moved,
                compute,
                reads,
                writes,
                room_used,
                seconds,
                num_bytes,
                kind,
            )
        load_s[a], load_s[b], value, top = load_a, load_b, new, new_top
        if top < best * (1 - 1e-12):
            best = top
            copy_into(best_device, device)
    return best_device, best

"""Stages of a pipeline by dynamic programming over ideals, compiled: the last stage first.

Ideals are those of the order turned round, so that a set already covered is what comes behind a stage: how
many stages that is says how many micro-batches the stage holds. `best[I, s]` is the least busiest load that
covers I with the devices of state s, a count of every type, none of them idle. From every ideal all larger
ones are walked, as in `sweep.py`; beside transfers the bytes of holds (`holds.py`) are carried along. A stage
that has no room plain is recomputed, if it then has. A branch ends where seconds, or bytes for one
micro-batch, which only grow, are too many for every type. Above what stands, a stage may be asked to have
room for the most that one of its classes needs while it runs.
"""

from typing import Any

import numpy as np

from loadmaster.placers.exact._maxload.wires import carry_transfers
from loadmaster.simulator.jit import kernel

_ONE = np.uint64(1)
_SUM, _MAX3 = 0, 2
_MADE, _COPY = 0, 2


@kernel
def sweep_flights(
    begin: Any,
    fuel: Any,  # stages looked at before the kernel comes back
    limit_s: Any,
    rows: Any,
    ptr: Any,
    up: Any,
    more: Any,
    of_seconds: Any,
    of_again: Any,
    of_barred: Any,
    of_bytes: Any,
    room: Any,
    column: Any,
    load: Any,
    home_ptr: Any,
    home_net: Any,
    user_ptr: Any,
    user_net: Any,
    net_home: Any,
    word_ptr: Any,
    word: Any,
    mask: Any,
    read_s: Any,
    write_s: Any,
    hold_code: Any,
    hold_home: Any,
    hold_bytes: Any,
    hold_ptr: Any,
    hold_word: Any,
    hold_saved: Any,
    hold_needed: Any,
    hold_of: Any,
    hold_net: Any,
    running: Any,  # [C] bytes that a class needs while it runs
    in_flight: Any,  # [states] micro-batches of a stage before those of a state
    stride: Any,
    step_ptr: Any,
    step: Any,
    best: Any,
    came_from: Any,
    came_by: Any,  # twice the type, and one if recomputed
    stamp: Any,
    moved: Any,
    held: Any,  # [I, 5] bytes of each micro-batch plain and recomputed; once recomputed; once; running
    stack: Any,
) -> Any:
    """Go on from ideal `begin`; the next ideal to do and the stages looked at."""
    num, types, states, tracks = len(rows), len(room), best.shape[1], read_s.shape[0]
    fits = np.zeros(types, np.bool_)
    looked, at = 0, begin
    while at < num and looked < fuel:
        base = at
        at += 1
        live = False
        for s in range(states):
            if best[base, s] <= limit_s:
                live = True
        if not live:
            continue
        for q in range(tracks):
            moved[base, q] = 0.0
        for q in range(5):
            held[base, q] = 0
        stack[0], height = base, 1
        while height > 0:
            height -= 1
            inner = stack[height]
            for link in range(ptr[inner], ptr[inner + 1]):
                outer = up[link]
                if stamp[outer] == base:
                    continue
                stamp[outer] = base
                looked += 1
                v = more[link]
                for q in range(5):
                    held[outer, q] = held[inner, q]
                held[outer, 4] = max(held[outer, 4], running[v])
                for i in range(hold_of[v], hold_of[v + 1]):
                    e = hold_net[i]
                    size, code, h = hold_bytes[e], hold_code[e], hold_home[e]
                    saved_in, saved_out, need_in, need_out = False, False, False, False
                    for j in range(hold_ptr[e], hold_ptr[e + 1]):
                        w = hold_word[j]
                        part = rows[inner, w] & ~rows[base, w]
                        saved_in = saved_in or part & hold_saved[j] != 0
                        need_in = need_in or part & hold_needed[j] != 0
                        part = rows[outer, w] & ~rows[base, w]
                        saved_out = saved_out or part & hold_saved[j] != 0
                        need_out = need_out or part & hold_needed[j] != 0
                    bit = _ONE << np.uint64(h & 63)
                    home_in = rows[inner, h >> 6] & ~rows[base, h >> 6] & bit != 0
                    home_out = rows[outer, h >> 6] & ~rows[base, h >> 6] & bit != 0
                    if code == _COPY:
                        if saved_in and not home_in:
                            held[outer, 3] -= size
                        if saved_out and not home_out:
                            held[outer, 3] += size
                        continue
                    if saved_out and not saved_in:
                        held[outer, 0] += size
                    if code == _MADE and home_in:
                        if saved_in:
                            held[outer, 2] -= size
                    elif need_in:
                        held[outer, 1] -= size
                    if code == _MADE and home_out:
                        if saved_out:
                            held[outer, 2] += size
                    elif need_out:
                        held[outer, 1] += size
                size = of_bytes[outer] - of_bytes[base]
                any_fits = False
                for t in range(types):
                    fits[t] = (
                        of_seconds[outer, t] - of_seconds[base, t] <= limit_s
                        and size + held[outer, 0] + held[outer, 4] <= room[t]
                        and of_barred[outer, t] == of_barred[base, t]
                    )
                    any_fits = any_fits or fits[t]
                if not any_fits:
                    continue
                carry_transfers(
                    rows, base, inner, outer, v, home_ptr, home_net, user_ptr, user_net, net_home,
                    word_ptr, word, mask, read_s, write_s, moved,
                )  # fmt: skip
                stack[height] = outer
                height += 1
                for t in range(types):
                    if not fits[t]:
                        continue
                    plain = of_seconds[outer, t] - of_seconds[base, t]
                    again = plain + of_again[outer, t] - of_again[base, t]
                    if load == _SUM:
                        plain += moved[outer, column[t]]
                        again += moved[outer, column[t]]
                    else:
                        wire = moved[outer, column[t]]
                        if load == _MAX3:  # the next track has the writes
                            wire = max(wire, moved[outer, column[t] + 1])
                        plain, again = max(plain, wire), max(again, wire)
                    if plain > limit_s:
                        continue
                    free = room[t] - size - held[outer, 3] - held[outer, 4]
                    for i in range(step_ptr[t], step_ptr[t + 1]):
                        s = step[i]
                        if best[base, s] > limit_s:
                            continue
                        rerun = 0
                        cost = plain
                        if in_flight[s] * held[outer, 0] > free:
                            if in_flight[s] * held[outer, 1] + held[outer, 2] > free or again > limit_s:
                                continue
                            rerun, cost = 1, again
                        value = max(best[base, s], cost)
                        if value < best[outer, s + stride[t]]:
                            best[outer, s + stride[t]] = value
                            came_from[outer, s + stride[t]] = base
                            came_by[outer, s + stride[t]] = 2 * t + rerun
    return at, looked

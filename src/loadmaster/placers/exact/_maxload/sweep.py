"""The dynamic programme over ideals in its threshold form, compiled.

For a limit on every load, `used[I, s]` is the least number of devices of the first type that cover ideal I
when the other types give the counts of state s. From every ideal that can be covered all larger ones are
walked once each, upwards; the difference of the two is a stage, its transfers carried along and changed by
the nets of the class that is added. A branch ends where the stage's seconds or bytes, which only grow, are
too much for every type. Ideals whose worth (see `prices.py`) cannot be shared between the devices before and
after them are walked through, but no stage ends there.
"""

from typing import Any

import numpy as np

from loadmaster.placers.exact._maxload.wires import carry_transfers
from loadmaster.simulator.jit import kernel

UNREACHED = 255
SUM, MAX2, MAX3 = 0, 1, 2


@kernel
def sweep(
    begin: Any,
    fuel: Any,  # stages looked at before the kernel comes back
    limit_s: Any,
    rows: Any,
    ptr: Any,
    up: Any,
    more: Any,
    of_seconds: Any,
    of_barred: Any,
    of_bytes: Any,
    of_worth: Any,
    shared: Any,  # [I] whether a stage may end there
    room: Any,
    column: Any,  # [T] track: row of read_s and write_s
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
    most_first: Any,
    stride: Any,
    step_ptr: Any,
    step: Any,
    left: Any,  # [states] worth that unused devices of other types carry
    first_carries: Any,
    used: Any,
    came_from: Any,
    came_by: Any,
    stamp: Any,
    moved: Any,
    stack: Any,
) -> Any:
    """Go on from ideal `begin`; the next ideal to do, the stages looked at, the ideals walked from."""
    num, types, states = len(rows), len(room), used.shape[1]
    tracks = read_s.shape[0]
    fits = np.zeros(types, np.bool_)
    looked, walked = 0, 0
    at = begin
    while at < num and looked < fuel:
        base = at
        at += 1
        live = False
        rest = of_worth[num - 1] - of_worth[base]
        for t in range(1, types):  # a device may stay empty
            for i in range(step_ptr[t], step_ptr[t + 1]):
                s = step[i]
                to = s + stride[t]
                if used[base, s] < used[base, to]:
                    used[base, to] = used[base, s]
                    came_from[base, to] = base
                    came_by[base, to] = t
        for s in range(states):
            if used[base, s] < UNREACHED:
                if rest > left[s] + (most_first - used[base, s]) * first_carries:
                    used[base, s] = UNREACHED  # the devices left cannot carry the rest
                else:
                    live = True
        if not live:
            continue
        walked += 1
        for q in range(tracks):
            moved[base, q] = 0.0
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
                bytes_here = of_bytes[outer] - of_bytes[base]
                any_fits = False
                for t in range(types):
                    fits[t] = (
                        of_seconds[outer, t] - of_seconds[base, t] <= limit_s
                        and bytes_here <= room[t]
                        and of_barred[outer, t] == of_barred[base, t]
                    )
                    any_fits = any_fits or fits[t]
                if not any_fits:
                    continue
                carry_transfers(
                    rows, base, inner, outer, more[link], home_ptr, home_net, user_ptr, user_net, net_home,
                    word_ptr, word, mask, read_s, write_s, moved,
                )  # fmt: skip
                stack[height] = outer
                height += 1
                if not shared[outer]:
                    continue
                for t in range(types):
                    if not fits[t]:
                        continue
                    seconds = of_seconds[outer, t] - of_seconds[base, t]
                    if load == SUM:
                        seconds += moved[outer, column[t]]
                    else:
                        seconds = max(seconds, moved[outer, column[t]])
                        if load == MAX3:  # the next track has the writes
                            seconds = max(seconds, moved[outer, column[t] + 1])
                    if seconds > limit_s:
                        continue
                    if t == 0:
                        for s in range(states):
                            if used[base, s] < most_first and used[base, s] + 1 < used[outer, s]:
                                used[outer, s] = used[base, s] + 1
                                came_from[outer, s] = base
                                came_by[outer, s] = 0
                    else:
                        for i in range(step_ptr[t], step_ptr[t + 1]):
                            s = step[i]
                            to = s + stride[t]
                            if used[base, s] < used[outer, to]:
                                used[outer, to] = used[base, s]
                                came_from[outer, to] = base
                                came_by[outer, to] = t
    return at, looked, walked

"""The transfers of a stage as it grows by one class, compiled: what both programmes over ideals carry along.

A stage is the difference of two ideals, `base` and `inner`; the class `v` makes it `outer`. A net is read by
a stage that has users but not its home, and written by one that has its home but not all users.
"""

from typing import Any

import numpy as np

from loadmaster.simulator.jit import kernel_part

_ONE, _SIX, _LOW = np.uint64(1), np.uint32(6), np.uint32(63)


@kernel_part
def carry_transfers(
    rows: Any,
    base: Any,
    inner: Any,
    outer: Any,
    v: Any,
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
    moved: Any,  # [I, tracks] seconds of the stage's transfers
) -> None:
    """Set the transfers of `outer` from those of `inner`."""
    tracks = read_s.shape[0]
    for q in range(tracks):
        moved[outer, q] = moved[inner, q]
    for i in range(home_ptr[v], home_ptr[v + 1]):
        e = home_net[i]
        meets, inside = False, True
        for j in range(word_ptr[e], word_ptr[e + 1]):
            w = word[j]
            part = rows[inner, w] & ~rows[base, w] & mask[j]
            if part != 0:
                meets = True
            if part != mask[j]:
                inside = False
        if meets:
            for q in range(tracks):
                moved[outer, q] -= read_s[q, e]
        if not inside:
            for q in range(tracks):
                moved[outer, q] += write_s[q, e]
    for i in range(user_ptr[v], user_ptr[v + 1]):
        e = user_net[i]
        h = net_home[e]
        hw = h >> _SIX
        if rows[inner, hw] & ~rows[base, hw] & (_ONE << np.uint64(h & _LOW)) != 0:
            inside = True
            for j in range(word_ptr[e], word_ptr[e + 1]):
                w = word[j]
                if rows[outer, w] & ~rows[base, w] & mask[j] != mask[j]:
                    inside = False
                    break
            if inside:
                for q in range(tracks):
                    moved[outer, q] -= write_s[q, e]
        else:
            meets = False
            for j in range(word_ptr[e], word_ptr[e + 1]):
                w = word[j]
                if rows[inner, w] & ~rows[base, w] & mask[j] != 0:
                    meets = True
                    break
            if not meets:
                for q in range(tracks):
                    moved[outer, q] += read_s[q, e]

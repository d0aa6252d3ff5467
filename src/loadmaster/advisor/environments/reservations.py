"""Free devices over time as a profile: borders `times`, and the room from each on; compiled."""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

import numpy as np

from loadmaster.simulator.jit import kernel


@kernel
def _cut(times, room, size, at):
    """Make `at` a border of the profile; its index and the new size."""
    i = np.searchsorted(times[:size], at)
    if i < size and times[i] == at:
        return i, size
    for k in range(size, i, -1):
        times[k] = times[k - 1]
        room[k] = room[k - 1]
    times[i] = at
    room[i] = room[i - 1]
    return i, size + 1


@kernel
def reserve(times, room, size, begin, finish, amount):
    """Take `amount` from `begin` to `finish`; the new size."""
    if finish <= begin:
        return size
    a, size = _cut(times, room, size, begin)
    b, size = _cut(times, room, size, finish)
    for i in range(a, b):
        room[i] -= amount
    return size


@kernel
def earliest(times, room, size, time, amount, due):
    """The earliest start with `amount` free for `time`, ending by `due`; inf if none."""
    i = 0
    while i < size - 1:
        begin = times[i]
        if begin + time > due:
            return np.inf
        k = i
        while k < size - 1 and times[k] < begin + time and room[k] >= amount:
            k += 1
        if times[k] >= begin + time:
            return begin
        i = k + 1
    return np.inf

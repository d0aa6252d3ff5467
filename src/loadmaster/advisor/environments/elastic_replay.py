"""The event loop of elastic jobs, compiled: counts change at every arrival and end.

Elastic jobs may move, so counts up to a host's size always find a host (power-of-two buddies), or devices
of several hosts where the job was measured to be faster so.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from typing import Any

import numpy as np

from loadmaster.advisor.environments.reservations import reserve
from loadmaster.simulator.jit import kernel

MOST_TURNS = 8  # times that a plan of the largest set is begun anew
MOST_FAILURES = 16  # jobs that do not fit before the rest, which need more, is not asked


@kernel
def _level_within(amount, levels, duration):
    """The fastest measured count within an amount of devices; -1 if none."""
    best = -1
    for q in range(len(levels)):
        if levels[q] <= amount and duration[q] < np.inf and (best < 0 or duration[q] < duration[best]):
            best = q
    return best


@kernel
def _plan_elastic(
    now, active, num_active, remaining, due, duration, levels, capacity, times, room, first, rule, newcomer
):
    """Minimum satisfactory shares by deadline; `first` gets the level of each job now, or -1.

    SET: a job that does not fit in its turn is planned before all others, up to MOST_TURNS times.
    """
    key = np.empty(num_active)
    for i in range(num_active):
        j = active[i]
        key[i] = remaining[j] * (duration[j] * levels).min() if rule[0] == 4 else due[j]
    turns = MOST_TURNS if rule[0] == 6 else 0
    while True:
        failed = _plan_in_turn(
            now,
            active,
            key,
            remaining,
            due,
            duration,
            levels,
            capacity,
            times,
            room,
            first,
            rule,
            newcomer,
            turns > 0,
        )
        if failed < 0 or turns == 0:
            return failed < 0
        if failed == np.argmin(key):
            turns = 0
            if newcomer >= 0:
                return False
        else:
            key[failed] = key.min() - 1.0
            turns -= 1


@kernel
def _plan_in_turn(
    now, active, key, remaining, due, duration, levels, capacity, times, room, first, rule, newcomer, stop
):
    """Shares in the order of `key`; the place of a job that does not fit, or -1."""
    size = 2
    times[0], room[0] = now, float(capacity)
    times[1], room[1] = np.inf, 0.0
    for i in np.argsort(key):
        j = active[i]
        first[j] = -1
        best_top, best_area = -1, np.inf
        for top in range(len(levels)):
            if duration[j, top] == np.inf:
                continue
            left, area = remaining[j], 0.0
            for s in range(size - 1):
                if times[s] >= due[j] or left <= 0:
                    break
                q = _level_within(min(room[s], float(levels[top])), levels, duration[j])
                if q < 0:
                    continue
                span = min(min(times[s + 1], due[j]) - times[s], left * duration[j, q])
                left -= span / duration[j, q]
                area += span * levels[q]
            if left <= 1e-9:
                if rule[1] == 0:
                    best_top, best_area = top, area
                    break
                if area < best_area * (1 - 1e-9):
                    best_top, best_area = top, area
        if best_top < 0 and rule[0] == 4:  # no promises: whoever does not fit waits
            continue
        if best_top < 0 and (newcomer >= 0 or stop):
            return i
        if best_top < 0:  # a promise that a later plan cannot keep: as fast as may be
            best_top = len(levels) - 1
        if j == newcomer and rule[3] < np.inf:
            spare = 0.0
            for s in range(size - 1):
                spare += max(0.0, min(times[s + 1], due[j]) - times[s]) * room[s]
            if best_area > rule[3] * spare:
                return i
        left = remaining[j]
        s = 0
        while left > 1e-12 and times[s] < due[j] and s < size - 1:
            q = _level_within(min(room[s], float(levels[best_top])), levels, duration[j])
            if q >= 0:
                finish = min(min(times[s + 1], due[j]), times[s] + left * duration[j, q])
                left -= (finish - times[s]) / duration[j, q]
                begin = times[s]
                if finish > begin:
                    size = reserve(times, room, size, begin, finish, float(levels[q]))
                    if begin == now:
                        first[j] = q
            s += 1
    return -1


@kernel
def _choose_set(
    now,
    active,
    num_active,
    waiting,
    num_waiting,
    now_level,
    remaining,
    due,
    duration,
    levels,
    capacity,
    times,
    room,
    first,
    rule,
):
    """Least device time first, every job with which a plan by deadline still keeps all; the new counts."""
    pool = np.empty(num_active + num_waiting, np.int64)
    size = 0
    for i in range(num_active + num_waiting):
        j = active[i] if i < num_active else waiting[i - num_active]
        if now + remaining[j] * duration[j].min() <= due[j] + 1e-6:
            pool[size] = j
            size += 1
        else:
            now_level[j] = -1
    key = np.empty(size)
    for i in range(size):
        key[i] = remaining[pool[i]] * (duration[pool[i]] * levels).min()
    chosen, left, failures = 0, 0, 0
    for i in np.argsort(key):
        j = pool[i]
        active[chosen] = j
        if failures < MOST_FAILURES and _plan_elastic(
            now, active, chosen + 1, remaining, due, duration, levels, capacity, times, room, first, rule, j
        ):
            chosen += 1
        else:
            failures += 1
            now_level[j] = -1
            waiting[left] = j
            left += 1
    return chosen, left


@kernel
def replay_elastic(arrival: Any, due: Any, duration: Any, capacity: Any, levels: Any, rule: Any) -> Any:
    """Every arrival, resizing and end in order."""
    num = len(arrival)
    end = np.full(num, np.nan)
    start = np.full(num, np.nan)
    count = np.zeros(num, np.int64)
    admitted = np.zeros(num, np.bool_)
    remaining = np.ones(num)
    active = np.empty(num + 1, np.int64)
    num_active = 0
    waiting = np.empty(num, np.int64)
    num_waiting = 0
    now_level = np.full(num, -1)
    first = np.full(num, -1)
    times = np.empty(8 * num + 64)
    room = np.empty(8 * num + 64)
    at = 0
    now = 0.0
    device_s = 0.0
    next_end = np.inf
    next_border = np.inf
    history = np.zeros((16 * num + 16, 3))  # until when, free devices, which may be moved together
    num_notes = 0
    used = 0
    while True:
        then = min(min(next_end, next_border), arrival[at] if at < num else np.inf)
        if then == np.inf:
            break
        if num_notes < len(history):
            history[num_notes, 0], history[num_notes, 1] = then, capacity - used
            history[num_notes, 2] = capacity - used
            num_notes += 1
        for i in range(num_active):
            j = active[i]
            if now_level[j] >= 0:
                remaining[j] -= (then - now) / duration[j, now_level[j]]
                device_s += (then - now) * levels[now_level[j]]
        now = then
        ended = False
        kept = 0
        for i in range(num_active):
            j = active[i]
            if remaining[j] <= 1e-9:
                end[j] = now
                ended = True
                now_level[j] = -1
            elif rule[0] == 4 and now + remaining[j] * duration[j].min() > due[j] + 1e-6:
                now_level[j] = -1  # can no longer be in time: stopped, its devices go to others
            else:
                active[kept] = j
                kept += 1
        num_active = kept
        if rule[0] == 6 and (ended or (at < num and arrival[at] <= now)):
            # the set anew: all that are not done, and who has just come
            while at < num and arrival[at] <= now:
                if (duration[at] * levels).min() <= rule[4]:
                    waiting[num_waiting] = at
                    num_waiting += 1
                at += 1
            num_active, num_waiting = _choose_set(
                now,
                active,
                num_active,
                waiting,
                num_waiting,
                now_level,
                remaining,
                due,
                duration,
                levels,
                capacity,
                times,
                room,
                first,
                rule,
            )
        if ended and rule[2] > 0 and rule[0] != 6:  # ask again for those that wait, least device time first
            key = np.empty(num_waiting)
            for i in range(num_waiting):
                key[i] = (duration[waiting[i]] * levels).min()
            left = 0
            again = waiting[:num_waiting][np.argsort(key)]
            for i in range(num_waiting):
                j = again[i]
                if now + duration[j].min() > due[j]:
                    continue
                active[num_active] = j
                if _plan_elastic(
                    now,
                    active,
                    num_active + 1,
                    remaining,
                    due,
                    duration,
                    levels,
                    capacity,
                    times,
                    room,
                    first,
                    rule,
                    j,
                ):
                    num_active += 1
                    admitted[j] = True
                else:
                    waiting[left] = j
                    left += 1
            num_waiting = left
        while at < num and arrival[at] <= now:
            j = at
            at += 1
            if (duration[j] * levels).min() > rule[4] or now + duration[j].min() > due[j]:
                continue
            active[num_active] = j
            if _plan_elastic(
                now,
                active,
                num_active + 1,
                remaining,
                due,
                duration,
                levels,
                capacity,
                times,
                room,
                first,
                rule,
                j,
            ):
                num_active += 1
                admitted[j] = rule[0] != 4
            elif rule[2] > 0:
                waiting[num_waiting] = j
                num_waiting += 1
        _plan_elastic(
            now, active, num_active, remaining, due, duration, levels, capacity, times, room, first, rule, -1
        )
        used = 0
        for i in range(num_active):
            if first[active[i]] >= 0:
                used += levels[first[active[i]]]
        while True:  # spare devices: the best saving of device time for each extra device
            best_j, best_q, best_gain = -1, -1, -1e300
            for i in range(num_active):
                j = active[i]
                q0 = first[j]
                have = levels[q0] if q0 >= 0 else 0
                for q in range(q0 + 1, len(levels)):
                    if duration[j, q] == np.inf or levels[q] - have > capacity - used:
                        continue
                    if q0 >= 0 and duration[j, q] >= duration[j, q0]:
                        continue
                    before = remaining[j] * duration[j, q0] * levels[q0] if q0 >= 0 else 1e200
                    gain = (before - remaining[j] * duration[j, q] * levels[q]) / (levels[q] - have)
                    if gain > best_gain:
                        best_j, best_q, best_gain = j, q, gain
                    break
            if best_j < 0:
                break
            used += levels[best_q] - (levels[first[best_j]] if first[best_j] >= 0 else 0)
            first[best_j] = best_q
        next_end = np.inf
        for i in range(num_active):
            j = active[i]
            if first[j] != now_level[j] and now_level[j] >= 0 and first[j] >= 0 and rule[5] > 0:
                remaining[j] += rule[5] / duration[j, first[j]]
            now_level[j] = first[j]
            if now_level[j] >= 0:
                if np.isnan(start[j]):
                    start[j] = now
                    count[j] = levels[now_level[j]]
                next_end = min(next_end, now + remaining[j] * duration[j, now_level[j]])
        next_border = np.inf
        for s in range(1, len(times)):
            if times[s] == np.inf:
                break
            if times[s] > now + 1e-6:
                next_border = times[s]
                break
        if num_active == 0:
            next_border = np.inf
    return end, start, count, admitted, device_s, history[:num_notes]

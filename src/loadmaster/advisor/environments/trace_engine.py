"""Replays trace streams: jobs that wait, start on a fixed number of devices (rigid) or are resized (elastic).

Rigid jobs stand on hosts: one host where they fit (tightest first), else spread over hosts at the measured
spread rate. Elastic jobs may move, so counts up to a host's size always find a host (power-of-two buddies).
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.trace import LEVELS, TraceStream
from loadmaster.core.errors import InputError
from loadmaster.simulator.jit import kernel


class Order(IntEnum):
    """How a trace rule works."""

    FIFO = 0  # the requested count, strictly by arrival
    EDF = 1  # the requested count, by deadline
    MAX = 2  # as many devices as there are, by arrival
    MEETS = 3  # the smallest count that meets the deadline, by deadline
    LIST = 4  # least device time first, on the count with least device time that meets the deadline
    RESERVE = 5  # reservations by deadline: ElasticFlow's minimum satisfactory share


@dataclass(frozen=True, slots=True)
class TraceRule:
    """A policy for traces as numbers."""

    order: Order
    by_area: bool = (
        False  # RESERVE: of the counts that meet, the one with least device time, not the smallest
    )
    retry: bool = False  # RESERVE: a job that cannot be promised yet waits and is asked again
    most_share: float = (
        np.inf
    )  # admit a job only if it takes at most this share of the free device time until its deadline
    most_area_s: float = np.inf  # admit no job that needs more device seconds
    resize_s: float = 0.0  # elastic: time lost when the count changes

    @property
    def numbers(self) -> NDArray[np.float64]:
        """For the kernel."""
        return np.array(
            [self.order, self.by_area, self.retry, self.most_share, self.most_area_s, self.resize_s]
        )


@dataclass(frozen=True, slots=True, eq=False)
class TraceOutcome:
    """What became of every job."""

    end_s: NDArray[np.float64]  # [J] nan where it never ran
    start_s: NDArray[np.float64]  # [J]
    devices: NDArray[np.int64]  # [J] count at the start
    admitted: NDArray[np.bool_]  # [J]
    met: NDArray[np.bool_]  # [J]
    device_s: float

    @property
    def num_met(self) -> int:
        """Deadlines met."""
        return int(self.met.sum())

    @property
    def num_late(self) -> int:
        """Admitted and not in time: broken promises."""
        return int((self.admitted & ~self.met).sum())


def host_sizes(num_devices: int, per_host: int = 8) -> NDArray[np.int64]:
    """Full hosts, then what is left."""
    if num_devices < 1 or per_host < 1:
        raise InputError(f"{num_devices} devices on hosts of {per_host}: both must be at least 1")
    full, rest = divmod(num_devices, per_host)
    return np.array([per_host] * full + [rest] * (rest > 0), np.int64)


def replay_trace(
    stream: TraceStream,
    rule: TraceRule,
    hosts: NDArray[np.int64],
    *,
    host_kind: NDArray[np.int64] | None = None,
    elastic: bool = False,
) -> TraceOutcome:
    """One stream under one rule on hosts of given sizes."""
    kinds = np.zeros(len(hosts), np.int64) if host_kind is None else np.asarray(host_kind, np.int64)
    if kinds.max(initial=0) >= len(stream.kinds):
        raise InputError(
            f"a host has kind {kinds.max()}, the stream has {len(stream.kinds)} ({', '.join(stream.kinds)})"
        )
    levels = np.array(LEVELS, np.int64)
    if not elastic:
        end, start, devices, admitted, device_s = _replay_rigid(
            stream.arrival_s,
            stream.due_s,
            stream.duration_s,
            stream.reference,
            hosts,
            kinds,
            levels,
            rule.numbers,
        )
    else:
        if len(stream.kinds) > 1 or rule.order not in (Order.RESERVE, Order.LIST):
            raise InputError("an elastic replay serves one kind of device and the rules RESERVE and LIST")
        duration = np.where(levels <= hosts.max(), stream.duration_s[:, 0, 0], stream.duration_s[:, 0, 1])
        end, start, devices, admitted, device_s = _replay_elastic(
            stream.arrival_s, stream.due_s, duration, int(hosts.sum()), levels, rule.numbers
        )
    met = end <= stream.due_s * (1 + 1e-12) + 1e-6
    return TraceOutcome(end, start, devices, admitted, met, device_s)


@kernel
def _find_hosts(n, kind, free, host_kind, taken):
    """Devices taken of each host: 0 in one host, 1 spread, -1 none."""
    best = -1
    total = 0
    for h in range(len(free)):
        taken[h] = 0
        if host_kind[h] == kind:
            total += free[h]
            if free[h] >= n and (best < 0 or free[h] < free[best]):
                best = h
    if best >= 0:
        taken[best] = n
        return 0
    if total < n:
        return -1
    left = n
    while left > 0:
        most = -1
        for h in range(len(free)):
            if host_kind[h] == kind and taken[h] == 0 and free[h] > 0 and (most < 0 or free[h] > free[most]):
                most = h
        taken[most] = min(left, free[most])
        left -= taken[most]
    return 1


@kernel
def _least_area(duration, limit, levels):
    """Least device time over kinds, forms and counts in time."""
    best = np.inf
    for g in range(duration.shape[0]):
        for f in range(2):
            for q in range(len(levels)):
                if duration[g, f, q] <= limit:
                    best = min(best, duration[g, f, q] * levels[q])
    return best


@kernel
def _pick_start(order, duration, limit, reference, free, host_kind, levels, taken, trial, best_area):
    """The count and form to start a waiting job with now: duration, level; none if level < 0."""
    chosen, chosen_time, chosen_key = -1, 0.0, np.inf
    for q in range(len(levels)):
        if order <= 1 and q != reference:
            continue
        for g in range(duration.shape[0]):
            form = _find_hosts(levels[q], g, free, host_kind, trial)
            if form < 0:
                continue
            time = duration[g, form, q]
            if time > limit:
                continue
            key = time * levels[q]
            if order == 2:
                key = -float(levels[q])
            elif order == 3:
                key = levels[q] * 1e9 + time
            if key < chosen_key:
                chosen, chosen_time, chosen_key = q, time, key
                for h in range(len(free)):
                    taken[h] = trial[h]
    if (
        order == 4
        and chosen >= 0
        and chosen_time * levels[chosen] > 1.25 * best_area
        and limit > 1.5 * chosen_time
    ):
        return -1, 0.0  # a better count may come free in time
    return chosen, chosen_time


@kernel
def _replay_rigid(arrival, due, duration, reference, hosts, host_kind, levels, rule):
    num = len(arrival)
    num_hosts = len(hosts)
    order = int(rule[0])
    capacity = hosts.sum()
    end = np.full(num, np.nan)
    start = np.full(num, np.nan)
    count = np.zeros(num, np.int64)
    admitted = np.zeros(num, np.bool_)
    free = hosts.copy()
    held = np.zeros((capacity, num_hosts), np.int64)
    run_job = np.full(capacity, -1)
    waiting = np.empty(num, np.int64)
    num_waiting = 0
    form_of = np.zeros(len(levels), np.int64)  # which form a plan may count on
    for q in range(len(levels)):
        form_of[q] = 0 if levels[q] <= hosts.max() else 1
    taken = np.zeros(num_hosts, np.int64)
    trial = np.zeros(num_hosts, np.int64)
    at = 0
    device_s = 0.0
    now = 0.0
    wake = np.inf
    while True:
        soonest = np.inf
        for r in range(capacity):
            if run_job[r] >= 0:
                soonest = min(soonest, end[run_job[r]])
        next_arrival = arrival[at] if at < num else np.inf
        now = min(min(soonest, next_arrival), wake)
        wake = np.inf
        if now == np.inf:
            break
        for r in range(capacity):
            if run_job[r] >= 0 and end[run_job[r]] <= now:
                run_job[r] = -1
                for h in range(num_hosts):
                    free[h] += held[r, h]
        first_new = num_waiting
        while at < num and arrival[at] <= now:
            j = at
            at += 1
            area = _least_area(duration[j], due[j] - now, levels)
            if area <= rule[4]:
                waiting[num_waiting] = j
                num_waiting += 1
        # drop what can no longer be in time
        kept = 0
        kept_first = 0
        for i in range(num_waiting):
            j = waiting[i]
            if i == first_new:
                kept_first = kept
            limit = due[j] - now
            possible = _least_area(duration[j], limit, levels) < np.inf
            if order <= 1:
                possible = duration[j, :, :, reference[j]].min() <= limit
            if possible or admitted[j]:
                waiting[kept] = j
                kept += 1
        if first_new >= num_waiting:
            kept_first = kept
        num_waiting = kept
        key = np.empty(num_waiting)
        for i in range(num_waiting):
            j = waiting[i]
            if order == 0 or order == 2:
                key[i] = j
            elif order == 4:
                key[i] = _least_area(duration[j], due[j] - now, levels)
            else:
                key[i] = due[j]
        sequence = np.argsort(key)
        if order < 5:
            gone = np.zeros(num_waiting, np.bool_)
            for s in range(num_waiting):
                j = waiting[sequence[s]]
                best_area = _least_area(duration[j], due[j] - now, levels)
                if best_area > rule[3] * capacity * (due[j] - now):
                    continue
                q, time = _pick_start(
                    order,
                    duration[j],
                    due[j] - now,
                    reference[j],
                    free,
                    host_kind,
                    levels,
                    taken,
                    trial,
                    best_area,
                )
                if q < 0:
                    if order == 0:
                        break
                    later = due[j] - 1.5 * _slowest(duration[j], levels)
                    if order == 4 and later > now:
                        wake = min(wake, later)
                    continue
                device_s += _start(
                    j, q, time, now, end, start, count, admitted, run_job, held, free, taken, levels
                )
                gone[sequence[s]] = True
            left = 0
            for i in range(num_waiting):
                if not gone[i]:
                    waiting[left] = waiting[i]
                    left += 1
            num_waiting = left
            continue
        # reservations: promise newcomers one by one, then start what the plan starts now
        times = np.empty(2 * (num + capacity) + 2)
        room = np.empty(2 * (num + capacity) + 2)
        plan_start = np.full(num, np.inf)
        plan_level = np.zeros(num, np.int64)
        kind = host_kind[0]
        for s in range(num_waiting):
            i = sequence[s]
            j = waiting[i]
            if admitted[j] or (i < kept_first and rule[2] == 0):
                continue
            if i < kept_first and soonest > now:
                continue
            admitted[j] = True
            if not _plan_rigid(
                now,
                waiting,
                num_waiting,
                sequence,
                admitted,
                due,
                duration,
                levels,
                kind,
                capacity,
                end,
                run_job,
                count,
                times,
                room,
                plan_start,
                plan_level,
                rule,
                -1,
                0,
                form_of,
            ):
                admitted[j] = False
        fits = _plan_rigid(
            now,
            waiting,
            num_waiting,
            sequence,
            admitted,
            due,
            duration,
            levels,
            kind,
            capacity,
            end,
            run_job,
            count,
            times,
            room,
            plan_start,
            plan_level,
            rule,
            -1,
            0,
            form_of,
        )
        gone = np.zeros(num_waiting, np.bool_)
        for s in range(num_waiting):
            j = waiting[sequence[s]]
            if not admitted[j] or (fits and plan_start[j] > now):
                continue
            level = plan_level[j] if fits else reference[j]
            form = _find_hosts(levels[level], kind, free, host_kind, taken)
            if (
                form < 0 or duration[j, kind, form, level] > due[j] - now
            ):  # the hosts are fragmented: another count
                level, _ = _pick_start(
                    5, duration[j], due[j] - now, reference[j], free, host_kind, levels, taken, trial, 0.0
                )
                form = _find_hosts(levels[level], kind, free, host_kind, taken) if level >= 0 else -1
            if form < 0 and now + _fastest(duration[j]) > due[j]:  # a broken promise
                gone[sequence[s]] = True
                continue
            if form < 0:
                continue
            time = duration[j, kind, form, level]
            # spare devices: a larger count where every promise still holds
            for q in range(level + 1, len(levels)):
                faster = _find_hosts(levels[q], kind, free, host_kind, trial)
                if faster < 0 or duration[j, kind, faster, q] >= time:
                    continue
                if rule[1] > 0 and duration[j, kind, faster, q] * levels[q] > time * levels[level]:
                    continue
                ok = _plan_rigid(
                    now,
                    waiting,
                    num_waiting,
                    sequence,
                    admitted,
                    due,
                    duration,
                    levels,
                    kind,
                    capacity,
                    end,
                    run_job,
                    count,
                    times,
                    room,
                    plan_start,
                    plan_level,
                    rule,
                    j,
                    q,
                    form_of,
                )
                if ok:
                    level = q
                    time = duration[j, kind, faster, q]
                    for h in range(num_hosts):
                        taken[h] = trial[h]
            device_s += _start(
                j, level, time, now, end, start, count, admitted, run_job, held, free, taken, levels
            )
            gone[sequence[s]] = True
            fits = _plan_rigid(
                now,
                waiting,
                num_waiting,
                sequence,
                admitted & np.isnan(start),
                due,
                duration,
                levels,
                kind,
                capacity,
                end,
                run_job,
                count,
                times,
                room,
                plan_start,
                plan_level,
                rule,
                -1,
                0,
                form_of,
            )
        left = 0
        for i in range(num_waiting):
            if not gone[i] and (admitted[waiting[i]] or rule[2] > 0):
                waiting[left] = waiting[i]
                if admitted[waiting[i]]:
                    planned = plan_start[waiting[i]]
                    if planned > now and planned < np.inf:
                        wake = min(wake, planned)
                left += 1
        num_waiting = left
    return end, start, count, admitted, device_s


@kernel
def _slowest(duration, levels):
    """Time on the count with least device time."""
    best, time = np.inf, 0.0
    for q in range(len(levels)):
        if duration[0, 0, q] * levels[q] < best:
            best, time = duration[0, 0, q] * levels[q], duration[0, 0, q]
    return time


@kernel
def _fastest(duration):
    return duration.min()


@kernel
def _start(j, q, time, now, end, start, count, admitted, run_job, held, free, taken, levels):
    r = 0
    while run_job[r] >= 0:
        r += 1
    run_job[r] = j
    end[j] = now + time
    start[j] = now
    count[j] = levels[q]
    admitted[j] = True
    for h in range(len(free)):
        held[r, h] = taken[h]
        free[h] -= taken[h]
    return time * levels[q]


@kernel
def _plan_rigid(
    now,
    waiting,
    num_waiting,
    sequence,
    admitted,
    due,
    duration,
    levels,
    kind,
    capacity,
    end,
    run_job,
    count,
    times,
    room,
    plan_start,
    plan_level,
    rule,
    forced,
    forced_level,
    form_of,
):
    """Reserve a start and a count for every promised job by deadline; False where one cannot be kept."""
    size = 2
    times[0], room[0] = now, float(capacity)
    times[1], room[1] = np.inf, 0.0
    for r in range(len(run_job)):
        if run_job[r] >= 0:
            size = _reserve(times, room, size, now, end[run_job[r]], float(count[run_job[r]]))
    for turn in range(-1, num_waiting):
        j = forced if turn < 0 else waiting[sequence[turn]]
        if turn < 0 and forced < 0:
            continue
        if turn >= 0 and (not admitted[j] or j == forced):
            continue
        best_start, best_level, best_key = np.inf, -1, np.inf
        for q in range(len(levels)):
            if turn < 0 and q != forced_level:
                continue
            time = duration[j, kind, form_of[q], q]
            if now + time > due[j]:
                continue
            begin = _earliest(times, room, size, time, float(levels[q]), due[j])
            if begin == np.inf:
                continue
            key = time * levels[q] if rule[1] > 0 else float(q)
            if key < best_key:
                best_start, best_level, best_key = begin, q, key
        if best_level < 0:
            return False
        free_time = 0.0
        if rule[3] < np.inf and turn >= 0:
            for i in range(size - 1):
                free_time += max(0.0, min(times[i + 1], due[j]) - times[i]) * room[i]
            if best_key > rule[3] * free_time and rule[1] > 0 and np.isinf(plan_start[j]):
                return False
        plan_start[j], plan_level[j] = best_start, best_level
        size = _reserve(
            times,
            room,
            size,
            best_start,
            best_start + duration[j, kind, form_of[best_level], best_level],
            float(levels[best_level]),
        )
    return True


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
def _reserve(times, room, size, begin, finish, amount):
    if finish <= begin:
        return size
    a, size = _cut(times, room, size, begin)
    b, size = _cut(times, room, size, finish)
    for i in range(a, b):
        room[i] -= amount
    return size


@kernel
def _earliest(times, room, size, time, amount, due):
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
    """Minimum satisfactory shares by deadline; `first` gets the level of each job now, or -1."""
    size = 2
    times[0], room[0] = now, float(capacity)
    times[1], room[1] = np.inf, 0.0
    key = np.empty(num_active)
    for i in range(num_active):
        j = active[i]
        key[i] = remaining[j] * (duration[j] * levels).min() if rule[0] == 4 else due[j]
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
        if best_top < 0 and newcomer >= 0:
            return False
        if best_top < 0:  # a promise that a later plan cannot keep: as fast as may be
            best_top = len(levels) - 1
        if j == newcomer and rule[3] < np.inf:
            spare = 0.0
            for s in range(size - 1):
                spare += max(0.0, min(times[s + 1], due[j]) - times[s]) * room[s]
            if best_area > rule[3] * spare:
                return False
        left = remaining[j]
        s = 0
        while left > 1e-12 and times[s] < due[j] and s < size - 1:
            q = _level_within(min(room[s], float(levels[best_top])), levels, duration[j])
            if q >= 0:
                finish = min(min(times[s + 1], due[j]), times[s] + left * duration[j, q])
                left -= (finish - times[s]) / duration[j, q]
                begin = times[s]
                if finish > begin:
                    size = _reserve(times, room, size, begin, finish, float(levels[q]))
                    if begin == now:
                        first[j] = q
            s += 1
    return True


@kernel
def _replay_elastic(arrival, due, duration, capacity, levels, rule):
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
    while True:
        then = min(min(next_end, next_border), arrival[at] if at < num else np.inf)
        if then == np.inf:
            break
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
        if ended and rule[2] > 0:  # ask again for those that wait, least device time first
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
    return end, start, count, admitted, device_s

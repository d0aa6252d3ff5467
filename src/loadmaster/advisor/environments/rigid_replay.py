"""The event loop of rigid jobs, compiled: they wait, start on a number of devices, and keep them to the end.

Rigid jobs stand on hosts: one host where they fit (tightest first), else spread over hosts at the measured
spread rate.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from typing import Any

import numpy as np

from loadmaster.advisor.environments.elastic_replay import MOST_FAILURES
from loadmaster.advisor.environments.rigid_plans import plan_rigid
from loadmaster.simulator.jit import kernel


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
def replay_rigid(
    arrival: Any, due: Any, duration: Any, reference: Any, hosts: Any, host_kind: Any, levels: Any, rule: Any
) -> Any:
    """Every arrival, start and end in order."""
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
    history = np.zeros((4 * num + 16, 3))  # until when, free devices, most of them on one host
    num_notes = 0
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
        if num_notes < len(history):
            history[num_notes, 0], history[num_notes, 1] = now, free.sum()
            history[num_notes, 2] = free.max()
            num_notes += 1
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
        asked = sequence
        failures = 0
        if order == 6:  # the set again, least device time first
            for i in range(num_waiting):
                admitted[waiting[i]] = False
                key[i] = _least_area(duration[waiting[i]], due[waiting[i]] - now, levels)
            asked = np.argsort(key)
        for s in range(num_waiting):
            i = asked[s]
            j = waiting[i]
            if failures >= MOST_FAILURES:
                break
            if order != 6 and (admitted[j] or (i < kept_first and rule[2] == 0)):
                continue
            if order != 6 and i < kept_first and soonest > now:
                continue
            admitted[j] = True
            if not plan_rigid(
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
                failures += order == 6
        fits = plan_rigid(
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
                ok = plan_rigid(
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
            fits = plan_rigid(
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
            if not gone[i] and (admitted[waiting[i]] or rule[2] > 0 or order == 6):
                waiting[left] = waiting[i]
                if admitted[waiting[i]]:
                    planned = plan_start[waiting[i]]
                    if planned > now and planned < np.inf:
                        wake = min(wake, planned)
                left += 1
        num_waiting = left
    return end, start, count, admitted, device_s, history[:num_notes]


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

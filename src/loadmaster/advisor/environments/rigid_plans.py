"""Plans of rigid jobs by deadline: a start and a number of devices reserved for each; compiled."""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

import numpy as np

from loadmaster.advisor.environments.elastic_replay import MOST_TURNS
from loadmaster.advisor.environments.reservations import earliest, reserve
from loadmaster.simulator.jit import kernel

_KEPT = -2


@kernel
def plan_rigid(
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
    """Reserve a start and a count for every promised job by deadline; False where one cannot be kept.

    SET: a job that does not fit in its turn is planned before all others, up to MOST_TURNS times.
    """
    line = sequence[:num_waiting].copy()
    turns = MOST_TURNS if rule[0] == 6 else 0
    while True:
        failed = _plan_in_turn(
            now,
            waiting,
            line,
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
        )
        if failed == _KEPT:
            return True
        if failed <= 0 or turns == 0:  # the forced one, or one that comes first already
            return False
        turns -= 1
        first = line[failed]
        for turn in range(failed, 0, -1):
            line[turn] = line[turn - 1]
        line[0] = first


@kernel
def _plan_in_turn(
    now,
    waiting,
    line,
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
    """Reservations in the order of `line`; the turn of a job that does not fit (-1: the forced one), or
    _KEPT."""
    size = 2
    times[0], room[0] = now, float(capacity)
    times[1], room[1] = np.inf, 0.0
    for r in range(len(run_job)):
        if run_job[r] >= 0:
            size = reserve(times, room, size, now, end[run_job[r]], float(count[run_job[r]]))
    for turn in range(-1, len(line)):
        j = forced if turn < 0 else waiting[line[turn]]
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
            begin = earliest(times, room, size, time, float(levels[q]), due[j])
            if begin == np.inf:
                continue
            key = time * levels[q] if rule[1] > 0 else float(q)
            if key < best_key:
                best_start, best_level, best_key = begin, q, key
        if best_level < 0:
            return turn
        free_time = 0.0
        if rule[3] < np.inf and turn >= 0:
            for i in range(size - 1):
                free_time += max(0.0, min(times[i + 1], due[j]) - times[i]) * room[i]
            if best_key > rule[3] * free_time and rule[1] > 0 and np.isinf(plan_start[j]):
                return turn
        plan_start[j], plan_level[j] = best_start, best_level
        size = reserve(
            times,
            room,
            size,
            best_start,
            best_start + duration[j, kind, form_of[best_level], best_level],
            float(levels[best_level]),
        )
    return _KEPT

"""Sampled futures of a cluster of hosts, compiled: each job takes the fewest devices in time.

A group is the devices of one kind on one host; only counts matter, since free devices of a group are alike.
A job takes the tightest group with room, else the fullest groups together, as `ClusterState.free_blocks`
does. O(groups) for each job that comes.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.jobs.curve import HOST, SPREAD
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState, Layout
from loadmaster.simulator.jit import kernel


@dataclass(frozen=True, slots=True, eq=False)
class Futures:
    """Jobs that may come, and drawn orders of them; [F futures, H arrivals]."""

    gap_s: NDArray[np.float64]  # [F, H] time since the arrival before
    job: NDArray[np.int64]  # [F, H] index of the job that comes


@dataclass(frozen=True, slots=True, eq=False)
class JobTable:
    """Times of J jobs on K kinds, 2 forms (one host, spread) and Q numbers of devices."""

    degree: NDArray[np.int64]  # [Q]
    time_s: NDArray[np.float64]  # [J, K, 2, Q], inf where a job cannot run
    deadline_s: NDArray[np.float64]  # [J]
    value: NDArray[np.float64]  # [J]


def draw_futures(rng: np.random.Generator, jobs: int, mean_gap_s: float, shape: tuple[int, int]) -> Futures:
    """So many futures of so many arrivals; the same for every answer that is compared."""
    return Futures(rng.exponential(mean_gap_s, shape), rng.integers(jobs, size=shape))


def job_table(jobs: Sequence[Job], layout: Layout) -> JobTable:
    """The curves of jobs as one array."""
    degrees = sorted({n for job in jobs for n in job.curve.degrees})
    time = [
        [
            [[job.curve.time(n, kind, form) for n in degrees] for form in (HOST, SPREAD)]
            for kind in layout.kinds
        ]
        for job in jobs
    ]
    return JobTable(
        np.array(degrees, np.int64),
        np.array(time, np.float64),
        np.array([job.deadline_s for job in jobs]),
        np.array([job.value for job in jobs]),
    )


def future_value(state: ClusterState, table: JobTable, futures: Futures) -> float:
    """Value that all futures let in, from a state on."""
    layout = state.layout
    labels = layout.host * len(layout.kinds) + layout.kind
    label, group = np.unique(labels, return_inverse=True)
    free = np.bincount(group[state.is_free], minlength=len(label))
    busy = np.flatnonzero(~state.is_free & np.isfinite(state.free_at_s))
    order = busy[np.argsort(state.free_at_s[busy], kind="stable")]
    arguments: Any = (
        state.now_s,
        free,
        label % len(layout.kinds),
        state.free_at_s[order],
        group[order],
        table.degree,
        table.time_s,
        table.deadline_s,
        table.value,
        futures.gap_s,
        futures.job,
    )
    return float(_play_futures(*arguments))


@kernel
def _find_groups(n, kind, free, kind_of, taken, touched):
    """Groups and devices taken of each: form 0 in one group, 1 spread, -1 none; the number of groups."""
    best, total = -1, 0
    for g in range(len(free)):
        if kind_of[g] == kind:
            total += free[g]
            if free[g] >= n and (best < 0 or free[g] < free[best]):
                best = g
    if best >= 0:
        touched[0], taken[0] = best, n
        return 0, 1
    if total < n:
        return -1, 0
    left, count = n, 0
    while left > 0:
        most = -1
        for g in range(len(free)):
            if kind_of[g] != kind or free[g] == 0 or (most >= 0 and free[g] <= free[most]):
                continue
            again = False
            for i in range(count):
                again = again or touched[i] == g
            if not again:
                most = g
        touched[count], taken[count] = most, min(left, free[most])
        left -= taken[count]
        count += 1
    return 1, count


@kernel
def _play_futures(now, free, kind_of, end, group, degree, time, deadline, value, gap, job):
    total = 0.0
    num_kinds, widest = time.shape[1], int(degree.max())
    room = np.empty(len(free), np.int64)
    ends = np.empty(gap.shape[1] * widest + 1)
    held = np.empty((gap.shape[1] * widest + 1, 2), np.int64)
    taken, touched = np.empty(widest, np.int64), np.empty(widest, np.int64)
    best_taken, best_touched = np.empty(widest, np.int64), np.empty(widest, np.int64)
    for f in range(gap.shape[0]):
        room[:] = free
        released, running, then = 0, 0, now
        for a in range(gap.shape[1]):
            then += gap[f, a]
            j = job[f, a]
            while released < len(end) and end[released] <= then + 1e-7:
                room[group[released]] += 1
                released += 1
            i = 0
            while i < running:
                if ends[i] <= then + 1e-7:
                    room[held[i, 0]] += held[i, 1]
                    running -= 1
                    ends[i] = ends[running]
                    held[i, 0], held[i, 1] = held[running, 0], held[running, 1]
                else:
                    i += 1
            for q in range(len(degree)):
                if time[j, :, :, q].min() > deadline[j]:
                    continue
                best_time, best_count = np.inf, 0
                for kind in range(num_kinds):
                    form, count = _find_groups(degree[q], kind, room, kind_of, taken, touched)
                    if form >= 0 and time[j, kind, form, q] < best_time:
                        best_time, best_count = time[j, kind, form, q], count
                        best_taken[:count], best_touched[:count] = taken[:count], touched[:count]
                if best_time <= deadline[j]:
                    for i in range(best_count):
                        g = best_touched[i]
                        room[g] -= best_taken[i]
                        ends[running] = then + best_time
                        held[running, 0], held[running, 1] = g, best_taken[i]
                        running += 1
                    total += value[j]
                    break
    return total

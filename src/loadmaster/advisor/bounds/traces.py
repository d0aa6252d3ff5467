"""A bound for traces: most deadlines that any schedule meets, even one that knows all arrivals.

A linear programme over slots of time. A job chooses options (a count, in one host or spread) in shares that
add up to at most one, and spreads the work of each over the slots of its window.

devices    in every slot, the device time that is used is there
rate       in no slot a job does more than its option can in the time they have in common
one place  a rigid job runs without a pause: wherever it starts, it has a least time in common with each slot
pieces     options of q devices and more share the whole pieces of q that there are
hosts      the same for options in one host and the pieces of the hosts (rigid)

Slots are only merged, never cut, so it stays a bound. Elastic jobs change options at will and need no host.

Where the programme is small, a job is in time or not (an integer programme): its proven bound is lower
still. The search for it is limited by a count of nodes, so that the same stream has the same bound.
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, diags, hstack, vstack

from loadmaster.advisor.environments.trace import LEVELS, TraceStream

_MOST_SHARES = 40_000  # slots are merged until there are no more
_MOST_INTEGER = 12_000  # columns of an integer programme; above it the linear one has to do
_MOST_NODES = 200
_SLACK = 1 + 1e-9
Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]


def possible(stream: TraceStream) -> NDArray[np.bool_]:
    """Jobs whose deadline some count meets on an empty cluster."""
    fastest = stream.duration_s.reshape(len(stream.due_s), -1).min(axis=1)
    found: NDArray[np.bool_] = fastest <= (stream.due_s - stream.arrival_s) * (1 + 1e-12)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """Counts that jobs may run on; [O] each."""

    job: Indices
    level: Indices  # devices
    in_host: NDArray[np.bool_]
    time: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """Shares of an option's work in a slot; [Y] each."""

    option: Indices
    slot: Indices
    most: Numbers  # time in common with the slot
    least: Numbers  # which a rigid job cannot avoid


def most_met(stream: TraceStream, hosts: NDArray[np.int64] | int, *, elastic: bool = False) -> float:
    """Value of deadlines met that no schedule on these hosts (or on one of so many devices) exceeds."""
    sizes = np.atleast_1d(np.asarray(hosts, np.int64))
    options = _options(stream, sizes, elastic)
    if not len(options.job):
        return 0.0
    jobs = np.unique(options.job)
    points = np.unique(np.concatenate([stream.arrival_s[jobs], stream.due_s[jobs]]))
    shares = _shares(stream, options, points, elastic)
    while len(shares.option) > _MOST_SHARES and len(points) > 50:
        fewer = max(50, int(len(points) * max(0.3, 0.95 * _MOST_SHARES / len(shares.option))))
        points = np.unique(np.quantile(points, np.linspace(0, 1, fewer)))
        shares = _shares(stream, options, points, elastic)
    return _solve(stream, options, shares, points, sizes, elastic)


def _options(stream: TraceStream, sizes: Indices, elastic: bool) -> _Options:
    """Counts in one host and spread; elastic: also those too slow alone, if a faster one is in time."""
    window = stream.due_s - stream.arrival_s
    levels = np.array(LEVELS)
    time = stream.duration_s.min(axis=1).transpose(0, 2, 1)  # [J, LEVELS, forms] best kind
    apart = (levels > 1) & (levels <= sizes.sum()) & (len(sizes) > 1)
    allowed = np.stack([levels <= sizes.max(), apart], axis=1)
    time = np.where(allowed, time, np.inf)
    in_time = time <= window[:, None, None] * _SLACK
    some = np.asarray(in_time.any(axis=(1, 2)))
    usable = np.isfinite(time) & some[:, None, None] if elastic else in_time
    if elastic:  # hosts bind nobody: the faster form of each count
        best = time.argmin(axis=2)
        usable &= np.arange(2) == best[:, :, None]
    job, q, form = np.nonzero(usable)
    return _Options(job, levels[q], form == 0, time[job, q, form])


def _shares(stream: TraceStream, options: _Options, points: Numbers, elastic: bool) -> _Shares:
    arrival, due = stream.arrival_s[options.job], stream.due_s[options.job]
    begin = np.maximum(np.searchsorted(points, arrival, side="right") - 1, 0)
    finish = np.minimum(np.searchsorted(points, due, side="left"), len(points) - 1)
    lengths = np.maximum(finish - begin, 1)
    option = np.repeat(np.arange(len(options.job)), lengths)
    slot = np.arange(len(option)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + begin[option]
    low, high = np.maximum(points[slot], arrival[option]), np.minimum(points[slot + 1], due[option])
    time = options.time[option]
    most = np.minimum(np.maximum(high - low, 0.0), time)
    # run as early as possible it ends at arrival + time, as late as possible it starts at due - time
    common = np.minimum(arrival[option] + time, high) - np.maximum(due[option] - time, low)
    least = np.clip(np.minimum(common, most), 0.0, None) * (1 - 1e-9)
    return _Shares(option, slot, most, np.zeros(len(least)) if elastic else least)


def _solve(
    stream: TraceStream, options: _Options, shares: _Shares, points: Numbers, sizes: Indices, elastic: bool
) -> float:
    """Columns: the share of each option, then the time of each option in each slot beyond its least."""
    o, y = len(options.job), len(shares.option)
    span = np.diff(points)
    ones = np.ones(y)
    kept = np.bincount(shares.option, shares.least, o)
    if elastic:
        groups = np.unique(options.job, return_inverse=True)[1]
        weight, first = 1 / options.time[shares.option], groups[shares.option]
        done = csr_matrix(
            (np.concatenate([-np.ones(o), weight]), (np.concatenate([groups, first]), np.arange(o + y))),
            shape=(int(groups.max()) + 1, o + y),
        )
    else:
        done = csr_matrix(
            (
                np.concatenate([kept - options.time, ones]),
                (np.concatenate([np.arange(o), shares.option]), np.arange(o + y)),
            ),
            shape=(o, o + y),
        )
    rows = [_room(options, shares, o, y, len(span), options.level.astype(np.float64))]
    limits = [sizes.sum() * span]
    total = int(sizes.sum())
    for q in np.unique(options.level):
        if total % q:  # at no moment more than so many options of q devices and more
            piece = np.where(options.level >= q, options.level / q, 0.0)
            rows.append(_room(options, shares, o, y, len(span), piece))
            limits.append(total // q * span)
    if not elastic:
        for q in np.unique(options.level[options.in_host]):
            if (sizes % q == 0).all():
                continue  # whole pieces are all there is
            piece = np.where(options.in_host & (options.level >= q), options.level / q, 0.0)
            rows.append(_room(options, shares, o, y, len(span), piece))
            limits.append((sizes // q).sum() * span)
    once = csr_matrix((np.ones(o), (options.job, np.arange(o))), shape=(len(stream.value), o + y))
    rows.append(once)
    limits.append(np.ones(len(stream.value)))
    rate, within = _rate(options, shares, o, y, elastic)
    rows.append(rate)
    limits.append(np.zeros(within))
    upper = np.concatenate([np.ones(o), shares.most - shares.least])
    at_most, limit = vstack(rows).tocsr(), np.concatenate(limits) * _SLACK
    answer = linprog(
        np.concatenate([-stream.value[options.job], np.zeros(y)]),
        A_ub=at_most,
        b_ub=limit,
        A_eq=done,
        b_eq=np.zeros(done.shape[0]),
        bounds=np.stack([np.zeros(o + y), upper], axis=1),
        method="highs",
    )
    best = float(stream.value[np.unique(options.job)].sum())
    if answer.status == 0:
        best = min(best, float(-answer.fun) * _SLACK + 1e-6)
    if o + y <= _MOST_INTEGER:
        best = min(best, _integer_bound(stream, options, at_most, limit, done, upper, elastic=elastic))
    whole = bool((stream.value == np.round(stream.value)).all())
    return float(math.floor(best + 1e-4)) if whole else best


def _integer_bound(
    stream: TraceStream,
    options: _Options,
    at_most: csr_matrix,
    limit: Numbers,
    done: csr_matrix,
    upper: Numbers,
    *,
    elastic: bool,
) -> float:
    """The same with a column for each job, 0 or 1; a rigid job has one option. All run from 0 to 1."""
    o, n = len(options.job), len(upper)
    jobs, row = np.unique(options.job, return_inverse=True)
    place = (
        np.concatenate([row, np.arange(len(jobs))]),
        np.concatenate([np.arange(o), n + np.arange(len(jobs))]),
    )
    link = csr_matrix(
        (np.concatenate([np.ones(o), -np.ones(len(jobs))]), place), shape=(len(jobs), n + len(jobs))
    )
    scale = diags(np.concatenate([np.where(upper > 0, upper, 1.0), np.ones(len(jobs))]))

    def scaled(matrix: csr_matrix, low: Numbers, high: Numbers) -> LinearConstraint:
        wide = hstack([matrix, csr_matrix((matrix.shape[0], len(jobs)))]).tocsr() @ scale
        most = np.maximum(abs(wide).max(axis=1).toarray().ravel(), 1e-12)
        return LinearConstraint(diags(1 / most) @ wide, low / most, high / most)

    zeros = np.zeros(done.shape[0])
    with _quiet_stdout():
        answer = milp(
            np.concatenate([np.zeros(n), -stream.value[jobs]]),
            constraints=[
                scaled(at_most, np.full(len(limit), -np.inf), limit),
                scaled(done, zeros, zeros),
                LinearConstraint(link, 0, 0),
            ],
            bounds=Bounds(0, np.concatenate([(upper > 0).astype(float), np.ones(len(jobs))])),
            integrality=np.concatenate([np.full(o, not elastic), np.zeros(n - o), np.ones(len(jobs))]),
            options={"node_limit": _MOST_NODES},
        )
    found = answer.get("mip_dual_bound")
    return math.inf if found is None or not math.isfinite(found) else float(-found) + 1e-6


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """HiGHS writes notes of its own to the process's stdout, where tables and JSON belong."""
    flush = getattr(ctypes.CDLL(None), "fflush", None) if os.name == "posix" else None
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        if sys.stdout:
            sys.stdout.flush()
        if flush is not None:
            flush(None)
        os.dup2(nowhere, 1)
        yield
    finally:
        if flush is not None:
            flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _room(options: _Options, shares: _Shares, o: int, y: int, slots: int, weight: Numbers) -> csr_matrix:
    """What each slot holds of all options."""
    each = weight[shares.option]
    return csr_matrix(
        (
            np.concatenate([each * shares.least, each]),
            (np.tile(shares.slot, 2), np.concatenate([shares.option, o + np.arange(y)])),
        ),
        shape=(slots, o + y),
    )


def _rate(options: _Options, shares: _Shares, o: int, y: int, elastic: bool) -> tuple[csr_matrix, int]:
    """Time in a slot is at most what they have in common times the share that is chosen."""
    columns = o + np.arange(y)
    if not elastic:
        values = np.concatenate([np.ones(y), shares.least - shares.most])
        place = (np.tile(np.arange(y), 2), np.concatenate([columns, shares.option]))
        return csr_matrix((values, place), shape=(y, o + y)), y
    pair = options.job[shares.option] * (int(shares.slot.max()) + 1) + shares.slot
    known, row = np.unique(pair, return_inverse=True)
    common = np.zeros(len(known))
    np.maximum.at(common, row, shares.most)
    # every option of the job holds its part of the slot
    values = np.concatenate([np.ones(y), -common[row]])
    place = (np.tile(row, 2), np.concatenate([columns, shares.option]))
    return csr_matrix((values, place), shape=(len(known), o + y)), len(known)

"""A bound for traces: most deadlines that any schedule meets, even one that knows all arrivals and resizes
at will.

A linear programme over slots of time: a job's work is spread over slots that overlap its window, at no
less device time
than its best count needs and no faster than its fastest count. Slots are only merged, never cut, so it
stays a bound.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from loadmaster.advisor.environments.trace import LEVELS, TraceStream

_MOST_SLOTS = 1000


def possible(stream: TraceStream) -> NDArray[np.bool_]:
    """Jobs whose deadline some count meets on an empty cluster."""
    fastest = stream.duration_s.reshape(len(stream.due_s), -1).min(axis=1)
    found: NDArray[np.bool_] = fastest <= (stream.due_s - stream.arrival_s) * (1 + 1e-12)
    return found


def most_met(stream: TraceStream, num_devices: int, *, elastic: bool = False) -> float:
    """Value of deadlines met that no schedule exceeds."""
    chosen = np.flatnonzero(possible(stream))
    if not len(chosen):
        return 0.0
    window = (stream.due_s - stream.arrival_s)[chosen]
    time = stream.duration_s[chosen].min(axis=(1, 2))  # [J, LEVELS] best kind and form
    time = np.where(np.array(LEVELS) <= num_devices, time, np.inf)
    in_time = time <= window[:, None] * (1 + 1e-12)
    usable = np.isfinite(time) if elastic else in_time
    area = np.where(usable, time * np.array(LEVELS), np.inf).min(axis=1)
    fits = in_time.any(axis=1)
    chosen, time, area = chosen[fits], time[fits], area[fits]
    arrival, due = stream.arrival_s[chosen], stream.due_s[chosen]
    points = np.unique(np.concatenate([arrival, due]))
    if len(points) > _MOST_SLOTS + 1:
        points = np.unique(np.quantile(points, np.linspace(0, 1, _MOST_SLOTS + 1)))
    begin = np.maximum(np.searchsorted(points, arrival, side="right") - 1, 0)
    finish = np.minimum(np.searchsorted(points, due, side="left"), len(points) - 1)
    lengths = np.maximum(finish - begin, 1)
    job = np.repeat(np.arange(len(chosen)), lengths)
    slot = np.arange(len(job)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + begin[job]
    span = np.diff(points)
    n, y = len(chosen), len(job)
    done = csr_matrix(
        (np.concatenate([np.ones(n), -np.ones(y)]), (np.concatenate([np.arange(n), job]), np.arange(n + y))),
        shape=(n, n + y),
    )
    room = csr_matrix((area[job], (slot, n + np.arange(y))), shape=(len(span), n + y))
    overlap = np.minimum(points[slot + 1], due[job]) - np.maximum(points[slot], arrival[job])
    most = np.minimum(1.0, np.maximum(overlap, 0.0) / time.min(axis=1)[job] + 1e-12)
    upper = np.concatenate([np.ones(n), most])
    answer = linprog(
        np.concatenate([-stream.value[chosen], np.zeros(y)]),
        A_ub=room,
        b_ub=num_devices * span,
        A_eq=done,
        b_eq=np.zeros(n),
        bounds=np.stack([np.zeros(n + y), upper], axis=1),
        method="highs",
    )
    return float(-answer.fun) + 1e-6 if answer.status == 0 else float(stream.value[chosen].sum())

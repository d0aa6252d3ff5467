"""Bounds for the published cluster: no policy, even one that knows all arrivals, blocks less (section 7,
number 5).

R1: all accepted jobs share the server time there is. R2: at every moment, the running jobs fit the
servers. R3: their blocks fit as well, in so far as no more blocks of 4 fit beside a 6 than beside an 8. R2
and R3 are linear programmes over the whole stream (HiGHS); each bound allows what the next forbids.
A job occupies at least `degree` servers from its arrival for its completion time, since no job waits.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack

from loadmaster.advisor.environments.blocks import DEGREES, NUM_SERVERS
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World

# no packing of blocks has more of these than _MOST_QUARTERS; of servers alone it could have 10
_QUARTERS = (0, 0, 1, 2, 2, 4)  # by degree
_MOST_QUARTERS = 8


@dataclass(frozen=True, slots=True)
class BlockingBounds:
    """Least possible blocking by each argument."""

    shared_time: float  # R1
    every_moment: float  # R2
    geometry: float  # R3


def least_blocking(world: World, stream: Stream) -> BlockingBounds:
    """The bounds of a stream; denominators as in the replay."""
    job, degree, time = _choices(world, stream)
    decided = stream.num_decided
    total = len(stream.model)
    if not len(job):
        return BlockingBounds(decided / total, decided / total, decided / total)
    by_servers, by_blocks = _most_at_every_moment(stream, job, degree, time)
    most = (_most_by_shared_time(stream, job, degree, time), by_servers, by_blocks)
    return BlockingBounds(*(max(0.0, decided - float(m)) / total for m in np.minimum.accumulate(most)))


def _choices(
    world: World, stream: Stream
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Every (job, degree) that is in time on some block, with the least servers and time it takes."""
    first = world.blocks.first
    fastest = np.stack([world.jct[:, a:b].min(axis=1) for a, b in pairwise(first)], axis=1)
    n = stream.num_decided
    model = stream.model[:n]
    time = fastest[model]
    limit = stream.beta[:n] * world.sequential[model] * (1 + 1e-9)
    good = time <= limit[:, None]
    if world.rules.horizon_blocks:
        good &= stream.arrival[:n, None] + time <= stream.horizon + 1e-6
    job, k = np.nonzero(good)
    return job, np.array(DEGREES)[k], time[job, k]


def _slots(stream: Stream, job: NDArray[np.int64], time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Server time that a job holds: nobody can use it before the next arrival."""
    ends = stream.arrival[job] + time
    after = np.searchsorted(stream.arrival, ends - 1e-7, side="left")
    last = len(stream.arrival) - 1
    return np.where(after <= last, stream.arrival[np.minimum(after, last)], ends) - stream.arrival[job]


def _most_by_shared_time(
    stream: Stream, job: NDArray[np.int64], degree: NDArray[np.int64], time: NDArray[np.float64]
) -> float:
    """Cheapest jobs first until the server time is used up."""
    area = degree * np.minimum(
        _slots(stream, job, time), np.maximum(0, stream.arrival[-1] - stream.arrival[job])
    )
    cheapest = np.full(stream.num_decided, np.inf)
    np.minimum.at(cheapest, job, area)
    ordered = np.sort(cheapest[np.isfinite(cheapest)])
    capacity = NUM_SERVERS * (stream.arrival[-1] - stream.arrival[0])
    used = np.cumsum(ordered)
    count = int(np.searchsorted(used, capacity, side="right"))
    if count == len(ordered):
        return float(count)
    return float(count + (capacity - (used[count - 1] if count else 0.0)) / ordered[count])


def _most_at_every_moment(
    stream: Stream, job: NDArray[np.int64], degree: NDArray[np.int64], time: NDArray[np.float64]
) -> tuple[float, float]:
    """Servers at every arrival, and blocks: a job covers its own arrival and all until its end."""
    until = np.searchsorted(
        stream.arrival[: stream.num_decided], stream.arrival[job] + time - 1e-7, side="left"
    )
    lengths = np.maximum(until - job, 1)
    column = np.repeat(np.arange(len(job)), lengths)
    offset = np.arange(len(column)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    row = job[column] + offset
    n = stream.num_decided
    servers, quarters = (
        csr_matrix((held[column].astype(float), (row, column)), shape=(n, len(job)))
        for held in (degree, np.array(_QUARTERS)[np.searchsorted(DEGREES, degree)])
    )
    once = csr_matrix((np.ones(len(job)), (job, np.arange(len(job)))), shape=(n, len(job)))
    found = []
    for rows, limits in (
        ([servers, once], [NUM_SERVERS, 1]),
        ([servers, once, quarters], [NUM_SERVERS, 1, _MOST_QUARTERS]),
    ):
        answer = linprog(
            -np.ones(len(job)),
            A_ub=vstack(rows).tocsr(),
            b_ub=np.repeat(np.array(limits, dtype=np.float64), n),
            bounds=(0, 1),
            method="highs",
        )
        found.append(float(-answer.fun) + 1e-6 if answer.status == 0 else float(n))
    return found[0], found[1]

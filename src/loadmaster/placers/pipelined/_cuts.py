"""Cuts: the best places to cut a line into stages for given devices, by dynamic programming.

A step takes about the sum of all stages, once, and (M - 1) times the slowest. For a limit on the slowest the
least sum is a shortest path over (stage, border); a few limits from the smallest feasible one upwards are
tried (after PipeDream, SOSP 2019, and Piper, NeurIPS 2021, which minimise the slowest alone). O(S P^2) each.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.cluster import Cluster, process_cluster
from loadmaster.core.problem import Links
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.placers.pipelined._line import Line

_LIMITS = (1.0, 1.01, 1.03, 1.07, 1.15, 1.3, 1.6, np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Borders between stages and which stages are recomputed."""

    border: tuple[int, ...]  # [S + 1] from 0 to P
    recompute: tuple[bool, ...]  # [S]
    estimate_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What is to be cut for: R replicas of S stages."""

    devices: Ints  # [R, S]
    microbatches: tuple[int, ...]  # [R]
    in_flight: Ints  # [S]
    room: Longs  # [D]
    stages_per_rank: int
    may_recompute: bool


def best_cut(line: Line, asked: Asked) -> Cut | None:
    """The best borders found, None where no cut has room."""
    num, most = asked.devices.shape[1], max(asked.microbatches)
    if num > line.num:
        return None
    times, again = zip(*(_stage_seconds(line, asked, s) for s in range(num)), strict=True)
    lowest = _least_limit(times, line.num)
    if lowest is None:
        return None
    best: Cut | None = None
    each = asked.stages_per_rank
    for factor in _LIMITS:
        found = _shortest(times, lowest * factor, line.num)
        if found is None:
            continue
        total, border = found
        stage_s = [float(times[s][border[s], border[s + 1]]) for s in range(num)]
        ranks = num // each
        slowest = max(sum(stage_s[r::ranks]) for r in range(ranks))
        estimate = total + (most - 1) * slowest
        if each > 1:  # a rank begins when the first stages before it have worked, not all of them
            estimate = total / each + (most - 1 + (each - 1) / each) * slowest
        if best is None or estimate < best.estimate_s:
            rerun = tuple(bool(again[s][border[s], border[s + 1]]) for s in range(num))
            best = Cut(border, rerun, estimate)
    return best


def _stage_seconds(line: Line, asked: Asked, s: int) -> tuple[Floats, Bools]:
    """[P + 1, P + 1] seconds of stage s from border i to border j, inf where it may not be; and whether it
    has to be recomputed.
    """
    cluster, size = process_cluster(line.problem.cluster), line.num + 1
    worst: Floats = np.zeros((size, size))
    again: Bools = np.zeros((size, size), dtype=np.bool_)
    below = np.arange(size)[:, None] >= np.arange(size)[None, :]
    most = max(asked.microbatches)
    resident, stash = _span(line.resident_bytes), _span(line.stash_bytes)
    arriving = line.forward_bytes[:, None]
    for row, count in zip(asked.devices, asked.microbatches, strict=True):
        d = int(row[s])
        kind = int(cluster.kind[d])
        forward = _span(line.forward_s[:, kind])
        whole = forward + _span(line.backward_s[:, kind])
        flight = int(asked.in_flight[s])
        room = int(asked.room[d]) // asked.stages_per_rank
        fits = resident + flight * (stash + arriving) <= room
        lean = resident + stash + flight * arriving <= room
        refused = _span(line.refused[:, d]) > 0
        if not asked.may_recompute:
            lean = fits
        again |= ~fits & lean
        slow = np.where(fits, whole, np.where(lean, whole + forward, np.inf))
        slow[refused] = np.inf
        if s > 0:
            slow = np.maximum(slow, _border_s(line, cluster, int(row[s - 1]), d)[:, None])
        worst = np.maximum(worst, slow * (count / most))
    worst[below] = np.inf
    return worst, again


def _span(sums: "np.typing.NDArray[np.generic]") -> Floats:
    """[P + 1, P + 1] of the segments between two borders."""
    values = sums.astype(np.float64)
    found: Floats = values[None, :] - values[:, None]
    return found


def _border_s(line: Line, cluster: Cluster, source: int, target: int) -> Floats:
    """[P + 1] the slower way of what is sent over each border for a micro-batch."""
    if source == target:
        return np.zeros(line.num + 1)
    latency, rate = route_latency_s(cluster), route_bytes_per_s(cluster)
    up = latency[source, target] + line.forward_bytes / rate[source, target]
    down = latency[target, source] + line.backward_bytes / rate[target, source]
    up = np.where(line.forward_given_s >= 0, line.forward_given_s, up)
    down = np.where(line.backward_given_s >= 0, line.backward_given_s, down)
    apart = line.problem.links in (Links.SHARED, Links.PARALLEL)
    found: Floats = np.maximum(up, down) if apart else up + down
    return found


def _least_limit(times: tuple[Floats, ...], num: int) -> float | None:
    """The least slowest stage of any cut, None where there is no cut."""
    reach = np.full(num + 1, np.inf)
    reach[0] = 0.0
    for stage in times:
        reach = np.maximum(reach[:, None], stage).min(axis=0)
    return float(reach[num]) if np.isfinite(reach[num]) else None


def _shortest(times: tuple[Floats, ...], limit: float, num: int) -> tuple[float, tuple[int, ...]] | None:
    """The least sum of stages of which none is above the limit, and its borders."""
    total = np.full(num + 1, np.inf)
    total[0] = 0.0
    choice = []
    for stage in times:
        step = total[:, None] + np.where(stage <= limit * (1 + 1e-12), stage, np.inf)
        choice.append(step.argmin(axis=0))
        total = step.min(axis=0)
    if not np.isfinite(total[num]):
        return None
    border = [num]
    for before in reversed(choice):
        border.append(int(before[border[-1]]))
    return float(total[num]), tuple(border[::-1])

"""Shares: how many rows each device of a set takes: even, in proportion to speed, or by a linear programme.

The programme is HAP's (Zhang et al., "HAP: SPMD DNN Training on Heterogeneous GPU Clusters", EuroSys
2024) with its constants and memory kept: minimise the sum over instructions k of z_k with z_k >= a_kd +
g_kd r_d for every device, sum r = 1, 0 <= r_d <= cap_d. With one instruction its optimum is found by
filling up to a level.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from loadmaster.core.arrays import Floats
from loadmaster.core.errors import PlanError

EVEN, PROPORTIONAL, BALANCED = VARIANTS = ("even", "proportional", "balanced")


def solve_shares(fixed_s: Floats, slope_s: Floats, most: Floats | None = None) -> Floats:
    """[D] shares; `fixed_s` and `slope_s` are [K, D] seconds of each instruction on each device."""
    count, devices = fixed_s.shape
    caps = np.ones(devices) if most is None else np.minimum(most, 1.0)
    if caps.sum() < 1.0 - 1e-12:
        raise PlanError(f"the devices have memory for {caps.sum():.3g} of the batch; use fewer rows")
    rows = np.zeros((count * devices, devices + count))
    limit = np.zeros(count * devices)
    for k in range(count):
        at = slice(k * devices, (k + 1) * devices)
        rows[at, :devices] = np.diag(slope_s[k])
        rows[at, devices + k] = -1.0
        limit[at] = -fixed_s[k]
    whole = np.concatenate([np.ones(devices), np.zeros(count)])[None, :]
    goal = np.concatenate([np.zeros(devices), np.ones(count)])
    bounds = [(0.0, float(cap)) for cap in caps] + [(0.0, None)] * count
    solved = linprog(goal, rows, limit, whole, [1.0], bounds=bounds, method="highs")
    if solved.status != 0:
        raise PlanError(f"no shares of the rows were found: {solved.message}")
    found = np.maximum(solved.x[:devices], 0.0)
    shares: Floats = found / found.sum()
    return shares


def fill_shares(fixed_s: Floats, slope_s: Floats, most: Floats) -> Floats:
    """The programme with one instruction: each device is filled up to the same level of time."""
    if slope_s.max() <= 1e-15:
        return np.full(len(slope_s), 1.0 / len(slope_s))  # no work: any shares do
    slope = np.maximum(slope_s, 1e-30)
    caps = np.minimum(most, 1.0)
    if caps.sum() < 1.0:
        caps = caps / max(float(caps.sum()), 1e-30)  # nothing fits: the score will say so
    low, high = float(fixed_s.min()), float((fixed_s + slope).max())
    for _ in range(60):
        level = (low + high) / 2
        if float(np.clip((level - fixed_s) / slope, 0.0, caps).sum()) >= 1.0:
            high = level
        else:
            low = level
    found = np.clip((high - fixed_s) / slope, 0.0, caps)
    shares: Floats = found / max(float(found.sum()), 1e-30)
    return shares


def round_rows(batch: int, shares: Sequence[float] | Floats) -> tuple[int, ...]:
    """Whole rows by largest remainder; a device may be left with none."""
    weight = np.maximum(np.asarray(shares, dtype=np.float64), 0.0)
    if weight.sum() <= 0:
        weight = np.ones(len(weight))  # none is quicker than another
    exact = batch * weight / weight.sum()
    rows = np.floor(exact + 1e-9).astype(np.int64)
    left = batch - int(rows.sum())
    rows[np.argsort(rows - exact, kind="stable")[:left]] += 1
    return tuple(int(r) for r in rows)

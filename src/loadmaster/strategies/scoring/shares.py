"""Shares: how many rows each device of a set takes: even, in proportion to speed, or filled up to a level.

The level is the optimum of HAP's linear programme (Zhang et al., "HAP: SPMD DNN Training on Heterogeneous
GPU Clusters", EuroSys 2024) for one instruction, with its constants and memory kept: minimise z with z >=
a_d + g_d r_d for every device, sum r = 1, 0 <= r_d <= cap_d.
"""

from collections.abc import Sequence

import numpy as np

from loadmaster.core.arrays import Floats

EVEN, PROPORTIONAL, BALANCED = VARIANTS = ("even", "proportional", "balanced")


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

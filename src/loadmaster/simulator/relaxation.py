"""The fractional relaxation: units spread at will over classes of engines, and what that costs.

    minimise T   such that   every unit is spread over the classes it may use (fractions sum to 1),
                             sum of p_uc y_uc <= n_c T          the engines of class c have time
                             sum of m_u  y_uc <= M_c            and, with memory, its devices have room

Its dual (w: price of a second, v: price of a byte) is

    T >= sum over u of min over c of (w_c p_uc + v_c m_u) - sum over c of v_c M_c     where  sum_c n_c w_c = 1

for any w, v >= 0. So every point (w, v) is a proven bound, however it was found; Kelley's cutting planes
look for the best one. Each round costs one pass over the distinct units and a tiny linear programme.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from loadmaster.core.arrays import Floats

_ROUNDS = 60
_TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """U units on C classes of engines that are alike."""

    count: Floats  # [C] engines
    memory_bytes: Floats  # [C]
    seconds: Floats  # [U, C] inf = not allowed
    held_bytes: Floats  # [U] at the end of the step


def fractional_s(classes: Classes, *, with_memory: bool) -> float:
    """A proven lower bound of the busiest engine's time, within 1e-7 of the relaxation's optimum."""
    num = len(classes.count)
    if num == 1:
        return float(classes.seconds.sum() / classes.count[0])
    scaled, times, unit_s = _scaled(classes, with_memory)
    if unit_s == 0.0:
        return 0.0
    point = np.concatenate([np.full(num, 1.0 / classes.count.sum()), np.zeros(num)])
    best, cuts = 0.0, []
    for _ in range(_ROUNDS):
        value, cut = _evaluate(scaled, times, point)
        best = max(best, value)
        cuts.append(np.append(-cut, 1.0))
        found = linprog(
            np.append(np.zeros(2 * num), -1.0),
            A_ub=np.array(cuts),
            b_ub=np.zeros(len(cuts)),
            A_eq=np.concatenate([classes.count, np.zeros(num + 1)])[None, :],
            b_eq=np.ones(1),
            bounds=[(0, None)] * num + [(0, 10.0 if with_memory else 0.0)] * num + [(None, None)],
            method="highs",
        )
        if found.status != 0 or found.x is None or found.x[-1] <= best * (1 + _TOLERANCE):
            break
        point = np.maximum(found.x[:-1], 0.0)
        point[:num] /= classes.count @ point[:num]
    return best * unit_s


def _scaled(classes: Classes, with_memory: bool) -> tuple[Classes, Floats, float]:
    """Distinct units with their number, seconds in units of the serial time, bytes as shares of a class."""
    num = len(classes.count)
    held = classes.held_bytes if with_memory else np.zeros(len(classes.held_bytes))
    rows = np.column_stack([classes.seconds, held])
    rows, times = np.unique(rows[(rows > 0).any(axis=1)], axis=0, return_counts=True)
    slowest = np.where(np.isfinite(rows[:, :num]), rows[:, :num], 0.0).max(axis=1, initial=0.0)
    unit_s = float(times @ slowest)
    scale = unit_s if unit_s > 0 else 1.0
    whole = Classes(classes.count, classes.memory_bytes, rows[:, :num] / scale, rows[:, num])
    return whole, times.astype(np.float64), unit_s


def _evaluate(classes: Classes, times: Floats, point: Floats) -> tuple[float, Floats]:
    """The dual at a point and its gradient; v is the price of a whole class's memory."""
    num = len(classes.count)
    share = classes.held_bytes[:, None] / classes.memory_bytes
    with np.errstate(invalid="ignore"):
        price = np.where(np.isfinite(classes.seconds), point[:num] * classes.seconds, np.inf)
    price = price + point[num:] * share
    row = np.arange(len(price))
    choice = price.argmin(axis=1)
    value = float(times @ price[row, choice]) - float(point[num:].sum())
    load, room = np.zeros(num), np.full(num, -1.0)
    np.add.at(load, choice, times * classes.seconds[row, choice])
    np.add.at(room, choice, times * share[row, choice])
    return value, np.concatenate([load, room])

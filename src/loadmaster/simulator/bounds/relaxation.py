"""The fractional relaxation: units spread at will over classes of engines, and what that costs.

    minimise T   such that   every unit is spread over the classes it may use (fractions sum to 1),
                             sum of p_uc y_uc <= n_c T          the engines of class c have time
                             sum of m_u  y_uc <= M_c            and, with memory, its devices have room

Its dual (w: price of a second, v: price of a class's whole memory) is

    T >= sum over u of min over c of (w_c p_uc + v_c m_u / M_c) - sum over c of v_c   where  sum_c n_c w_c = 1

for any w, v >= 0. So every point (w, v) is a proven bound, however it was found; Kelley's cutting planes
look for the best one. Each round costs one pass over the distinct units and a tiny linear programme, which
is solved in units of the best bound so far: a solver's tolerance is absolute, and times range widely.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats

_ROUNDS = 100
_TOLERANCE = 1e-7
_MAX_PRICE = 1e8  # of a class's memory, in units of the best bound


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """U units on C classes of engines that are alike."""

    count: Floats  # [C] engines
    memory_bytes: Floats  # [C]
    seconds: Floats  # [U, C] inf = not allowed
    held_bytes: Floats  # [U] at the end of the step


def relaxed_bound_s(classes: Classes, *, with_memory: bool) -> float:
    """A proven lower bound of the busiest engine's time, as a rule within 1e-6 of the optimum."""
    num = len(classes.count)
    if num == 1:
        return float(classes.seconds.sum() / classes.count[0])
    whole, times = _merge_equal_units(classes, with_memory)
    scale_s = _first_guess_s(whole, times)
    if scale_s == 0.0:
        return 0.0
    point = np.concatenate([np.full(num, 1.0 / classes.count.sum()), np.zeros(num)])
    best, cuts, top = 0.0, [], 10.0 if with_memory else 0.0
    for _ in range(_ROUNDS):
        value, cut = _evaluate_dual(whole, times, point)
        best, scale_s = max(best, value), max(scale_s, value)
        cuts.append(cut)
        found = _best_point(classes.count, np.array(cuts), scale_s, top)
        if found is None:
            break
        if 0 < top < _MAX_PRICE and found[num:-1].max() > 0.99 * top:
            top *= 10.0  # the price of memory has to rise further
        elif found[-1] * scale_s <= best * (1 + _TOLERANCE):
            break
        point = np.concatenate([found[:num], found[num:-1] * scale_s])
    return best


def _best_point(count: Floats, cuts: Floats, scale_s: float, top: float) -> Floats | None:
    """w, v and T that maximise T under the cuts; v and T in units of `scale_s`, v at most `top`."""
    from scipy.optimize import linprog  # takes longer to load than most problems take to answer

    num = len(count)
    found = linprog(
        np.append(np.zeros(2 * num), -1.0),
        A_ub=np.column_stack([-cuts[:, :num] / scale_s, -cuts[:, num:], np.ones(len(cuts))]),
        b_ub=np.zeros(len(cuts)),
        A_eq=np.concatenate([count, np.zeros(num + 1)])[None, :],
        b_eq=np.ones(1),
        bounds=[(0, None)] * num + [(0, top)] * num + [(None, None)],
        method="highs",
    )
    if found.status != 0 or found.x is None:
        return None
    point: Floats = np.maximum(found.x, 0.0)
    point[:num] /= count @ point[:num]
    return point


def _merge_equal_units(classes: Classes, with_memory: bool) -> tuple[Classes, Floats]:
    """Distinct units that take time or room, and how often each occurs."""
    num = len(classes.count)
    held = classes.held_bytes if with_memory else np.zeros(len(classes.held_bytes))
    rows = np.column_stack([classes.seconds, held])
    rows, times = np.unique(rows[(rows > 0).any(axis=1)], axis=0, return_counts=True)
    whole = Classes(classes.count, classes.memory_bytes, rows[:, :num], rows[:, num])
    return whole, times.astype(np.float64)


def _first_guess_s(classes: Classes, times: Floats) -> float:
    """The size of T: every unit where it is fastest, or where it is slowest if that takes no time at all."""
    fastest = float(times @ classes.seconds.min(axis=1, initial=np.inf)) if len(times) else 0.0
    slowest = np.where(np.isfinite(classes.seconds), classes.seconds, 0.0).max(axis=1, initial=0.0)
    return (fastest or float(times @ slowest)) / float(classes.count.sum())


def _evaluate_dual(classes: Classes, times: Floats, point: Floats) -> tuple[float, Floats]:
    """The dual at a point and its gradient."""
    num = len(classes.count)
    share = classes.held_bytes[:, None] / classes.memory_bytes
    with np.errstate(invalid="ignore"):
        price = np.where(np.isfinite(classes.seconds), point[:num] * classes.seconds, np.inf)
    price = price + point[num:] * share
    row = np.arange(len(price))
    choice = price.argmin(axis=1)
    paid, given = float(times @ price[row, choice]), float(point[num:].sum())
    rounding = 4 * float(np.finfo(np.float64).eps) * (len(price) + num) * (paid + given)
    value = paid - given - rounding  # two large sums may cancel: what is left stays proven
    load, room = np.zeros(num), np.full(num, -1.0)
    np.add.at(load, choice, times * classes.seconds[row, choice])
    np.add.at(room, choice, times * share[row, choice])
    return value, np.concatenate([load, room])

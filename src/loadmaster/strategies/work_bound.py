"""Work bound: no strategy takes less than all devices need together for the work, cut as finely as one likes.

Every row of every op runs somewhere at least once. Running a share of an op takes at least that share of
its time on the whole batch (`row_costs.py`: what does not shrink with the rows only makes it worse), so
a linear programme that hands out fractions of ops to kinds of devices, with nothing sent and nothing
waited for, takes no longer than any strategy. Its optimum is read from the dual solution, which is a
bound by itself.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from loadmaster.core.arrays import Floats
from loadmaster.core.problem import Problem

NAME = "work shared by all devices"


def work_bound(problem: Problem) -> float:
    """Seconds of a step that no strategy beats; 0 where nothing is proven."""
    seconds, kind = problem.costs.compute_s, problem.cluster.kind
    devices = np.bincount(kind, minlength=seconds.shape[1]).astype(np.float64)
    here = np.flatnonzero(devices > 0)
    engines = len(set(problem.cluster.engine.tolist()))
    on_host = problem.cluster.on_host[kind]
    if engines < problem.cluster.num_devices and not on_host.all():
        return 0.0  # devices that share a chip: counted apart they would be too many, and are not modelled
    table = seconds[:, here]
    table = table[np.isfinite(table).any(axis=1) & (np.nan_to_num(table, posinf=0.0).max(axis=1) > 0)]
    if not len(table):
        return 0.0
    # Ops that relate the kinds alike are one.
    fastest = table.min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relation = np.where(fastest[:, None] > 0, table / fastest[:, None], np.where(table > 0, np.inf, 1.0))
    rounded: Floats = np.asarray(relation.round(9), dtype=np.float64)
    rows, inverse = np.unique(rounded, axis=0, return_inverse=True)
    weight: Floats = np.zeros(len(rows))
    np.add.at(weight, inverse.ravel(), fastest)
    price = _prices(rows, weight, devices[here])
    if price.sum() <= 0:
        return 0.0
    # Weak duality: with prices p of devices that add up to 1, the step is at least the cheapest work.
    share = price / price.sum() / devices[here]
    cheapest = np.where(np.isfinite(table), table * share, np.inf).min(axis=1)
    return float(cheapest.sum() * (1 - 1e-9))


def _prices(rows: Floats, weight: Floats, devices: Floats) -> Floats:
    """Of a second on all devices of each kind, from the dual of: least T such that the work fits into it."""
    num, kinds = rows.shape
    if kinds == 1:
        return np.ones(1)
    group, kind = np.nonzero(np.isfinite(rows))
    cells = len(group)
    load = coo_matrix((rows[group, kind] * weight[group], (kind, np.arange(cells))), shape=(kinds, cells))
    scale = max(float(weight.sum()), 1e-300)
    upper = np.hstack([load.toarray() / scale, -devices[:, None]])
    whole = coo_matrix((np.ones(cells), (group, np.arange(cells))), shape=(num, cells))
    equal = np.hstack([whole.toarray(), np.zeros((num, 1))])
    goal = np.zeros(cells + 1)
    goal[-1] = 1.0
    solved = linprog(goal, upper, np.zeros(kinds), equal, np.ones(num), method="highs")
    if solved.status != 0:
        return np.zeros(kinds)
    found = -np.asarray(solved.ineqlin.marginals) * devices
    return np.maximum(found, 0.0)

"""Prices: what a second and a byte of each type are worth, and the work bound that follows from them.

The fractional relaxation of max-load: classes spread at will over the devices, no transfers.

    minimise T  such that  sum_t y_vt = 1,   sum_v p_vt y_vt <= n_t T,   sum_v m_v y_vt <= n_t M_t

For any prices a_t >= 0 of a second and b_t >= 0 of a byte, let a class be worth the least it costs anywhere,
w_v = min_t (a_t p_vt + b_t m_v). A device of type t then carries at most a_t T + b_t M_t worth of classes:
a bound for all classes, and for every set of classes and of devices, which is what the walk over ideals is
pruned by. The dual of the relaxation gives the best prices; whatever they are, they prune safely.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.placers.exact._maxload.model import MaxLoad, allowed_types

_MOST_VARIABLES = 60_000


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Prices and what follows from them."""

    second: Floats  # [T]
    byte: Floats  # [T]
    worth: Floats  # [C]
    bound_s: float  # no split has a smaller busiest device

    def carries(self, model: MaxLoad, limit_s: float) -> Floats:
        """[T] worth of classes that a device of each type carries at most."""
        return self.second * limit_s + self.byte * model.room


def find_prices(model: MaxLoad) -> Prices:
    """The best prices there are, or simple ones for very many classes."""
    second, byte = _simple_prices(model)
    best = _make_prices(model, second, byte)
    if model.num_classes * model.num_types <= _MOST_VARIABLES and model.num_types > 1:
        for found in _dual_prices(model):
            other = _make_prices(model, *found)
            best = other if other.bound_s > best.bound_s else best
    return best


def _make_prices(model: MaxLoad, second: Floats, byte: Floats) -> Prices:
    allowed = allowed_types(model)
    with np.errstate(invalid="ignore"):
        cost = np.where(allowed, second * np.where(allowed, model.seconds, 0.0), np.inf)
    cost = cost + byte * model.num_bytes[:, None]
    worth = np.where(allowed.any(axis=1), cost.min(axis=1), 0.0)
    total, per_s = float(worth.sum()), float(second @ model.count)
    given = float((byte * model.room) @ model.count)
    work = (total * (1 - 1e-12) - given * (1 + 1e-12)) / per_s if per_s > 0 else 0.0
    fastest = np.where(allowed, model.seconds, np.inf).min(axis=1)
    largest = float(fastest[np.isfinite(fastest)].max(initial=0.0))
    return Prices(second, byte, worth, max(work, largest, 0.0))


def _simple_prices(model: MaxLoad) -> tuple[Floats, Floats]:
    """A second of each type in terms of what all types do in it."""
    total = np.where(np.isfinite(model.seconds), model.seconds, 0.0).sum(axis=0)
    speed = 1.0 / np.maximum(total, 1e-300) if total.any() else np.ones(model.num_types)
    return speed / (speed @ model.count), np.zeros(model.num_types)


def _dual_prices(model: MaxLoad) -> list[tuple[Floats, Floats]]:
    """Prices of seconds and bytes of the relaxation, without and with memory."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, vstack

    allowed = allowed_types(model)
    row, column = np.nonzero(allowed)
    if not allowed.any(axis=1).all():
        return []
    num, types, size = len(row), model.num_types, model.num_classes
    scale_s = max(float(np.where(allowed, model.seconds, 0.0).max(axis=1).sum()), 1e-300)
    scale_b = max(float(model.num_bytes.sum()), 1.0)
    every = np.arange(num)
    last = np.full(types, num)
    entries = np.concatenate([model.seconds[row, column] / scale_s, -model.count.astype(np.float64)])
    where = np.concatenate([column, np.arange(types)]), np.concatenate([every, last])
    seconds = coo_array((entries, where), shape=(types, num + 1))
    held = coo_array((model.num_bytes[row] / scale_b, (column, every)), shape=(types, num + 1))
    whole = coo_array((np.ones(num), (row, every)), shape=(size, num + 1))
    found = []
    scarce = bool((model.room < int(model.num_bytes.sum())).any())
    for with_memory in (False, True)[: 1 + scarce]:
        rows = vstack([seconds, held]) if with_memory else seconds.tocsr()
        most = np.concatenate([np.zeros(types), model.count * (model.room / scale_b)])
        solved = linprog(
            np.append(np.zeros(num), 1.0),
            A_ub=rows.tocsr(),
            b_ub=most if with_memory else most[:types],
            A_eq=whole.tocsr(),
            b_eq=np.ones(size),
            method="highs",
        )
        if solved.status == 0:
            price = np.maximum(-solved.ineqlin.marginals, 0.0)
            byte = price[types:] * scale_s / scale_b if with_memory else np.zeros(types)
            found.append((price[:types], byte))
    return found

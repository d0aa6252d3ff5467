"""A linear programme whose answer is proven: any multipliers bound it, however they were found.

    minimise c z   such that   A z <= b,   B z = e,   0 <= z <= u

For any l >= 0 and n the least of c z + l (A z - b) + n (B z - e) over the box alone is a lower bound. The
solver's multipliers are taken as they come, clipped to l >= 0, and what rounding may have cost is taken off.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadmaster.core.arrays import Floats, Longs

_EPS = float(np.finfo(np.float64).eps)


@dataclass(slots=True, eq=False)
class Rows:
    """Rows in the making: positions, coefficients and right-hand sides."""

    row: list[Longs] = field(default_factory=list)
    column: list[Longs] = field(default_factory=list)
    value: list[Floats] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    def add(self, *terms: tuple[Any, Any], limit: float = 0.0) -> None:
        """One row: terms are columns and their coefficients."""
        for columns, values in terms:
            where = np.atleast_1d(np.asarray(columns, dtype=np.int64))
            self.row.append(np.full(len(where), len(self.limit), dtype=np.int64))
            self.column.append(where)
            self.value.append(np.broadcast_to(np.asarray(values, dtype=np.float64), len(where)))
        self.limit.append(limit)

    def matrix(self, width: int) -> Any:
        """The rows as a sparse matrix."""
        from scipy.sparse import csr_array

        if not self.limit:
            return csr_array((0, width))
        parts = (np.concatenate(self.row), np.concatenate(self.column))
        return csr_array((np.concatenate(self.value), parts), shape=(len(self.limit), width))


@dataclass(frozen=True, slots=True, eq=False)
class CertifiedSolution:
    """A solution and what is proven."""

    z: Floats
    proven: float


def solve_certified(
    cost: Floats, most: Rows, equal: Rows, upper: Floats, *, limit_s: float
) -> CertifiedSolution | None:
    """The optimum and a proven bound near it; None where the solver gives no answer in time."""
    from scipy.optimize import linprog

    a, b = most.matrix(len(cost)), np.array(most.limit)
    e, f = equal.matrix(len(cost)), np.array(equal.limit)
    found = linprog(
        cost,
        A_ub=a,
        b_ub=b,
        A_eq=e,
        b_eq=f,
        bounds=np.column_stack([np.zeros(len(cost)), upper]),
        method="highs-ipm",
        options={"time_limit": limit_s},
    )
    if found.x is None or found.status != 0:
        return None
    price, level = np.maximum(-found.ineqlin.marginals, 0.0), -found.eqlin.marginals
    return CertifiedSolution(found.x, proven_bound(cost, (a, b, price), (e, f, level), upper))


def proven_bound(
    cost: Floats, most: tuple[Any, Floats, Floats], equal: tuple[Any, Floats, Floats], upper: Floats
) -> float:
    """The least of the Lagrangian over the box, less what rounding may hide; rows come with their prices."""
    reduced, size, least, given, longest = cost.copy(), np.abs(cost), 0.0, 0.0, 2
    for matrix, limit, price in (most, equal):
        reduced = reduced + matrix.T @ price
        size = size + abs(matrix).T @ np.abs(price)
        least -= float(price @ limit)
        given += float(np.abs(price) @ np.abs(limit)) * (len(limit) + 1)
        longest += int(np.bincount(matrix.indices, minlength=1).max(initial=0))
    least += float(np.minimum(reduced, 0.0) @ upper)
    return least - _EPS * (given + float(size @ upper) * longest + len(cost) * abs(least))

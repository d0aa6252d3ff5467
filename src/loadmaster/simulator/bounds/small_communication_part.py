"""Some rows of the small-communication-times programme: given to the solver, read back, its dual checked.

Any multipliers >= 0 of the rows prove a bound, however they were found and whatever the solver's tolerances
were: the least value of the Lagrangian over all x, starts and w.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bools, Floats

Index = NDArray[np.integer[Any]]
_ROUNDING = 4.0 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The best x of a part, what is proven of w, and the solver's count of steps."""

    x: Floats  # [F]
    proven: float
    num_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """G edges among n ops, F of them with an x, in the solver's units.

    Variables: F times x (or 1 - x, so that 0 is a good guess), n starts beyond the earliest, w beyond the
    earliest end of all. Rows: the edges; the last ops, against w; at most one child; at most one parent.
    """

    source: Index  # [G]
    target: Index  # [G]
    slack: Floats  # [G] from the earliest end of the source to the earliest start of the target
    spare: Floats  # [n] from the earliest end to that of all
    free: Index  # [F] edges with an x
    transfer: Floats  # [F]
    flip: Bools  # [F] the variable is 1 - x

    @property
    def last(self) -> Index:
        """Ops that are no edge's source."""
        return np.flatnonzero(np.bincount(self.source, minlength=len(self.spare)) == 0)

    @property
    def sides(self) -> list[tuple[Index, Index]]:
        """For children, then parents: the op [F] that chooses, and among how many [n]."""
        ends = (self.source[self.free], self.target[self.free])
        return [(end, np.bincount(end, minlength=len(self.spare))) for end in ends]

    @property
    def num_rows(self) -> int:
        """Rows of all kinds."""
        return len(self.source) + len(self.last) + sum(int((count > 1).sum()) for _, count in self.sides)

    def solve(self, method: str, max_steps: int) -> Solution | None:
        """The optimum, None if there is none within that many steps."""
        from scipy.optimize import linprog  # takes longer to load than most problems take to answer

        num = len(self.free)
        width = num + len(self.spare) + 1
        cost, highest = np.zeros(width), np.full(width, np.inf)
        cost[-1], highest[:num] = 1.0, 1.0
        matrix, limit = self._build_rows(width)
        found = linprog(
            cost,
            A_ub=matrix,
            b_ub=limit,
            bounds=np.column_stack([np.zeros(width), highest]),
            method=method,
            options={
                "maxiter": max_steps,
                **({"simplex_dual_edge_weight_strategy": "devex"} if method == "highs-ds" else {}),
            },
        )
        if found.status != 0 or found.x is None:
            return None
        value = np.clip(found.x[:num], 0.0, 1.0)
        proven = self.proven(np.maximum(-found.ineqlin.marginals, 0.0), max(float(found.x[-1]), 0.0))
        return Solution(np.where(self.flip, 1.0 - value, value), proven, int(found.nit))

    def _build_rows(self, width: int) -> tuple[Any, Floats]:
        """The matrix and its right-hand side."""
        from scipy.sparse import csr_array

        edge, end, last = np.arange(len(self.source)), np.arange(len(self.last)) + len(self.source), self.last
        num, ones, sign = len(self.free), np.ones, np.where(self.flip, -1.0, 1.0)
        row: list[Index] = [edge, edge, self.free, end, end]
        column: list[Index] = [num + self.source, num + self.target, np.arange(num), num + last]
        column.append(np.full(len(end), width - 1))
        value: list[Any] = [
            ones(len(edge)),
            -ones(len(edge)),
            sign * self.transfer,
            ones(len(end)),
            -ones(len(end)),
        ]
        slack, height = self.slack.copy(), len(edge) + len(end)
        slack[self.free[self.flip]] -= self.transfer[self.flip]
        limit: list[Any] = [slack, self.spare[last]]
        for side, count in self.sides:
            several = count > 1
            mine = np.flatnonzero(several[side])
            row.append((height - 1 + np.cumsum(several))[side[mine]])
            column.append(mine)
            value.append(-sign[mine])
            limit.append((1.0 - count + np.bincount(side[self.flip], minlength=len(count)))[several])
            height += int(several.sum())
        entries = np.concatenate(value)
        matrix = csr_array((entries, (np.concatenate(row), np.concatenate(column))), shape=(height, width))
        return matrix, np.concatenate(limit)

    def proven(self, multiplier: Floats, top: float) -> float:
        """A bound of w by these multipliers >= 0 of the rows; `top` is the w that is hoped for.

        The Lagrangian, least over 0 <= x <= 1, 0 <= w <= top and 0 <= start <= top + spare. A schedule with
        more than `top` has that bound anyway, and in one with less no op ends later.
        """
        num, last, latest = len(self.spare), self.last, top + self.spare
        flow, end, rest = np.split(multiplier, [len(self.source), len(self.source) + len(last)])
        reduced, choices = flow[self.free] * self.transfer, 0.0
        size = float(reduced.sum())  # of all terms together: what rounding is relative to
        for side, count in self.sides:
            price = np.zeros(num)
            price[count > 1], rest = np.split(rest, [int((count > 1).sum())])
            reduced = reduced - price[side]
            choices += float(price[count > 1] @ (count[count > 1] - 1.0))
        leaves = np.bincount(self.source, flow, num) + np.bincount(last, end, num)
        enters = np.bincount(self.target, flow, num)
        owed = float(flow @ self.slack + end @ self.spare[last])
        least = choices - owed + float(np.minimum(reduced, 0.0).sum())
        least += float(np.minimum(leaves - enters, 0.0) @ latest) + top * min(0.0, 1.0 - float(end.sum()))
        degree = np.bincount(self.source, minlength=num) + np.bincount(self.target, minlength=num) + 1
        size += owed + 4.0 * choices + float((degree * (leaves + enters)) @ latest)
        return max(0.0, min(top, least - _ROUNDING * size))

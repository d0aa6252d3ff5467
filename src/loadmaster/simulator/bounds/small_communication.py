"""The small-communication-times linear programme on a network of ops, solved in parts.

    min w   s.t.   s_i + p_i + delay_ij + c_ij x_ij <= s_j   on every edge,   s_i + p_i <= w,   0 <= x <= 1,
                   sum over children j of (1 - x_ij) <= 1,   sum over parents i of (1 - x_ij) <= 1

Most edges never matter. So a greedy x comes first; edges on paths longer than what is proven so far get rows,
the programme of these rows alone is solved (`small_communication_part.py`), x is completed greedily, and so
on until the longest path of x is as short as the proof. O(E) a round, and a programme of a fraction of the
edges.

Effort is counted in pivots, not in seconds, so that the same input gives the same answer: the dual simplex
first; where it needs too many pivots (many x are fractional), the interior-point method, unless too large.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.simulator.bounds.small_communication_part import Index, Part

_UNITS = 1000.0  # the longest path in the solver's units: its tolerances are absolute
_EQUAL, _NEARLY = 1e-9, 1e-6  # the gap to reach, and the one that counts as solved if no row is left to add
_ROUNDS = 12
_FIRST, _STEP = 0.6, 0.3  # a round takes the paths above this share of the first gap, and falls by that much
_PIVOTS_TIMES_ROWS = 3.5e8  # 1 s of simplex, 4 s at worst
_FEW_PIVOTS = 3000
_INTERIOR_ROWS = 15_000  # 4 s
_INTERIOR_STEPS = 500


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """N ops in topological order, E edges sorted by source."""

    op_s: Floats  # [N]
    source: Ints  # [E]
    target: Ints  # [E]
    delay_s: Floats  # [E] between end and start, in any case
    transfer_s: Floats  # [E] and unless the target stays with the source; 0 where that does not matter


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """What was found of a programme."""

    x: Floats  # [E] obeys the programme
    makespan_s: float  # longest path of x
    proven_s: float  # no x has a shorter one
    solved: bool  # the two are equal, to rounding


def longest_path_over_edges(network: Network, transfer_s: Floats) -> Floats:
    """[E] the longest path over each edge when these transfers are paid."""
    op_s, source, target = network.op_s, network.source, network.target
    hop = network.delay_s + transfer_s
    tail = _longest_path_to(target[::-1], source[::-1], (hop + op_s[target])[::-1], len(op_s))
    over: Floats = (
        earliest_starts(network, transfer_s)[source] + op_s[source] + hop + op_s[target] + tail[target]
    )
    return over


def earliest_starts(network: Network, transfer_s: Floats) -> Floats:
    """[N] the earliest start of each op when these transfers are paid."""
    cost = network.op_s[network.source] + network.delay_s + transfer_s
    return _longest_path_to(network.source, network.target, cost, len(network.op_s))


def _longest_path_to(first: Ints, then: Ints, seconds: Floats, num_ops: int) -> Floats:
    """[N] the longest way to each op, over edges of which those into an op come before its own."""
    reach = [0.0] * num_ops
    for a, b, cost in zip(first.tolist(), then.tolist(), seconds.tolist(), strict=True):
        length = reach[a] + cost
        if length > reach[b]:
            reach[b] = length
    return np.array(reach)


def lower_by_edge(network: Network, x: Floats, order: Index) -> Floats:
    """`x` lowered edge by edge, in this order, as far as one child and one parent allow."""
    num = len(network.op_s)
    child = (1.0 - np.bincount(network.source, 1.0 - x, num)).tolist()
    parent = (1.0 - np.bincount(network.target, 1.0 - x, num)).tolist()
    low = x.tolist()
    ends = (network.source[order].tolist(), network.target[order].tolist())
    for edge, i, j in zip(order.tolist(), *ends, strict=True):
        room = min(child[i], parent[j], low[edge])
        if room > 0.0:
            child[i] -= room
            parent[j] -= room
            low[edge] -= room
    return np.array(low)


def solve(network: Network, *, effort: float = 1.0) -> Optimum:
    """The optimum, or what is known of it when `effort` (1: seconds at worst) is used up."""
    nothing = np.zeros(len(network.source))
    solver = _Solver(network, effort)
    least_s = proven_s = makespan_s = solver.least_s
    # First who would wait longest if its transfer were paid.
    order = np.argsort(-(longest_path_over_edges(network, nothing) + network.transfer_s), kind="stable")
    order = order[network.transfer_s[order] > 0]
    x = lower_by_edge(network, nothing + 1.0, order)
    rows, first_gap_s = nothing > 0, 0.0
    for done in range(_ROUNDS):
        length = longest_path_over_edges(network, network.transfer_s * x)
        makespan_s = max(least_s, float(length.max(initial=0.0)))
        gap_s = makespan_s - proven_s
        if gap_s <= _EQUAL * makespan_s:
            break
        first_gap_s = first_gap_s or gap_s
        above = rows | (length > proven_s + min((_FIRST - _STEP * done) * first_gap_s, _FIRST * gap_s))
        found = solver.solve(np.flatnonzero(above), x) if above.sum() > rows.sum() else None
        if found is None:
            break
        rows, proven_s = above, max(proven_s, found[1])
        x = lower_by_edge(network, found[0], order)
    return Optimum(x, makespan_s, proven_s, makespan_s - proven_s <= _NEARLY * makespan_s)


class _Solver:
    """Solves the programme of some edges, with what effort is left."""

    def __init__(self, network: Network, effort: float) -> None:
        self._network = network
        self._start_s = earliest_starts(network, np.zeros(len(network.source)))
        self.least_s = float((self._start_s + network.op_s).max())  # the longest path without transfers
        self._unit_s = max(self.least_s, float(network.transfer_s.max(initial=0.0))) / _UNITS
        self._pivots_times_rows = _PIVOTS_TIMES_ROWS * effort
        self._interior_rows = _INTERIOR_ROWS * effort
        self._hard = False

    def solve(self, edge: Index, x: Floats) -> tuple[Floats, float] | None:
        """The best x with rows for these edges only (1 elsewhere), and the proven seconds; begins at `x`."""
        part = self._make_part(edge, x)
        found = None
        if not self._hard:
            enough = max(_FEW_PIVOTS, part.num_rows // 2)
            pivots = int(min(self._pivots_times_rows / part.num_rows, enough))
            found = part.solve("highs-ds", pivots) if pivots > 0 else None
            self._pivots_times_rows -= float(part.num_rows) * (pivots if found is None else found.num_steps)
        if found is None and part.num_rows <= self._interior_rows:
            self._hard = True
            found = part.solve("highs-ipm", _INTERIOR_STEPS)
        if found is None:
            return None
        whole = np.ones(len(x))
        whole[edge[part.free]] = found.x
        return whole, self.least_s + found.proven * self._unit_s

    def _make_part(self, edge: Index, x: Floats) -> Part:
        """Starts are counted from their earliest, so that few rows are violated to begin with."""
        network, unit_s, start_s = self._network, self._unit_s, self._start_s
        source, target = network.source[edge], network.target[edge]
        ops = np.unique(np.concatenate([source, target]))
        earliest = start_s[source] + network.op_s[source] + network.delay_s[edge]
        free = np.flatnonzero(network.transfer_s[edge] > 0)
        return Part(
            source=np.searchsorted(ops, source),
            target=np.searchsorted(ops, target),
            slack=(start_s[target] - earliest) / unit_s,
            spare=(self.least_s - start_s[ops] - network.op_s[ops]) / unit_s,
            free=free,
            transfer=network.transfer_s[edge[free]] / unit_s,
            flip=x[edge[free]] > 0.5,
        )

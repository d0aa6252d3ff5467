"""The step as a linear programme: where units are, when ops start, what crosses, and what stands in memory.

Over the skeleton of a problem (`skeleton.py`), with x[u, c] the share of unit u on class c, y[a, b, c, f] of
the pair of units a and b on c and on f, s[v] the start of op v, and T the step:

    start    s_u + sum_c p[u, c] x[u, c] + sum y seconds <= s_v                  for every edge u -> v
    between  n_c (s_w - end of v) >= sum of p[i, c] x[i, c] over i between       for milestones v -> w, and
             also from the beginning to v, and from v to T; likewise for what moves over the class's links
    window   n_c (T - h - t) >= sum of p[i, c] x[i, c] over i with head >= h and tail >= t
    memory   sum of bytes[u] x[u, c] <= M_c                                      at the end and at milestones

Every plan is a solution with 0/1 shares, so the optimum is a bound; `docs/bounds.md` proves each row.
"""

import heapq
import time
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.graph import Graph, home_bytes
from loadmaster.core.problem import Problem
from loadmaster.simulator.bounds.certified import Rows, solve_certified
from loadmaster.simulator.bounds.milestones import Milestone, find_milestones
from loadmaster.simulator.bounds.skeleton import Skeleton, build_skeleton
from loadmaster.simulator.bounds.standing import StandingBytes

MOST_COLUMNS = 60_000
_COLUMNS_PER_S = 4_500  # on a slow processor: what cannot be solved in time is not begun
_UNITS = 1000.0  # the bound so far in the solver's units: its tolerances are absolute
_MILESTONES = 12
_DECIDED = 0.999
_WINDOWS = 8
_LATEST = 0.98  # of the bound so far: whatever the plan, T is later than a window's ends


@dataclass(frozen=True, slots=True, eq=False)
class RelaxedStep:
    """What the programme says."""

    bound_s: float  # no step is shorter
    share: Floats | None  # [units, D] of the relaxed optimum; None where it was not solved
    ended: bool = True  # False: the programme is larger than the time, or did not end within it


def solve_relaxed_step(problem: Problem, *, limit_s: float = 60.0, most_solved: int = 8) -> RelaxedStep:
    """Solve the programme, unless it is too large, then branch; the bound by heads and tails holds anyway.

    Branching: the unit with most neighbours whose place is undecided is put on each class in turn. Every plan
    is in one of the branches, so the least of their bounds holds; the least is branched on next.
    """
    frame = build_skeleton(problem)
    if frame.bound_s <= 0 or _num_columns(frame) > min(MOST_COLUMNS, _COLUMNS_PER_S * limit_s):
        return RelaxedStep(frame.bound_s, None, ended=frame.bound_s <= 0)
    started = time.perf_counter()
    programme = _Programme(problem, frame)
    root = programme.solve({}, limit_s)
    if root.share is None:
        return root
    one_s, solved, num = time.perf_counter() - started, 1, len(frame.engines)
    waiting: list[tuple[float, int, dict[int, int], Floats | None]] = [(root.bound_s, 0, {}, root.share)]
    while solved + num <= most_solved and time.perf_counter() - started + num * one_s <= limit_s:
        bound_s, _, fixed, share = waiting[0]
        unit = None if share is None else programme.pick_branch_unit(share)
        if unit is None:
            break
        heapq.heappop(waiting)
        for c in range(num):
            branch = {**fixed, unit: c}
            found = programme.solve(branch, limit_s)
            solved += 1
            heapq.heappush(waiting, (max(bound_s, found.bound_s), solved, branch, found.share))
    return RelaxedStep(waiting[0][0], root.share[:, frame.class_of])


def _num_columns(frame: Skeleton) -> int:
    num = len(frame.engines)
    pairs = {tuple(sorted((int(frame.unit[u]), int(frame.unit[v])))) for u, v in frame.edges}
    return len(frame.unit) + frame.num_units * num + len(pairs) * num * (num - 1)


class _Programme:
    """Columns: shares [units, C], then starts [N], T, pairs, freight."""

    def __init__(self, problem: Problem, frame: Skeleton) -> None:
        self.problem, self.frame = problem, frame
        self.unit_s = frame.bound_s / _UNITS
        self.num = len(frame.engines)
        self.op = np.where(np.isfinite(frame.op_s), frame.op_s, 0.0) / self.unit_s
        self.first_start = frame.num_units * self.num
        self.step = self.first_start + len(frame.unit)
        self.width = self.step + 1
        self.most, self.equal = Rows(), Rows()
        self.pair: dict[tuple[int, int], int] = {}  # first column of a pair of units
        self.timed = self.op.max(axis=1) > 0

        self._add_start_rows()
        marks = find_milestones(self.problem.graph, self.frame, _MILESTONES)
        self._between(marks)
        self._add_freight_rows(marks)
        self._add_window_rows()
        self._add_memory_limits(marks)
        for u in range(self.frame.num_units):
            self.equal.add((u * self.num + np.arange(self.num), 1.0), limit=1.0)

    def solve(self, fixed: dict[int, int], limit_s: float) -> RelaxedStep:
        """The solver and the proof, with some units put on a class; shares are by class."""
        cost, upper = np.zeros(self.width), np.ones(self.width)
        cost[self.step] = 1.0
        # A plan slower than `top` has the bound anyway, and in a faster one nothing starts later.
        top = _UNITS * 64
        upper[self.first_start : self.step + 1] = top
        allowed = self._allowed_classes()
        for unit, c in fixed.items():
            allowed[unit, np.arange(self.num) != c] = 0.0
        upper[: self.first_start] = allowed.reshape(-1)
        found = solve_certified(cost, self.most, self.equal, upper, limit_s=limit_s)
        if found is None:
            return RelaxedStep(self.frame.bound_s, None, ended=False)
        proven = min(found.proven, top) * self.unit_s
        return RelaxedStep(max(proven, self.frame.bound_s), found.z[: self.first_start].reshape(-1, self.num))

    def pick_branch_unit(self, share: Floats) -> int | None:
        """The unit to branch on: in fractions, and with many neighbours."""
        ends = np.array(list(self.pair), dtype=np.int64).reshape(-1)
        neighbours = np.bincount(ends, minlength=len(share))
        weight = np.where(share.max(axis=1) < _DECIDED, 1.0 - share.max(axis=1), 0.0) * neighbours
        return int(weight.argmax()) if weight.max(initial=0.0) > 0 else None

    def _allowed_classes(self) -> Floats:
        """[units, C] 1 where a unit may be."""
        allowed = np.ones((self.frame.num_units, self.num))
        np.minimum.at(allowed, self.frame.unit, np.isfinite(self.frame.op_s).astype(np.float64))
        return allowed

    def _share_columns(self, op: int) -> Longs:
        first = int(self.frame.unit[op]) * self.num
        return np.arange(first, first + self.num, dtype=np.int64)

    def _add_start_rows(self) -> None:
        """Rows of the edges and of the last ops."""
        last = np.ones(len(self.frame.unit), dtype=np.bool_)
        for (u, v), edge in sorted(self.frame.edges.items()):
            last[u] = False
            terms = [
                (self.first_start + u, 1.0),
                (self.first_start + v, -1.0),
                (self._share_columns(u), self.op[u]),
            ]
            if self.frame.unit[u] != self.frame.unit[v] and edge.seconds.max() > 0:
                terms.append(self._pair_columns(u, v, edge.seconds / self.unit_s))
            self.most.add(*terms)
        for u in np.flatnonzero(last & self.timed).tolist():
            self.most.add(
                (self.first_start + u, 1.0), (self.step, -1.0), (self._share_columns(u), self.op[u])
            )

    def _pair_columns(self, u: int, v: int, value: Floats) -> tuple[Longs, Floats]:
        """Columns of the pair of units on different classes, with these values [C, C]."""
        a, b = int(self.frame.unit[u]), int(self.frame.unit[v])
        if a > b:
            a, b, value = b, a, value.T
        off = ~np.eye(self.num, dtype=np.bool_)
        if (a, b) not in self.pair:
            self.pair[a, b] = self.width
            self.width += int(off.sum())
            at = np.full((self.num, self.num), -1, dtype=np.int64)
            at[off] = np.arange(self.pair[a, b], self.width)
            for c in range(self.num):
                others = np.arange(self.num) != c
                self.equal.add(
                    (a * self.num + c, 1.0),
                    (b * self.num + c, -1.0),
                    (at[c, others], -1.0),
                    (at[others, c], 1.0),
                )
        first = self.pair[a, b]
        return np.arange(first, first + int(off.sum()), dtype=np.int64), value[off]

    def _load(self, ops: Bools, c: int) -> tuple[Longs, Floats]:
        """Columns and seconds of these ops on a class."""
        chosen = ops & self.timed
        seconds = np.bincount(self.frame.unit[chosen], self.op[chosen, c], self.frame.num_units)
        units = np.flatnonzero(seconds).astype(np.int64)
        return units * self.num + c, seconds[units].astype(np.float64)

    def _between(self, marks: list[Milestone]) -> None:
        for at, mark in enumerate(marks):
            start = self.first_start + mark.op
            for c, engines in enumerate(self.frame.engines.tolist()):
                end = [(start, engines), (self._share_columns(mark.op), engines * self.op[mark.op])]
                self.most.add(self._load(mark.before, c), (start, -engines))
                self.most.add(self._load(mark.after, c), (self.step, -engines), *end)
                for later in marks[at + 1 :]:
                    if mark.after[later.op]:
                        load = self._load(mark.after & later.before, c)
                        self.most.add(load, (self.first_start + later.op, -engines), *end)

    def _add_freight_rows(self, marks: list[Milestone]) -> None:
        """What enters and leaves a class over its links, after the beginning and after each milestone."""
        frame, used = self.frame, self._targets_by_tensor()
        maker = self.problem.graph.tensor_op
        for ports, into in ((frame.ports_in, True), (frame.ports_out, False)):
            for c in np.flatnonzero(np.isfinite(ports)).tolist():
                load = {t: self._transfer_columns(t, targets, c, into=into) for t, targets in used.items()}
                self.most.add(*load.values(), (self.step, -ports[c]))
                for mark in marks:
                    later = [load[t] for t in used if mark.after[maker[t]] or maker[t] == mark.op]
                    start = (self.first_start + mark.op, ports[c])
                    end = (self._share_columns(mark.op), ports[c] * self.op[mark.op])
                    self.most.add(*later, (self.step, -ports[c]), start, end)

    def _targets_by_tensor(self) -> dict[int, dict[int, tuple[int, Floats, Floats]]]:
        """By tensor and unit that it goes to: an op of that unit, least seconds in, least seconds out."""
        found: dict[int, dict[int, tuple[int, Floats, Floats]]] = {}
        for (u, v), edge in sorted(self.frame.edges.items()):
            if self.frame.unit[u] == self.frame.unit[v] or edge.seconds.max() <= 0:
                continue
            for t, freight in edge.freight.items():
                if self.problem.graph.tensor_op[t] == u:
                    found.setdefault(t, {}).setdefault(
                        int(self.frame.unit[v]), (v, freight.into_s, freight.out_s)
                    )
        return found

    def _transfer_columns(
        self, t: int, targets: dict[int, tuple[int, Floats, Floats]], c: int, *, into: bool
    ) -> tuple[Longs, Floats]:
        """Columns and seconds of a tensor that enters, or leaves, a class at least once."""
        maker = int(self.problem.graph.tensor_op[t])
        table = np.zeros((self.num, self.num))
        if into:
            table[:, c] = 1.0
        else:
            table[c, :] = 1.0
        np.fill_diagonal(table, 0.0)
        seconds = min(float((i if into else o)[c]) for _, i, o in targets.values()) / self.unit_s
        crossing = []
        for v, _, _ in targets.values():
            columns, value = self._pair_columns(maker, v, table)
            crossing.append(columns[value > 0])
        if len(crossing) == 1:
            return crossing[0], np.full(len(crossing[0]), seconds)
        column = self.width
        self.width += 1
        for columns in crossing:
            self.most.add((columns, 1.0), (column, -1.0))
        return np.array([column]), np.array([seconds])

    def _add_window_rows(self) -> None:
        ends = np.linspace(0.0, _LATEST * self.frame.bound_s, _WINDOWS)
        for head in ends:
            for tail in ends[head + ends <= _LATEST * self.frame.bound_s]:
                for c, engines in enumerate(self.frame.engines.tolist()):
                    ops = (self.frame.head_s[:, c] >= head) & (self.frame.tail_s[:, c] >= tail)
                    wait = float(head + tail) / self.unit_s
                    self.most.add(self._load(ops, c), (self.step, -engines), limit=-engines * wait)

    def _add_memory_limits(self, marks: list[Milestone]) -> None:
        graph, num_units = self.problem.graph, self.frame.num_units
        everything = np.ones(len(self.frame.unit), dtype=np.bool_)
        at_end = standing_bytes(graph, self.frame.unit, num_units, everything, ~everything)
        standing, wanted = (
            StandingBytes(graph, self.frame.unit, num_units),
            np.ones(num_units, dtype=np.bool_),
        )
        resident = np.bincount(self.frame.unit, graph.resident_bytes.astype(np.float64), num_units)
        during = (standing.during(mark.op, mark.before, mark.after) for mark in marks)
        for held in (at_end, *(resident + moment.charge(wanted, num_units) for moment in during)):
            for c in np.flatnonzero(self.frame.memory_bytes < held.sum()).tolist():
                units = np.flatnonzero(held)
                share = held[units] / self.frame.memory_bytes[c]
                self.most.add((units * self.num + c, share), limit=1.0)


def standing_bytes(graph: Graph, unit: Ints, num_units: int, before: Bools, after: Bools) -> Floats:
    """[units] bytes on a unit's device at a moment when `before` have begun and `after` have not ended.

    Residents, tensors made before that are kept, and those that the unit itself uses after.
    """
    stays = graph.keep & before[graph.tensor_op]
    maker = graph.tensor_op[graph.use_tensor]
    again = before[maker] & after[graph.use_op] & (unit[maker] == unit[graph.use_op])
    stays[graph.use_tensor[again]] = True
    size = np.where(stays & before[graph.tensor_op], home_bytes(graph), 0).astype(np.float64)
    held = np.bincount(unit, graph.resident_bytes.astype(np.float64), num_units)
    total: Floats = (held + np.bincount(unit[graph.tensor_op], size, num_units)).astype(np.float64)
    return total

"""Contiguous segments of the forward order, several per device, found by moving their cuts.

In a training step only part of the backward pass is waited for: the gradients of weights can be made while
another device goes on with those of activations, and updates run at any time after them. So a step gains
from a second device after few crossings: some layers here, the next there, the rest here again, and ops in
the order of how much still waits for them. A move shifts a cut, gives a segment to another device, lays a
new segment over a stretch, or takes one away; the simulator judges every plan. Riders (weights, updates,
backward ops) go with their unit. It starts from everything on the fastest device and from chains shared out
by memory and by speed. Anytime; deterministic under a count budget. O(ops) a plan.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run, Score
from loadmaster.placers.answer import Tally
from loadmaster.placers.heuristic._list_kernel import upward_rank
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.placers.registry import Placer
from loadmaster.simulator.events.engine import prepare

Row = tuple[tuple[int, int], ...]  # (end, device) of each segment; the last end is the number of units
_WIDEST = 0.25  # of the row, for a shift or a new segment
_HALVINGS = 8
_HALF = 0.5
_SHIFT, _SLIDE, _GIVE, _LAY = 0.3, 0.45, 0.55, 0.85  # up to these shares of the moves; else one fewer
_STRIPES = ((1, 0.1), (1, 0.3), (1, 0.5), (2, 0.2), (2, 0.4), (3, 0.4))  # stretches, share of the row
_OTHERS = 4  # devices that are striped with the fastest


@dataclass(frozen=True, slots=True)
class Segments:
    """`patience`: plans tried in a row without a better one after which the next start is taken; `start`: a
    plan whose segments are one more start.
    """

    patience: int = 200
    start: Plan | None = None
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __post_init__(self) -> None:
        """Refuse what is no patience."""
        if not isinstance(self.patience, int) or isinstance(self.patience, bool) or self.patience < 0:
            raise InputError(f"segments: patience is {self.patience!r}; give a whole number >= 0")

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Try the starts, then move the cuts of the best of them."""
        tally = Tally(problem, run)
        search = _Search(problem, tally)
        rows = _list_starts(problem, search.cargo)
        if self.start is not None:
            rows.insert(0, _read_row(self.start, search.cargo))
        starts = sorted((search.score_row(row), row) for row in dict.fromkeys(rows))
        for score, row in starts:
            if search.over:
                break
            self._climb(search, score, row)
        tally.mend()
        return tally.answer(algorithm="segments")

    def _climb(self, search: "_Search", now: Score, row: Row) -> None:
        """Move on to what is no worse, until nothing better was found for long."""
        idle = 0
        while idle < self.patience and not search.over:
            moved = _move_segment(row, search.tally.run.rng, *search.cargo.fits.shape)
            rated = search.score_row(moved) if moved != row else now
            idle = 0 if rated < now else idle + 1
            if rated <= now:
                now, row = rated, moved


class _Search:
    """Plans of rows, ordered by what still waits for an op."""

    def __init__(self, problem: Problem, tally: Tally) -> None:
        self.tally, self.cargo = tally, load_cargo(problem)
        fixed, least_s = prepare(problem).fixed, problem.device_compute_s.min(axis=1)
        rank_s = upward_rank(fixed, least_s, np.zeros(problem.graph.num_tensors))
        self.priority = np.empty(len(rank_s), dtype=np.int32)
        self.priority[np.lexsort((np.arange(len(rank_s)), -rank_s))] = np.arange(len(rank_s))
        self.fastest = self.cargo.seconds.argmin(axis=1)
        self._known: dict[Row, Score] = {}

    @property
    def over(self) -> bool:
        """Whether the budget is spent or the bound is met."""
        met = Score(0, self.tally.run.bound.seconds * (1.0 + 1e-9))
        return self.tally.spent or self.tally.best_score <= met

    def score_row(self, row: Row) -> Score:
        """The score of a row, simulated once; after the budget is spent the worst there is."""
        if row not in self._known:
            if self.tally.spent:
                return Score(np.iinfo(np.int64).max, np.inf)
            self._known[row] = self._simulate_row(row)
        return self._known[row]

    def _simulate_row(self, row: Row) -> Score:
        cargo = self.cargo
        ends, devices = np.array(row).T
        device = np.repeat(devices, np.diff(ends, prepend=0))
        device = np.where(cargo.fits[np.arange(cargo.num_units), device], device, self.fastest)
        plan = plan_of(device[cargo.of_op].astype(np.int32))
        return self.tally.offer(replace(plan, priority=self.priority))


def _list_starts(problem: Problem, cargo: Cargo) -> list[Row]:
    """Everything on the fastest device; chains in proportion to memory and to speed, there and back; the
    fastest device's row with one or two stretches of each other.
    """
    total_s = np.where(cargo.fits, cargo.seconds, 0.0).sum(axis=0)
    fast: Ints = np.argsort(total_s, kind="stable").astype(np.int32)
    room = problem.cluster.usable_bytes.astype(np.float64)
    rows: list[Row] = [((cargo.num_units, int(fast[0])),)]
    for order in (fast, fast[::-1]):
        rows.append(_make_chain(cargo.held_bytes, room[order], order))
        rows.append(_make_chain(cargo.seconds.min(axis=1), 1.0 / np.maximum(total_s[order], 1e-12), order))
    for other in fast[1:][:_OTHERS].tolist():
        rows += [_make_stripes(cargo.num_units, int(fast[0]), other, *stripe) for stripe in _STRIPES]
    return list(dict.fromkeys(rows))


def _read_row(plan: Plan, cargo: Cargo) -> Row:
    """The segments of a plan."""
    device = np.zeros(cargo.num_units, dtype=np.int32)
    device[cargo.of_op] = plan.device
    return _normalize_segments([(at + 1, d) for at, d in enumerate(device.tolist())], cargo.num_units)


def _make_stripes(num: int, first: int, other: int, stripes: int, share: float) -> Row:
    """`stripes` stretches of another device, of a share of the row in all, spread evenly."""
    gap, width = num * (1.0 - share) / (stripes + 1), num * share / stripes
    segments = []
    for k in range(stripes):
        begin = (k + 1) * gap + k * width
        segments += [(round(begin), first), (round(begin + width), other)]
    return _normalize_segments([*segments, (num, first)], num)


def _make_chain(weight: Floats, share: Floats, order: Ints) -> Row:
    """The row cut so that each device's part of the weight is its share."""
    reached = np.cumsum(weight) / max(float(weight.sum()), 1e-300)
    ends = np.searchsorted(reached, np.cumsum(share) / share.sum() * (1.0 - 1e-12)) + 1
    return _normalize_segments([(int(e), int(d)) for e, d in zip(ends, order, strict=True)], len(weight))


def _move_segment(row: Row, rng: np.random.Generator, num: int, devices: int) -> Row:
    """A neighbour of a row."""
    width = max(1, int(_WIDEST * num * 2.0 ** (-_HALVINGS * rng.random())))
    segments, kind, at = list(row), rng.random(), int(rng.integers(len(row)))
    end, device = segments[at]
    if kind < _SHIFT and len(row) > 1:
        segments[at] = (end + _random_shift(width, rng), device)
    elif kind < _SLIDE and len(row) > 2:
        by = _random_shift(width, rng)
        segments[at] = (end + by, device)
        segments[at - 1] = (segments[at - 1][0] + by, segments[at - 1][1])
    elif kind < _GIVE:
        segments[at] = (end, int(rng.integers(devices)))
    elif kind < _LAY or len(row) == 1:
        begin = int(rng.integers(num))
        segments = _insert_segment(segments, begin, min(begin + width, num), int(rng.integers(devices)))
    else:
        del segments[at]
    return _normalize_segments(segments, num)


def _random_shift(width: int, rng: np.random.Generator) -> int:
    return width if rng.random() < _HALF else -width


def _insert_segment(
    segments: list[tuple[int, int]], begin: int, end: int, device: int
) -> list[tuple[int, int]]:
    """The segments with another one laid over [begin, end)."""
    before = [(min(e, begin), d) for e, d in segments]
    after = [(e, d) for e, d in segments if e > end]
    return [*before, (end, device), *after]


def _normalize_segments(segments: list[tuple[int, int]], num: int) -> Row:
    """Ends that grow up to `num`, neighbours on different devices."""
    row: list[tuple[int, int]] = []
    for last, device in segments:
        end = min(last, num)
        if end <= (row[-1][0] if row else 0):
            continue
        if row and row[-1][1] == device:
            row.pop()
        row.append((end, device))
    if not row:
        row = [(num, segments[0][1])]
    row[-1] = (num, row[-1][1])
    return tuple(row)


PLACER: type[Placer] = Segments

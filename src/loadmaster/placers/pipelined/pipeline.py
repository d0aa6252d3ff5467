"""Whole steps of micro-batches: chooses device order, cuts, schedule, recomputation and replicas.

1. For the fastest 1, 2, ... devices, in several orders and as replicas, the best cuts are found by dynamic
   programming (`_cuts.py`, after PipeDream and Piper): a stage is recomputed where it has no room otherwise.
2. The best few by that estimate are simulated as they will run, under every schedule that is allowed; where
   memory overflows they are cut again with less room.
3. Local search from the best: borders, neighbours, schedule, counts of replicas; every move is simulated.

O(L S P^2) for L layouts of S stages on a line of P <= 128 segments, then one simulation for each plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Longs
from loadmaster.core.errors import InputError
from loadmaster.core.pipelines.order import ZERO_BUBBLE
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Run, Score
from loadmaster.placers.answer import Tally
from loadmaster.placers.pipelined._candidates import (
    Candidate,
    list_layouts,
    make_plan,
    schedules_asked,
    share_microbatches,
    with_schedule,
)
from loadmaster.placers.pipelined._cuts import Asked, best_cut
from loadmaster.placers.pipelined._line import Line, make_line
from loadmaster.placers.registry import Placer

_ROOM = 0.97  # of the memory, for what a cut does not count
_TIGHTER = 3


@dataclass(frozen=True, slots=True)
class PipelineSteps:
    """`simulated`: how many layouts are simulated under each schedule; `moves`: the most moves of the search;
    `replicas`: whether the whole pipeline may stand several times.
    """

    simulated: int = 6
    moves: int = 200
    replicas: bool = True
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    stepped: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Cut, simulate, then search."""
        if not problem.is_stepped:
            raise InputError("pipeline plans steps of micro-batches; ask for some, e.g. --pipeline auto:8")
        search = _Search(problem, run)
        search.construct(self.simulated, replicas=self.replicas)
        search.improve(self.moves)
        return search.tally.answer(algorithm="pipeline")


class _Search:
    """Candidates that were simulated, and the best of them."""

    def __init__(self, problem: Problem, run: Run) -> None:
        self.problem, self.run, self.tally = problem, run, Tally(problem, run)
        self.line: Line = make_line(problem)
        self.total = 0 if problem.schedule is None else problem.schedule.num_microbatches
        self.seen: dict[Candidate, Score] = {}
        self.best: Candidate | None = None

    def construct(self, most: int, *, replicas: bool) -> None:
        """The best cuts of all layouts, simulated, under every schedule."""
        line, total = self.line, self.total
        # Weights that no op holds by itself have gradients of unknown size: their sums cannot be priced.
        priced = line.gradient_bytes[-1] > 0 or line.resident_bytes[-1] == 0
        replicas = replicas and bool(priced)
        is_free = len(schedules_asked(self.problem)) > 1
        layouts = [rows for rows in list_layouts(line, replicas=replicas) if len(rows) <= total]
        for schedule, each in schedules_asked(self.problem):
            rated: list[tuple[float, int, Candidate]] = []
            for at, rows in enumerate(layouts):
                if each > 1 and len(rows[0]) < 2 and is_free:
                    continue  # stages of one device in turn are one stage
                counts = share_microbatches(line, rows, total)
                found = self._cut(Candidate(rows, counts, schedule, each), self._usable(_ROOM))
                if found is not None:
                    rated.append((found[0], at, found[1]))
            rated.sort(key=lambda one: one[:2])
            for _, _, candidate in self._pick(rated, most):
                self._simulate_within_memory(candidate)
                if self.tally.spent:
                    return
        if self.tally.scored == 0:
            self._offer_without_limits(layouts)

    def _pick(
        self, rated: list[tuple[float, int, Candidate]], most: int
    ) -> list[tuple[float, int, Candidate]]:
        """The best by estimate, and the best of each number of devices and replicas."""
        first = rated[:most]
        shapes = {(len(c.devices), len(c.devices[0])) for _, _, c in first}
        for one in rated[most:]:
            shape = (len(one[2].devices), len(one[2].devices[0]))
            if shape not in shapes:
                shapes.add(shape)
                first.append(one)
        return first

    def _usable(self, share: float) -> Longs:
        room: Longs = (self.problem.cluster.usable_bytes * share).astype(np.int64)
        return room

    def _cut(self, candidate: Candidate, room: Longs) -> tuple[float, Candidate] | None:
        asked = Asked(
            devices=candidate.stage_devices,
            microbatches=candidate.microbatches,
            in_flight=np.array(candidate.in_flight, dtype=np.int32),
            room=room,
            stages_per_rank=candidate.stages_per_rank,
            may_recompute=candidate.schedule != ZERO_BUBBLE,
        )
        cut = best_cut(self.line, asked)
        if cut is None:
            return None
        return cut.estimate_s, replace(candidate, border=cut.border, recompute=cut.recompute)

    def _simulate_within_memory(self, candidate: Candidate) -> None:
        """Simulate; where memory overflows, cut again with as much less room."""
        usable = self.problem.cluster.usable_bytes
        room = self._usable(_ROOM)
        for _ in range(_TIGHTER):
            score = self._offer(candidate)
            if score.overflow_bytes == 0 or self.tally.spent:
                return
            peak = np.maximum(np.array(score.peak_bytes, dtype=np.float64), 1.0)
            room = np.where(peak > usable, room * (usable / peak) * _ROOM, room).astype(np.int64)
            found = self._cut(replace(candidate, border=(), recompute=()), room)
            if found is None:
                return
            candidate = found[1]

    def _offer(self, candidate: Candidate) -> Score:
        if candidate in self.seen:
            return self.seen[candidate]
        score = self.tally.offer(make_plan(self.line, candidate), in_order=True)
        self.seen[candidate] = score
        if self.best is None or score < self.seen[self.best]:
            self.best = candidate
        return score

    def _offer_without_limits(self, layouts: list[tuple[tuple[int, ...], ...]]) -> None:
        """Where nothing fits: the cut with all the room in the world that has most devices."""
        room = np.full(self.problem.cluster.num_devices, 2**60, dtype=np.int64)
        schedule, each = schedules_asked(self.problem)[0]
        for rows in sorted(layouts, key=lambda rows: (-len(rows[0]), len(rows))):
            counts = share_microbatches(self.line, rows, self.total)
            found = self._cut(Candidate(rows, counts, schedule, each), room)
            if found is not None:
                self._offer(found[1])
                return
        raise InputError(
            f"graph {self.problem.graph.name!r}: no cut into {each} or more stages was found that its pins"
            " and what the devices can run allow; leave the pipeline or the pins out"
        )

    def improve(self, moves: int) -> None:
        """Take the first neighbour that is better, until there is none."""
        for _ in range(moves):
            if self.best is None or self.tally.spent:
                return
            at, score = self.best, self.seen[self.best]
            for neighbour in self._neighbours(at):
                if neighbour in self.seen:
                    continue
                if self._offer(neighbour) < score or self.tally.spent:
                    break
            if self.best == at:
                return

    def _neighbours(self, at: Candidate) -> Iterator[Candidate]:
        """Borders moved, recomputation changed, micro-batches handed on, other schedules, devices swapped."""
        for s in range(1, at.num_stages):
            for by in (-1, 1, -2, 2, -4, 4):
                moved = at.border[s] + by
                if at.border[s - 1] < moved < at.border[s + 1]:
                    border = (*at.border[:s], moved, *at.border[s + 1 :])
                    yield replace(at, border=border)
        for s in range(at.num_stages):
            if at.schedule != ZERO_BUBBLE:
                yield replace(at, recompute=(*at.recompute[:s], not at.recompute[s], *at.recompute[s + 1 :]))
        for one in range(len(at.devices)):
            for other in range(len(at.devices)):
                if one != other and at.microbatches[one] > 1:
                    counts = list(at.microbatches)
                    counts[one] -= 1
                    counts[other] += 1
                    yield replace(at, microbatches=tuple(counts))
        for schedule, each in schedules_asked(self.problem):
            if each == at.stages_per_rank and schedule != at.schedule:
                yield with_schedule(at, schedule, each)
        if len(at.devices) == 1:
            yield from self._swap_devices(at)

    def _swap_devices(self, at: Candidate) -> Iterator[Candidate]:
        """Two devices of the pipeline, or one of it and one outside, in each other's place, cut again."""
        row = at.devices[0]
        outside = [d for d in range(self.problem.cluster.num_devices) if d not in row]
        for i, one in enumerate(row):
            for other in (*row[i + 1 :], *outside):
                swap = {one: other, other: one}
                rows = (tuple(swap.get(d, d) for d in row),)
                kinds = self.problem.cluster.kind
                if kinds[one] == kinds[other] and other not in row:
                    continue
                fresh = replace(at, devices=rows, border=(), recompute=())
                found = self._cut(fresh, self._usable(_ROOM))
                if found is not None:
                    yield found[1]


PLACER: type[Placer] = PipelineSteps

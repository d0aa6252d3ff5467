"""Groups: what a learned placer decides about, and what its decisions cost.

A group is a colour class of ops that moves as one; parameters ride with their first reader. A row [U] gives
each group its device. An infeasible row costs its time stretched by its worst relative overrun, so that a
policy learns from it; it is never an answer (`Tally` ranks fitting before fast).
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Score
from loadmaster.placers.exact._latency.symmetry import find_alike_devices
from loadmaster.placers.heuristic._list_kernel import upward_rank
from loadmaster.placers.learned._sampling import draw_rows, relabel_rows
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.simulator.events.engine import prepare

ALONE = -1
_PER_OVERRUN = 10.0  # times the relative overrun of the worst device


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A problem as rows of devices."""

    problem: Problem
    cargo: Cargo
    alike: Ints  # [D] the set of devices that may change places, or ALONE
    room_bytes: Floats  # [D]
    by_bytes: Ints  # [U] groups, the largest first: the order in which a sample takes room
    priority: Ints  # [N] ops in the order of how much waits for them; for throughput all equal

    @property
    def num(self) -> int:
        """U."""
        return self.cargo.num_units

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.room_bytes)

    def plan(self, row: Ints) -> Plan:
        """The plan of a row."""
        plan = plan_of(row[self.cargo.of_op].astype(np.int32))
        return replace(plan, priority=self.priority)

    def row(self, plan: Plan) -> Ints:
        """The devices of a plan's groups."""
        device = np.zeros(self.num, dtype=np.int32)
        device[self.cargo.of_op] = plan.device
        return device

    def draw(self, probability: Floats, rng: np.random.Generator, count: int) -> Ints:
        """[count, U] rows; a device that may not run a group, or has no room left for it, is not drawn."""
        chance, cargo = rng.random((count, self.num)), self.cargo
        rows: Ints = draw_rows(
            probability, chance, self.by_bytes, cargo.held_bytes, self.room_bytes, cargo.fits
        )
        return rows

    def relabel(self, rows: Ints) -> Ints:
        """The rows with devices that are alike named in the order of their first use."""
        if (self.alike == ALONE).all():
            return rows
        named: Ints = relabel_rows(rows, self.alike)
        return named

    def penalised_s(self, score: Score) -> float:
        """Seconds of a row, stretched where it does not fit."""
        if score.overflow_bytes == 0 or not score.peak_bytes:
            return score.time_s
        peak = np.array(score.peak_bytes, dtype=np.float64)
        over = float((peak / np.maximum(self.room_bytes, 1.0) - 1.0).max())
        return score.time_s * (1.0 + _PER_OVERRUN * max(over, 0.0))


def group_problem(problem: Problem) -> Groups:
    """A problem's groups."""
    cargo = load_cargo(problem)
    alike = np.full(problem.cluster.num_devices, ALONE, dtype=np.int32)
    for k, devices in enumerate(find_alike_devices(problem)):
        alike[devices] = k
    priority = np.zeros(problem.graph.num_ops, dtype=np.int32)
    if problem.objective == Objective.STEP:
        priority = rank_ops(problem)
    return Groups(
        problem=problem,
        cargo=cargo,
        alike=alike,
        room_bytes=problem.cluster.usable_bytes.astype(np.float64),
        by_bytes=np.argsort(-cargo.held_bytes, kind="stable").astype(np.int32),
        priority=priority,
    )


def rank_ops(problem: Problem) -> Ints:
    """[N] the place of each op when those come first for which most still waits."""
    least_s = problem.device_compute_s.min(axis=1)
    rank_s = upward_rank(prepare(problem).fixed, least_s, np.zeros(problem.graph.num_tensors))
    priority = np.empty(len(rank_s), dtype=np.int32)
    priority[np.lexsort((np.arange(len(rank_s)), -rank_s))] = np.arange(len(rank_s))
    return priority

"""Chooses the devices of whole layers by a decision diagram, for a bound and for plans of training steps.

A training step is nearly a chain of layers that is walked twice. The devices of the layers are chosen from
the loss to the input by labels of time, work and bytes (`simulator/bounds/layer_search.py`, proof in
`docs/bounds.md`). Where labels are merged the answer is a bound of every plan. Where they are dropped
instead it is a plan: units between the layers go with the neighbour that they exchange most with, ops run
in the order of what still waits for them, and the simulator judges it. Branches are divided as long as the
budget lasts, the weakest first; under a count budget their number is fixed. After Bergman et al.,
"Decision Diagrams for Optimization", Springer 2016.
"""

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import units
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Bound, Run
from loadmaster.core.units import format_percent, format_seconds
from loadmaster.placers.answer import Tally
from loadmaster.placers.heuristic._list_kernel import upward_rank
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.placers.registry import Placer
from loadmaster.simulator.bounds.layer_search import FEW_OPTIONS, MANY_OPTIONS, Branch, LayerBound
from loadmaster.simulator.events.engine import is_unordered, prepare

NAME = "layers"
_SEARCHED, _BRANCHES = 12, 60  # under a count budget
_WIDTH = 100  # labels of a device when a plan is looked for
_SHARES = (1.0, 0.97, 0.94, 0.9)  # of the memory: what the bound does not count takes room, too
_MANY_S = 1.5  # of budget at least, for steps with many options


@dataclass(frozen=True, slots=True)
class Layers:
    """`start`: a plan to begin with, whose time says what need not be looked at."""

    start: Plan | None = None
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Plans and the bound, in turns."""
        tally = Tally(problem, run)
        cargo = load_cargo(problem)
        self._begin(tally, cargo)
        seconds = 0.0
        many = _has_time_for_many(run)
        if not (tally.spent or _is_met(tally, seconds)):
            found = LayerBound(
                problem, _upper_s(tally), most_options=MANY_OPTIONS if many else FEW_OPTIONS, coarse=many
            )
            if found.steps is not None:
                climb = _Climb(tally, cargo, found, max(seconds, found.seconds))
                climb.run()
                seconds = climb.seconds
        tally.mend()
        bound = run.bound
        if seconds > bound.seconds:
            bound = Bound(seconds, NAME, bound.infeasible)
        tally.run = replace(run, bound=bound)
        return tally.answer(algorithm=NAME)

    def _begin(self, tally: Tally, cargo: Cargo) -> None:
        """The plan to begin with, or everything where it is fastest."""
        if self.start is not None:
            tally.offer(self.start, in_order=not is_unordered(self.start))
            return
        total_s = np.where(cargo.fits, cargo.seconds, 0.0).sum(axis=0)
        device = np.where(
            cargo.fits[:, int(total_s.argmin())], int(total_s.argmin()), cargo.seconds.argmin(axis=1)
        )
        tally.offer(plan_of(device[cargo.of_op].astype(np.int32)))


def _upper_s(tally: Tally) -> float:
    """What plans are asked to beat: the best that fits; else a time that is hardly missed."""
    score = tally.best_score
    if score.overflow_bytes == 0:
        return score.time_s
    return 4.0 * max(score.time_s, tally.run.bound.seconds)


def _has_time_for_many(run: Run) -> bool:
    """Whether steps with many options can be searched: their prices take a second or two."""
    limit_s = run.budget.seconds
    return limit_s is not None and run.started + limit_s - time.perf_counter() >= _MANY_S


def _is_met(tally: Tally, seconds: float) -> bool:
    score, known = tally.best_score, max(seconds, tally.run.bound.seconds)
    return score.overflow_bytes == 0 and score.time_s <= known * (1.0 + 1e-9)


class _Climb:
    """Branches of one set of steps, and the plans that they suggest."""

    def __init__(self, tally: Tally, cargo: Cargo, found: LayerBound, seconds: float) -> None:
        self.tally, self.cargo, self.found, self.seconds = tally, cargo, found, seconds
        problem = tally.problem
        least_s = problem.device_compute_s.min(axis=1)
        rank_s = upward_rank(prepare(problem).fixed, least_s, np.zeros(problem.graph.num_tensors))
        self.priority = np.empty(len(rank_s), dtype=np.int32)
        self.priority[np.lexsort((np.arange(len(rank_s)), -rank_s))] = np.arange(len(rank_s))
        self.tried: set[bytes] = set()

    def run(self) -> None:
        """Until the budget, or what there is to divide, ends."""
        counted = self.tally.run.budget.count is not None
        branches = searched = 0
        while not self.found.done and not (counted and (branches >= _BRANCHES or searched >= _SEARCHED)):
            branch = self.found.advance()
            branches, searched = branches + 1, searched + (branch is not None)
            self.seconds = max(self.seconds, self.found.seconds)
            self._say()
            if branch is not None:
                self._suggest(branch)
            if self.tally.spent or _is_met(self.tally, self.seconds):
                return

    def _say(self) -> None:
        score, bound_s = self.tally.best_score, max(self.seconds, self.tally.run.bound.seconds)
        if score.overflow_bytes == 0 and bound_s > 0:
            gap = format_percent(score.time_s / bound_s - 1.0)
            told = f"best {format_seconds(score.time_s)}, bound {format_seconds(bound_s)}, gap {gap}"
            self.tally.run.progress(f"{NAME}: {told}", 0.0)

    def _suggest(self, branch: Branch) -> None:
        """Simulate what an unmerged search of the branch finds."""
        for share in _SHARES:
            choice = self.found.search.find_choice(branch.open_at, branch.point, _WIDTH, share=share)
            if choice is None or self.tally.spent:
                return
            device = fill_in(self.tally.problem, self.cargo, choice[1])
            if device.tobytes() in self.tried:
                continue
            self.tried.add(device.tobytes())
            score = self.tally.offer(replace(plan_of(device[self.cargo.of_op]), priority=self.priority))
            if score.overflow_bytes == 0:
                self.found.lower_limit(score.time_s)


def fill_in(problem: Problem, cargo: Cargo, device_of_unit: dict[int, int]) -> Ints:
    """[cargo units] devices: those given by unit, others where they exchange most, as far as allowed."""
    graph, num_devices = problem.graph, problem.cluster.num_devices
    unit, _ = units(graph)
    device = np.full(cargo.num_units, -1, dtype=np.int32)
    for op in np.flatnonzero(np.isin(unit, list(device_of_unit)))[::-1].tolist():
        device[cargo.of_op[op]] = device_of_unit[int(unit[op])]
    maker, user = cargo.of_op[graph.tensor_op[graph.use_tensor]], cargo.of_op[graph.use_op]
    size = graph.tensor_bytes[graph.use_tensor] + 1.0
    for mine, other, order in ((maker, user, -1), (user, maker, 1)):  # a view goes where it is used
        by_unit = np.argsort(mine, kind="stable")
        ptr = np.searchsorted(mine[by_unit], np.arange(cargo.num_units + 1))
        for u in np.flatnonzero(device < 0)[::order].tolist():
            near = by_unit[ptr[u] : ptr[u + 1]]
            near = near[device[other[near]] >= 0]
            pull = np.bincount(device[other[near]], size[near], num_devices) * cargo.fits[u]
            if pull.max(initial=0.0) > 0:
                device[u] = int(pull.argmax())
    allowed = (device >= 0) & cargo.fits[np.arange(cargo.num_units), device]
    return np.where(allowed, device, cargo.seconds.argmin(axis=1)).astype(np.int32)


PLACER: type[Placer] = Layers

"""The table of `learned`: every search by single moves and by tables, at equal evaluations, over seeds.

Throughput: max-load without any condition on the split, in closed form. Step: the simulator, ops served by
what waits for them. Groups are colour classes. An evaluation is one request for the time of a whole row; a
proposed move is one. Warm searches begin with the row of `linear_dp`, or of `heft`, which is their first
evaluation. Every best row of a throughput search is timed by the simulator again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import loadmaster as lm
from benchmarks.learned_evaluator import ClosedForm, Simulated
from benchmarks.measure import Report
from benchmarks.question import question_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.placers.learned._groups import Groups, group_problem
from loadmaster.placers.learned._searcher import Climb, Searcher
from loadmaster.placers.learned._table import TableSearch, TableSettings
from loadmaster.placers.registry import placer

SUITE = "learned"
BUDGETS = {Objective.THROUGHPUT: (100, 500, 2400, 10_000), Objective.STEP: (100, 500, 2400)}
OPTIMA = {  # proven, of free splits; None: no plan is proven to be best
    "LayerGraphs/bert24_inference": 17.714719,
    "LayerGraphs/bert24_training": 39.789539,
    "LayerGraphs/gnmt_inference": 31.687311,
    "LayerGraphs/inceptionv3_inference": None,
    "LayerGraphs/resnet50_inference": None,
    "LayerGraphs/resnet50_training": None,
    "OperatorGraphs/bert_l-3_inference": 21.908376,
    "OperatorGraphs/bert_l-3_training": 54.207399,
    "OperatorGraphs/bert_l-6_inference": None,
    "OperatorGraphs/bert_l-6_training": None,
    "OperatorGraphs/resnet50_inference": 124.348850,
    "OperatorGraphs/resnet50_training": 255.194416,
}
_HEAT = 0.3  # of the work per device, where annealing begins
_VAIN = 5  # times the groups: proposals without gain before a walk starts elsewhere
Evaluator = ClosedForm | Simulated


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """A problem, its groups, and the row that warm searches start from."""

    problem: Problem
    groups: Groups
    start: Any
    start_s: float  # of the constructor's own plan, which for a step has an order of its own
    bound_s: float

    @property
    def uniform(self) -> Any:
        """[U, D] every device of a group alike."""
        fits = self.groups.cargo.fits
        return fits / fits.sum(axis=1, keepdims=True)

    @property
    def heat_s(self) -> float:
        """Where annealing begins."""
        work_s = float(self.problem.device_compute_s.min(axis=1).sum())
        return _HEAT * work_s / self.problem.cluster.num_devices

    def evaluator(self) -> Evaluator:
        """One that has counted nothing."""
        kind = ClosedForm if self.problem.objective == Objective.THROUGHPUT else Simulated
        return kind(self.problem, self.groups)


def input_of(problem: Problem) -> Input:
    """A problem made ready."""
    groups, question = group_problem(problem), question_of(problem)
    name = "linear_dp" if problem.objective == Objective.THROUGHPUT else "heft"
    found = question.ask(placer(name))
    plan = found.plan if found.plan is not None else found.least_overflow_plan
    assert plan is not None
    start_s = found.score_s if found.score_s is not None else np.inf
    return Input(problem, groups, groups.row(plan), float(start_s), question.bound.seconds)


class Random:
    """Rows drawn uniformly."""

    def __init__(self, given: Input) -> None:
        self.given = given

    def propose(self, rng: np.random.Generator) -> Any:
        """A hundred at a time."""
        return self.given.groups.draw(self.given.uniform, rng, 100)

    def observe(self, rows: Any, times_s: Any) -> None:
        """Nothing is learned."""


class Anneal(Climb):
    """The moves of a climb, worse ones too while it is warm."""

    def __init__(self, given: Input, most: int) -> None:
        super().__init__(given.groups, None)
        self.heat_s, self.most, self.done = given.heat_s, most, 0
        self.chance = np.random.default_rng(most)

    def observe(self, rows: Any, times_s: Any) -> None:
        """Move on by the rule of Metropolis."""
        self.done += 1
        warmth, time_s = self.heat_s * 3000.0 ** (-self.done / self.most), float(times_s[0])
        if time_s <= self.time_s or self.chance.random() < np.exp((self.time_s - time_s) / warmth):
            self.row, self.time_s = rows[0], time_s
        self.idle = 0


class TableThenClimb:
    """A table for half of the evaluations, then single moves from the best row."""

    def __init__(self, table: TableSearch, closed: Evaluator, groups: Groups, at: int) -> None:
        self.table, self.closed, self.groups, self.at = table, closed, groups, at
        self.climb: Climb | None = None

    def propose(self, rng: np.random.Generator) -> Any:
        """The table's, then neighbours."""
        if self.climb is None and self.closed.count >= self.at and self.closed.best is not None:
            self.climb = Climb(self.groups, self.closed.best, self.closed.best_s, restarts=False)
        return (self.climb or self.table).propose(rng)

    def observe(self, rows: Any, times_s: Any) -> None:
        """By whoever proposed."""
        (self.climb or self.table).observe(rows, times_s)


Search = Callable[[Input, Evaluator, int, int], None]


def _drive(searcher: Searcher, evaluator: Evaluator, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    while evaluator.count < most:
        rows = searcher.propose(rng)[: most - evaluator.count]
        searcher.observe(rows, evaluator(rows))


def _random(given: Input, evaluator: Evaluator, most: int, seed: int) -> None:
    _drive(Random(given), evaluator, most, seed)


def _climb(warm: bool) -> Search:
    def search(given: Input, evaluator: Evaluator, most: int, seed: int) -> None:
        groups = given.groups
        if isinstance(evaluator, Simulated):
            first = Climb(groups, None)
            if warm:
                first = Climb(groups, given.start, float(evaluator(given.start[None])[0]))
            _drive(first, evaluator, most, seed)
            return
        many = most // (_VAIN * groups.num) + 2
        starts = groups.draw(given.uniform, np.random.default_rng(seed), many)
        if warm:
            starts[0] = given.start
        evaluator.walk(starts, groups.cargo.fits, most, seed, idle=_VAIN * groups.num)

    return search


def _anneal(given: Input, evaluator: Evaluator, most: int, seed: int) -> None:
    if isinstance(evaluator, Simulated):
        _drive(Anneal(given, most), evaluator, most, seed)
        return
    starts = given.groups.draw(given.uniform, np.random.default_rng(seed), 1)
    evaluator.walk(starts, given.groups.cargo.fits, most, seed, heat=given.heat_s)


def _table(warm: bool, climbs: bool = False, **settings: Any) -> Search:
    def search(given: Input, evaluator: Evaluator, most: int, seed: int) -> None:
        if warm:
            evaluator(given.start[None])
        first = given.start if warm else None
        table = TableSearch(given.groups, TableSettings(**settings), budget=most, start=first)
        whole = TableThenClimb(table, evaluator, given.groups, most // 2) if climbs else table
        _drive(whole, evaluator, most, seed)

    return search


METHODS: dict[str, Search] = {
    "random": _random,
    "hill climbing": _climb(False),
    "annealing": _anneal,
    "cross-entropy": _table(False),
    "post, clipped": _table(False, ppo="clipped"),
    "post, KL": _table(False, ppo="kl"),
    "warm hill climbing": _climb(True),
    "warm cross-entropy": _table(True),
    "warm post": _table(True, climbs=True, ppo="clipped"),
}


def measure_table(report: Report, shared: Path, seeds: int, until: float = np.inf) -> None:
    """Every method on every input that can begin before `until`, for throughput and for a step."""
    folder = shared / "msr"
    known: dict[str, list[tuple[str, Path, float | None]]] = {
        "throughput": [
            (at, folder / "throughput-inputs" / f"{at}.json", best) for at, best in OPTIMA.items()
        ],
        "step": [
            (f"{path.parent.name}/{path.stem}", path, None)
            for path in sorted((folder / "latency-inputs").glob("*/*.json"))
        ],
    }
    for objective, listed in known.items():
        for name, path, optimum in listed:
            if time.monotonic() > until:
                break
            given = input_of(lm.problem(str(path), objective=objective, split=Split.FREE))
            _measure_input(report, f"{objective} {name}", given, optimum, seeds)


def _measure_input(report: Report, name: str, given: Input, optimum: float | None, seeds: int) -> None:
    label = f"{name} ({given.groups.num})"
    question, least, budgets = question_of(given.problem), np.inf, BUDGETS[given.problem.objective]
    medians: dict[tuple[str, int], float] = {}
    for method, search in METHODS.items():
        for most in budgets:
            found, taken = [], []
            for seed in range(seeds):
                evaluator, began = given.evaluator(), time.process_time()
                search(given, evaluator, most, seed)
                taken.append(time.process_time() - began)
                found.append(evaluator.best_s)
                assert evaluator.count == most, (method, evaluator.count, most)
                if isinstance(evaluator, ClosedForm) and evaluator.best is not None:
                    told = question.simulator.score(given.groups.plan(evaluator.best)).time_s
                    assert abs(told / evaluator.best_s - 1) < 1e-9, (name, method, told, evaluator.best_s)
            medians[method, most], least = float(np.median(found)), min(least, *found)
            low, middle, high = np.percentile(found, [25, 50, 75], method="nearest")
            report.add(SUITE, f"{label}: {method}, {most} evaluations", float(np.median(found)), "")
            report.figures[-1] |= {
                "quartiles": [float(low), float(middle), float(high)],
                "worst": float(max(found)),
                "seeds": seeds,
                "processor_s": float(np.median(taken)),
            }
    start = "linear_dp" if given.problem.objective == Objective.THROUGHPUT else "heft"
    report.add(SUITE, f"{label}: {start}", given.start_s, "")
    report.add(SUITE, f"{label}: lower bound", given.bound_s, "")
    report.add(SUITE, f"{label}: best of all methods and seeds", least, "")
    if optimum is not None:
        report.add(SUITE, f"{label}: proven optimum", optimum, "")
    for most in budgets:
        ratio = medians["warm post", most] / medians["warm hill climbing", most]
        aim, reached = ("<= 1", ratio <= 1 + 1e-9) if most == 2400 else ("", None)
        ratio_name = f"{label}: warm post / warm hill climbing, {most} evaluations"
        report.add(SUITE, ratio_name, ratio, "x", aim=aim, reached=reached)

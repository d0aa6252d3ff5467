"""Placement and order of a step by CP-SAT, in the simulator's own model, with a proven bound.

Ops and transfers are intervals, no two at once on an engine or a link, memory is cumulative (see
`_latency/model.py` for the model and what it relaxes). Warm-started by the constructors and a short local
search: their best plan is hint and upper bound. The bound is the best of CP-SAT's and of the linear programme
(`simulator/bounds/step_programme.py`), both over the original graph. Beyond `exact_ops` ops the model is that
of the grouped problem: good plans, but no bound, since merging is a restriction; the programme's bound
remains.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import units
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Bound, Budget, Run
from loadmaster.core.units import format_seconds
from loadmaster.placers.answer import Meter, Tally, broken_rules, with_note
from loadmaster.placers.exact._latency.search import search
from loadmaster.placers.exact._latency.solver import require_solver
from loadmaster.placers.grouping.groups import group_ops
from loadmaster.placers.registry import Placer, placer
from loadmaster.placers.traits import NEEDS_ORTOOLS
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step
from loadmaster.simulator.events.engine import is_unordered

_CONSTRUCTORS = ("single_device", "heft", "m_etf", "chain_balance")
_SHORT = 0.15  # of the budget, for local search before and after
_FEW_OPS = 60  # below, the programme adds nothing to the model
_PROGRAMME = 0.8  # of the budget at most
_LONG_S = 60.0  # under a count budget: size alone decides
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class CpsatLatency:
    """`start`: a plan to begin with; `exact_ops`: ops up to which the model is exact; `coarse_ops`: groups to
    which larger graphs are merged, 0 = larger graphs get a bound only.
    """

    start: Plan | None = None
    exact_ops: int = 250
    coarse_ops: int = 120
    max_ops: ClassVar[int] = 20_000
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    needs: ClassVar[tuple[str, str]] = NEEDS_ORTOOLS

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Heuristics, programme, model; the best plan and the best bound."""
        cp_model = require_solver("cpsat_latency")
        meter, tally = Meter(run), Tally(problem, run)
        self._begin(problem, meter, tally)
        bound, rounded, note = run.bound, None, ""
        if problem.graph.num_ops > _FEW_OPS and not bound.infeasible and not meter.spent:
            bound, rounded, note = _solve_programme(problem, meter.member())
        if not bound.infeasible and not meter.spent and not _reaches_bound(tally, bound):
            if problem.graph.num_ops <= self.exact_ops:
                bound = _solve_exact(cp_model, meter, tally, bound)
            elif self.coarse_ops > 0:
                self._solve_coarse(cp_model, meter, tally)
                _refine_rounded(meter, tally, rounded)
        tally.run = replace(run, bound=bound)
        fits = tally.best_score.overflow_bytes == 0
        answer = tally.answer(algorithm="cpsat_latency", proof="" if fits else bound.infeasible)
        return with_note(answer, "cpsat_latency", note)

    def _begin(self, problem: Problem, meter: Meter, tally: Tally) -> None:
        """The best plan of the constructors, refined for a moment."""
        if self.start is not None:
            tally.offer(self.start, in_order=not is_unordered(self.start))
            return
        for name in _CONSTRUCTORS:
            tally.adopt(placer(name)(problem, replace(meter.member(), repair=False)))
            tally.scored = meter.count
            if meter.spent:
                return
        tally.mend()
        meter.charge(tally.scored)
        if tally.best_score.overflow_bytes == 0 and not meter.spent:
            _refine(problem, meter, tally)

    def _solve_coarse(self, cp_model: Any, meter: Meter, tally: Tally) -> None:
        """The model of groups, which proves nothing, with half of what is left."""
        groups = group_ops(tally.problem, max_ops=self.coarse_ops)
        if groups.problem.graph.num_ops <= self.exact_ops:
            found = search(cp_model, groups.problem, None, meter.member().budget, share=_HALF)
            _offer(tally, [groups.back(plan) for plan in found.plans])
            meter.charge(tally.scored)


def _solve_exact(cp_model: Any, meter: Meter, tally: Tally, bound: Bound) -> Bound:
    """The exact model with what is left of the budget."""
    start = tally.best_plan if tally.best_score.overflow_bytes == 0 else None
    if start is not None and broken_rules(tally.problem, start):
        start = None
    found = search(cp_model, tally.problem, start, meter.member().budget)
    _offer(tally, found.plans)
    bound = replace(bound, infeasible=found.infeasible)
    if found.bound_s <= bound.seconds:
        return bound
    return replace(bound, seconds=found.bound_s, name="cp-sat")


def _reaches_bound(tally: Tally, bound: Bound) -> bool:
    score = tally.best_score
    return score.overflow_bytes == 0 and score.time_s <= bound.seconds * (1 + 1e-9)


def _solve_programme(problem: Problem, run: Run) -> tuple[Bound, Plan | None, str]:
    """The bound of the linear programme where it beats what is known, its shares as a plan, and a note."""
    limit_s = _LONG_S if run.budget.seconds is None else _PROGRAMME * run.budget.seconds
    found = solve_relaxed_step(problem, limit_s=limit_s)
    bound = replace(run.bound, seconds=found.bound_s * (1.0 - 1e-12), name="step programme")
    bound = max(run.bound, bound, key=lambda known: known.seconds)
    note = "" if found.ended else f"the step programme was not solved within {format_seconds(limit_s)}"
    if found.share is None:
        return bound, None, note
    unit, _ = units(problem.graph)
    device: Ints = found.share.argmax(axis=1).astype(np.int32)[unit]
    return bound, plan_of(device), note


def _refine_rounded(meter: Meter, tally: Tally, plan: Plan | None) -> None:
    """Local search from the programme's rounded shares, which lie elsewhere than what constructors make."""
    if plan is None or meter.spent or broken_rules(tally.problem, plan):
        return
    if tally.offer(plan).overflow_bytes == 0:
        refined = placer("refine", start=tally.last)
        tally.adopt(refined(tally.problem, meter.member()))
        meter.charge(tally.scored)


def _refine(problem: Problem, meter: Meter, tally: Tally) -> None:
    """A short local search."""
    member, budget = meter.member(), meter.run.budget
    if budget.count is not None:
        short = Budget(count=max(1, min(int(_SHORT * budget.count), budget.count - meter.count)))
    else:
        assert budget.seconds is not None
        left = budget.seconds - (time.perf_counter() - meter.run.started)
        short = Budget(seconds=max(min(_SHORT * budget.seconds, left), 1e-3))
    before = meter.count
    tally.adopt(placer("refine", start=tally.best_plan)(problem, replace(member, budget=short)))
    if short.count is not None:
        meter.charge(before + short.count)
    tally.scored = meter.count


def _offer(tally: Tally, plans: list[Plan]) -> None:
    """Score what the solver found: in its order, and with idle devices starting what is ready."""
    for plan in plans:
        if not broken_rules(tally.problem, plan):
            tally.offer(plan, in_order=True)
            tally.offer(plan)


PLACER: type[Placer] = CpsatLatency

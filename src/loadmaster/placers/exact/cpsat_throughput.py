"""The best split of any shape, or the best chain, by CP-SAT. Always gives a bound.

The integer programme of Tarnawski et al., NeurIPS 2020, as a constraint programme over classes and nets
(`_maxload/cpsat.py`), asked for splits within ever other limits (`_maxload/closing.py`) after classes that no
such split parts have been fused (`_maxload/reduce.py`). It begins with local search (free) or the best cut of
an order (chain). Chains are there as a witness of `ideal_dp`, which is faster. Needs the extra `exact`.

A time budget uses two threads; under a count budget one, and the solver's deterministic time, so that the
answer repeats. The solver may take 2 GiB; a programme of more than 200,000 booleans or 1,000 classes
is not given to it.
"""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Bound, Run
from loadmaster.placers.answer import Tally, with_note
from loadmaster.placers.exact._latency.solver import require_solver
from loadmaster.placers.exact._maxload.answering import make_budget_check, with_bound
from loadmaster.placers.exact._maxload.climb import Assignment, anneal_repeatedly, make_assignment
from loadmaster.placers.exact._maxload.closing import Clock, close_gap, free_bound, too_large
from loadmaster.placers.exact._maxload.contract import chain_model
from loadmaster.placers.exact._maxload.lines import best_line
from loadmaster.placers.exact._maxload.model import MaxLoad, free_model
from loadmaster.placers.exact._maxload.prices import find_prices
from loadmaster.placers.exact.local_search import (
    assign_roomiest_devices,
    find_start,
    make_plan_fit,
    offer_splits,
)
from loadmaster.placers.registry import Placer
from loadmaster.placers.traits import NEEDS_ORTOOLS

_RUNS, _TRIES = 6, 1_000_000
_FEW_TRIES = 20_000
_SHARE = 0.3  # of the budget for local search before the solver


@dataclass(frozen=True, slots=True)
class CpsatThroughput:
    """`start`: a plan to begin with, instead of local search."""

    start: Plan | None = None
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.THROUGHPUT,)
    needs: ClassVar[tuple[str, str]] = NEEDS_ORTOOLS
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE, Split.CHAIN)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Begin, close the gap, state what was found and what is proven."""
        require_solver("cpsat_throughput")
        chain = problem.split == Split.CHAIN
        model = chain_model(problem, merge=False).model if chain else free_model(problem)
        tally, bound, note = Tally(problem, run), Bound(0.0, "none"), ""
        first = self._first(problem, model, run, chain=chain)
        if first is None:
            tally.offer(plan_of(assign_roomiest_devices(problem)))
        else:
            low_s = find_prices(model).bound_s
            found = close_gap(
                model,
                first,
                low_s,
                Clock(run),
                chain=chain,
                improve=lambda better: better if chain else _anneal_start(model, better, run, low_s, runs=2),
            )
            offer_splits(model, tally, first, found.best)
            if model.restricted:
                bound = free_bound(free_model(problem), found.best.value_s)
            elif model.bounding:
                bound = Bound(found.bound_s * (1 - 1e-12), found.bound_name)
            if too_large(model):
                note = f"{model.num_classes:,} classes are too many for the solver; local search instead"
        make_plan_fit(problem, tally)
        return with_note(
            with_bound(tally.answer(algorithm="cpsat_throughput"), bound), "cpsat_throughput", note
        )

    def _first(self, problem: Problem, model: MaxLoad, run: Run, *, chain: bool) -> Assignment | None:
        bound_s = find_prices(model).bound_s
        if chain:
            stages = best_line(model, run.rng, rounds=10, bound_s=bound_s)
            return None if stages is None else make_assignment(model, stages.device(model))
        start = find_start(problem, model, run, self.start)
        if start is None or self.start is not None or not model.exact:
            return start
        return _anneal_start(model, start, run, bound_s, runs=_RUNS)


def _anneal_start(model: MaxLoad, start: Assignment, run: Run, bound_s: float, *, runs: int) -> Assignment:
    tries = _TRIES if run.budget.count is None else min(_TRIES, _FEW_TRIES * run.budget.count)
    spent = make_budget_check(run, share=_SHARE)
    return anneal_repeatedly(model, start, run.rng, runs=runs, tries=tries, bound_s=bound_s, spent=spent)


PLACER: type[Placer] = CpsatThroughput

"""Improves splits of any shape by annealing: starts from the best cut of an order, then moves and swaps.

State: the device of every class and the number of users of every net on every device, so that a move changes
the loads of two devices only (`_maxload/moves.py`): some ten million moves a second. Runs at several heats,
from the start and from the best in turn, until the budget or `runs` end. Room is never overrun; what the
simulator finds too large all the same is repaired. The same seed and count give the same plan.

Free splits only: a device may hold several separate pieces.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.exact._maxload.answering import make_budget_check
from loadmaster.placers.exact._maxload.climb import (
    Assignment,
    anneal_repeatedly,
    first_split,
    fits,
    make_assignment,
)
from loadmaster.placers.exact._maxload.model import MaxLoad, device_of_ops, free_model
from loadmaster.placers.exact._maxload.prices import find_prices
from loadmaster.placers.exact.linear_dp import LinearDp
from loadmaster.placers.registry import Placer

_TRIES = 1_000_000
_SHORT_TRIES = 20_000  # of a run, for each plan of a count budget


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """`runs` of annealing at most; `start`: a plan to begin with."""

    runs: int = 60
    start: Plan | None = None
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.THROUGHPUT,)
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Anneal, score, repair where need be."""
        model, tally = free_model(problem), Tally(problem, run)
        start = find_start(problem, model, run, self.start)
        if start is None:
            tally.offer(plan_of(assign_roomiest_devices(problem)))
        else:
            spent = make_budget_check(run, per_plan=_SHORT_TRIES)
            count = run.budget.count
            tries = _TRIES if count is None else min(_TRIES, _SHORT_TRIES * max(count // 6, 1))
            best = anneal_repeatedly(
                model,
                start,
                run.rng,
                runs=self.runs,
                tries=tries,
                bound_s=find_prices(model).bound_s,
                spent=spent,
            )
            offer_splits(model, tally, start, best)
        make_plan_fit(problem, tally)
        return tally.answer(algorithm="local_search")


def offer_splits(model: MaxLoad, tally: Tally, start: Assignment, best: Assignment) -> None:
    """Score the best split; where the model is an estimate, the start too: it may be better in truth."""
    tally.offer(plan_of(device_of_ops(model, best.device)))
    if not model.exact and (tally.run.budget.count is None or not tally.spent):
        tally.offer(plan_of(device_of_ops(model, start.device)))


def make_plan_fit(problem: Problem, tally: Tally) -> None:
    """Where a plan's peak overflows, a chain that is made with less room, else the plan repaired."""
    if tally.best_score.overflow_bytes > 0 and not tally.spent:
        tally.adopt(LinearDp()(problem, replace(tally.run, repair=False)))
    tally.mend()


def find_start(problem: Problem, model: MaxLoad, run: Run, plan: Plan | None) -> Assignment | None:
    """The plan given as an assignment if it fits the model, else the best cut of an order."""
    if plan is not None and len(plan.device) == problem.graph.num_ops:
        device = np.zeros(model.num_classes, dtype=np.int32)
        device[model.of_op] = plan.device
        if (device[model.of_op] == plan.device).all() and fits(model, device):
            return make_assignment(model, device)
    return first_split(problem, model, run.rng, bound_s=find_prices(model).bound_s)


def assign_roomiest_devices(problem: Problem) -> "np.typing.NDArray[np.int32]":
    """[N] devices of a plan that does not fit: every unit where most room is."""
    model = free_model(problem)
    room = {d: int(model.room[t]) for t, alike in enumerate(model.devices) for d in alike}
    kind = {d: t for t, alike in enumerate(model.devices) for d in alike}
    device = [
        max((d for d in kind if np.isfinite(model.seconds[v, kind[d]])), key=room.__getitem__)
        for v in range(model.num_classes)
    ]
    return device_of_ops(model, np.array(device, dtype=np.int32))


PLACER: type[Placer] = LocalSearch

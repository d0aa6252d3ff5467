"""From a model's split to a placer's answer: memory as the simulator sees it, and what is proven.

A model counts what stands in memory at the end of a step, and leaves out classes that take no time. So its
split is scored, and where a peak overflows it is made again with less room (`best_repaired`); its optimum
stays a bound of every plan all the same.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Problem
from loadmaster.core.run import Bound, Run
from loadmaster.placers.answer import Builder
from loadmaster.placers.exact._maxload.contract import Chain, chain_model
from loadmaster.placers.exact._maxload.lines import Stages
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.placement_units import Cargo

_EQUAL = 1e-9  # a score this near its bound differs by rounding alone
_PER_PLAN = 2_000_000  # elementary steps that a plan of a count budget stands for
Solve = Callable[[MaxLoad], Stages | None]


def chain_builder(problem: Problem, solve: Solve) -> tuple[Builder, Cargo]:
    """Gives each unit the device of its class, and the units; asked for the problem's own room first.

    Classes that join their neighbour because they take no time may be what has no room there: then the
    model without such joints is solved.
    """
    chain = chain_model(problem)
    usable, own = problem.cluster.usable_bytes, chain.cargo.held_bytes

    def build(unit_bytes: Floats, room: Floats) -> Ints:
        found = None
        if unit_bytes is own and np.array_equal(room, usable):
            found = _solve_devices(chain, chain.model, solve)
            if found is not None and (np.bincount(found, unit_bytes, len(room)) <= room).all():
                return found
        apart = chain_model(problem, merge=False)
        count = apart.model.num_classes
        num_bytes = np.bincount(apart.class_of_unit, unit_bytes, count).astype(np.int64)
        within = np.maximum(room, 0.0).astype(np.int64)
        again = _solve_devices(apart, apart.model.with_memory(problem, num_bytes, within), solve)
        found = found if again is None else again
        if found is not None:
            return found
        roomiest: Ints = np.where(chain.cargo.fits, room, -np.inf).argmax(axis=1).astype(np.int32)
        return roomiest

    return build, chain.cargo


def _solve_devices(chain: Chain, model: MaxLoad, solve: Solve) -> Ints | None:
    """[units] devices of the model's best stages."""
    stages = solve(model)
    return None if stages is None else stages.device(model)[chain.class_of_unit].astype(np.int32)


def make_budget_check(run: Run, *, per_plan: int = _PER_PLAN, share: float = 1.0) -> Callable[[int], bool]:
    """Whether so many elementary steps, or the time since the start, use up a share of a run's budget."""
    if run.budget.count is not None:
        most = share * run.budget.count * per_plan
        return lambda steps: steps >= most
    assert run.budget.seconds is not None
    end = run.started + share * run.budget.seconds
    return lambda _steps: time.perf_counter() >= end


def with_bound(placement: Placement, bound: Bound) -> Placement:
    """The placement with a bound that was proven on the way, if it is better, and what follows from it."""
    if placement.status == Status.INFEASIBLE:
        return placement
    score_s = placement.score_s
    if score_s is None:
        if not bound.infeasible:
            return placement
        return replace(placement, status=Status.INFEASIBLE, proof=bound.infeasible)
    if bound.seconds > placement.bound_s:
        capped = min(bound.seconds, score_s)
        placement = replace(placement, bound_s=capped, bound_name=bound.name)
    if placement.status == Status.FEASIBLE and score_s <= placement.bound_s * (1.0 + _EQUAL):
        name = placement.bound_name
        proof = f"no plan beats the lower bound ({name}), and this one reaches it"
        return replace(placement, status=Status.OPTIMAL, proof=proof)
    return placement

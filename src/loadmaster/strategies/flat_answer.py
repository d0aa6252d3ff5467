"""Flat answer: a strategy as a placement of its lowered graph, for everything that reads placements."""

import numpy as np

from loadmaster.core.placement import Placement, Status
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.simulator.events.engine import prepare
from loadmaster.strategies.lowering.lower import lower


def as_placement(answer: StrategyAnswer) -> Placement:
    """Every op once for each replica, collectives on channels beside the devices; same step and peaks."""
    flat = lower(answer.problem, answer.strategy)
    outcome = prepare(flat.problem).score(flat.plan)
    peaks = np.array(outcome.peak_bytes, dtype=np.int64)
    lacks = np.maximum(peaks - flat.problem.cluster.usable_bytes, 0)
    fits = not lacks.any()
    return Placement(
        problem=flat.problem,
        plan=flat.plan if fits else None,
        algorithm=f"strategy {answer.strategy.name!r}",
        status=Status.FEASIBLE if fits else Status.NOT_FOUND,
        score_s=outcome.time_s if fits else None,
        bound_s=min(answer.bound_s, outcome.time_s),
        bound_name=answer.bound_name,
        proof="" if fits else "the strategy does not fit into the memory of its devices",
        shortfall_bytes=lacks,
        peak_bytes=peaks,
        least_overflow_plan=None if fits else flat.plan,
        members=(),
        wall_s=answer.wall_s,
    )

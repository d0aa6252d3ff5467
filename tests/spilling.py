"""Plans that spill chosen weights, and placed models that run them: what tests of spilling share."""

from collections.abc import Callable
from typing import Any

import numpy as np

import loadmaster as lm
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.graph.spill import NEW, find_readings, find_stashes
from loadmaster.placers.spill import spill_problem

COMPUTES, STORES = 0, 1


def nothing(_: str) -> bool:
    """No name at all."""
    return False


def spilling(
    problem: Problem,
    chosen: Callable[[str], bool],
    *,
    window_bytes: int,
    stashed: Callable[[str], bool] = nothing,
) -> tuple[Problem, Plan]:
    """Everything on the first device, but the weights of some names, which stay on the second.

    What ops of the names `stashed` make waits there for its backward.
    """
    graph = problem.graph
    found = find_readings(graph)
    params = [param for param in found if chosen(graph.op_name[param])]
    home = np.zeros(graph.num_ops, dtype=np.int32)
    for param in params:
        home[param] = STORES
        if graph.group[param] >= 0:
            home[graph.group == graph.group[param]] = STORES
    picked = [reading for param in params for reading in found[param]]
    waiting = [one for op, some in find_stashes(graph).items() if stashed(graph.op_name[op]) for one in some]
    made, origin = spill_problem(problem, picked, home, window_bytes=window_bytes, stashes=waiting)
    where = np.where(origin == NEW, STORES, home[np.maximum(origin, 0)]).astype(np.int32)
    return made, plan_of(where, np.arange(len(where), dtype=np.int32))


def spilled_model(
    example: Any,
    chosen: Callable[[str], bool],
    *,
    window_bytes: int = 1 << 16,
    stashed: Callable[[str], bool] = nothing,
    devices: str = "cpu#0-64MB, cpu#1-64MB",
    **options: Any,
) -> Any:
    """A placed model whose chosen weights stay on the second device."""
    from loadmaster.runtime.placed import build_placed_model
    from tests.placing import captured

    whole = lm.problem(captured(example), devices)
    problem, plan = spilling(whole, chosen, window_bytes=window_bytes, stashed=stashed)
    return build_placed_model(example.model, problem.graph, plan, problem.cluster, **options)

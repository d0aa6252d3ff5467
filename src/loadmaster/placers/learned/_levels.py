"""Levels of a free split: how many samples are in flight while its throughput is reached.

The busiest load is the time of a sample only while every piece of a device works on a sample of its own.
level(v) is the most changes of device on a way to v, and pieces are pairs of device and level (free splits
have no other order); activations of as many samples as there are levels are held at once.
"""

import numpy as np

from loadmaster.core.graph import edges
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.placers.answer import with_note


def count_levels(problem: Problem, plan: Plan) -> int:
    """One more than the most changes of device on any way through the graph."""
    source, target = edges(problem.graph)
    changes = (plan.device[source] != plan.device[target]).tolist()
    level = [0] * problem.graph.num_ops
    for u, v, changed in zip(source.tolist(), target.tolist(), changes, strict=True):
        level[v] = max(level[v], level[u] + changed)  # edges come in the order of their producers
    return 1 + max(level, default=0)


def say_levels(problem: Problem, placement: Placement) -> Placement:
    """The placement of a free split, with the samples it has in flight; others as they are."""
    free = problem.objective == Objective.THROUGHPUT and problem.split == Split.FREE
    if not free or placement.plan is None:
        return placement
    levels, used = count_levels(problem, placement.plan), len(np.unique(placement.plan.device))
    told = f"a free split of {levels} levels on {used} devices: as many samples are in flight, and memory"
    return with_note(placement, placement.algorithm, f"{told} counts one")

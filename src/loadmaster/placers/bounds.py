"""The bound that every plan is measured by: what is proven in tenths of a second, without a solver.

The arguments of `simulator/bounds`, and for throughput the anchored cut of up to 1,000 units
(`exact/_maxload/reduce.py`): some milliseconds on the public graphs, and the only argument there that knows
of transfers.
"""

import numpy as np

from loadmaster.core.graph import units
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Bound
from loadmaster.simulator.bounds import lower_bounds, pipeline_step


def quick_bound(problem: Problem) -> Bound:
    """The best of the arguments that cost little, with its name, or the proof that nothing fits."""
    if problem.is_stepped:
        return pipeline_step.step_bound(problem)
    known = lower_bounds.lower_bound(problem)
    if problem.objective != Objective.THROUGHPUT or known.infeasible:
        return known
    # A step needs nothing of the throughput solvers.
    from loadmaster.placers.exact._maxload.closing import MOST_CLASSES, free_bound
    from loadmaster.placers.exact._maxload.model import free_model

    if units(problem.graph)[1] > MOST_CLASSES:
        return known
    cut = free_bound(free_model(problem), np.inf, probes=0)
    return cut if cut.seconds > known.seconds else known

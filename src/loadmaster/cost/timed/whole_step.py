"""Whole step: a training step measured as a whole, to which the sum of its ops is anchored.

Ops that are timed one by one find their inputs and memory otherwise than in a step: the allocator hands out
other pages, caches hold other things. So a step of a model of usual layers is measured as a whole and set
beside the sum of its ops, each timed on its own on the same device at the same time; the quotient scales the
sums of other models. A graph that was run here (`loadmaster run --calibrate`) has its own whole step, under a
key of its own, which counts for it instead. On CPUs alone: a GPU's ops wait for no host that is fast enough.

The rows are seconds as all others, with date, machine and torch, and whether the machine was calm.
"""

from collections.abc import Mapping

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.cost.busy_machine import CALM
from loadmaster.cost.database import CostRow
from loadmaster.cost.keys import WHOLE_STEP, Keys, step_key

_LEAST, _MOST = 0.5, 2.0  # what differs more was disturbed, and says nothing of another model


def find_anchor(
    compute_s: Floats, keys: Keys, known: Mapping[str, CostRow]
) -> tuple[float, float] | tuple[float, None]:
    """What the sum of a graph's ops is to be multiplied by, and its relative spread; (1, None): unknown."""
    total_s, own = float(np.sum(compute_s)), known.get(step_key(keys))
    if own is not None and own.seconds and own.moment == CALM and total_s > 0:
        return own.seconds / total_s, own.spread
    whole, by_ops = (known.get(key) for key in WHOLE_STEP)
    if whole is None or by_ops is None or not whole.seconds or not by_ops.seconds:
        return 1.0, None
    factor = whole.seconds / by_ops.seconds
    if not (whole.moment == by_ops.moment == CALM and _LEAST <= factor <= _MOST):
        return 1.0, None
    return factor, max(whole.spread, by_ops.spread)

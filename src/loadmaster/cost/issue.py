"""Issue: from what ops take to issue one by one to what the host takes for them in a step on a GPU.

An op that is timed on its own is called from Python, again and again, and nothing else is in the caches. In a
step autograd calls it, modules lie around it, and mixed precision decides what to cast. So whole passes of a
reference model are set beside the sums of their ops (`issue_reference`); the quotient scales the passes of
other models, forward and backward also in mixed precision. What calling the optimizer takes, however few its
weights, is kept apart.

    issue of an op      its own * (reference pass / the sum of its ops);  an update also: the call / updates
"""

from collections.abc import Mapping

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.database import CostRow
from loadmaster.cost.keys import ISSUE_CALL, ISSUE_PASSES, issue_keys

FORWARD, BACKWARD, UPDATE, MIXED_FORWARD, MIXED_BACKWARD = ISSUE_PASSES
_PLAIN = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.UPDATE: UPDATE}
_MIXED = _PLAIN | {Phase.FORWARD: MIXED_FORWARD, Phase.BACKWARD: MIXED_BACKWARD}


def scale_issues(graph: Graph, issue_s: Floats, known: Mapping[str, CostRow], mixed: bool) -> Floats:
    """[N] what the host takes for each op in a step, from what each takes on its own."""
    names = _MIXED if mixed else _PLAIN
    factors = np.array([_find_factor(names.get(phase), known) for phase in Phase])
    call, updates = known.get(ISSUE_CALL), graph.phase == Phase.UPDATE
    found: Floats = issue_s * factors[graph.phase]
    if call is not None and call.seconds is not None and updates.any():
        found = found + np.where(updates, call.seconds / int(updates.sum()), 0.0)
    return found


def _find_factor(name: str | None, known: Mapping[str, CostRow]) -> float:
    if name is None:
        return 1.0
    whole, by_ops = (known.get(key) for key in issue_keys(name))
    if whole is None or by_ops is None or not whole.seconds or not by_ops.seconds:
        return 1.0
    return whole.seconds / by_ops.seconds

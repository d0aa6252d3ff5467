"""Shortage: after a device was full, the plan nearest to the one that ran which leaves room.

What stood on the device beyond its prediction is taken off its room, and the plan is repaired from where its
ops are: as few as it takes move.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from loadmaster.core.errors import RunError
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.units import format_bytes
from loadmaster.runtime.accounts import Accounts

Replan = Callable[[Problem, Plan], Placement]


def plan_that_fits(placement: Placement, accounts: Accounts | None, replan: Replan | None) -> Placement:
    """A placement of the same problem that fits as far as is known now."""
    if accounts is None or accounts.most_needed_bytes is None:
        raise RunError("no device of this model was full, so there is nothing to plan anew")
    if replan is None or placement.plan is None:
        raise RunError("this model was placed without a planner; place it with lm.place")
    cluster = placement.problem.cluster
    beyond = np.array(accounts.most_needed_bytes) - np.minimum(placement.peak_bytes, cluster.usable_bytes)
    reserve = cluster.reserve_bytes + np.clip(beyond, 0, cluster.usable_bytes - 1)
    tight = replace(placement.problem, cluster=replace(cluster, reserve_bytes=reserve))
    found = replan(tight, placement.plan)
    if found.plan is None:
        short = ", ".join(
            f"{name} lacks {format_bytes(lacking)}"
            for name, lacking in zip(cluster.device_name, found.shortfall_bytes.tolist(), strict=True)
            if lacking
        )
        raise RunError(
            f"no plan on these devices leaves enough room ({short or found.proof}); lm.fit says more"
        )
    # what is proven of less memory is not proven of all of it
    unproven = replace(found, status=Status.FEASIBLE, bound_s=0.0, bound_name="none", proof="")
    return replace(unproven, problem=placement.problem)

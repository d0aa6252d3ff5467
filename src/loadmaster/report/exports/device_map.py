"""device_map: `{"transformer.h.0": 0, "lm_head": "cpu"}`, for accelerate and transformers."""

import json

import numpy as np

from loadmaster.core.device_map import devices_of
from loadmaster.core.errors import PlanError
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported


def export(placement: Placement, timeline: Timeline) -> Exported:
    """The map of a plan that fits."""
    found = placement.to_device_map()
    plan, problem = placement.plan, placement.problem
    assert plan is not None
    lost = ["the order of ops and the times are not part of a device_map"]
    try:
        same = devices_of(found, problem.graph, problem.cluster) == plan.device
        off = int(np.count_nonzero(~same))
        if off:
            lost.append(
                f"{off} of {problem.graph.num_ops} ops are elsewhere than their module's weights: a"
                " device_map"
                " moves whole modules, so they will run with them"
            )
    except PlanError:
        names = [name for name in problem.cluster.device_name if "#" in name]
        lost.append(
            f"parts of a device ({', '.join(names)}) are written as the device itself, without limits"
        )
    if plan.recompute.any():
        lost.append(f"{int(plan.recompute.sum())} ops are recomputed in the plan; a device_map cannot say so")
    if plan.pipeline is not None:
        lost.append("the schedule of the pipeline is not part of a device_map")
    return Exported((json.dumps(found, indent=2) + "\n").encode(), tuple(lost))

"""Peak memory of a pipeline: one micro-batch as the simulator runs it, and those in flight beside it.

    peak = one pass + (in flight - 1) x stash,  and no less than what stands between micro-batches

One pass has every gradient there from the beginning: the micro-batches before have left theirs. A stage that
is recomputed keeps its inputs beside what a pass has. `core/pipelines/in_flight.py` says what a stash is.
"""

from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Longs
from loadmaster.core.graph import NO_STORAGE, Graph
from loadmaster.core.pipelines.in_flight import (
    grown_storages,
    in_flight_at,
    settled_bytes,
    standing_bytes,
    stash_of,
)
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem


def with_resident_gradients(graph: Graph) -> Graph:
    """The graph in which what the backward pass keeps is resident: gradients add up over micro-batches."""
    grown = grown_storages(graph)
    if not grown.any():
        return graph
    root = graph.tensor_storage
    gone = (root != NO_STORAGE) & grown[root]
    storage = np.where(gone, NO_STORAGE, root).astype(np.int32)
    return replace(graph, resident_bytes=settled_bytes(graph), tensor_storage=storage)


def pipeline_peak_bytes(problem: Problem, plan: Plan, one_pass: Longs) -> Longs:
    """[D] peak bytes of a plan whose single micro-batch peaks at `one_pass`."""
    if plan.pipeline is None:
        return one_pass
    graph, num = problem.graph, problem.cluster.num_devices
    stash = stash_of(graph, plan.device, plan.recompute, num)
    beside = (in_flight_at(plan, num) - 1) * stash.each + stash.again
    standing = standing_bytes(graph, plan, num)
    peak: Longs = np.maximum(one_pass + beside, standing)
    return peak

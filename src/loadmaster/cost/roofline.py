"""Roofline: what an op takes on a device kind, from its flops, its bytes and published peak rates.

    seconds = max(flops / peak rate of its dtype, bytes moved / memory rate) / efficiency + overhead

A parameter, a view, and an op that neither computes nor moves anything take no time: nothing is launched
for them. Peaks are seldom reached: the expected relative error is stated as 0.5.
"""

import numpy as np

from loadmaster.core.arrays import Bools
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import CostError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.problem import BY_ROUTE, Costs, Origin

REL_ERROR = 0.5


def roofline_costs(graph: Graph, cluster: Cluster, *, efficiency: float = 1.0) -> Costs:
    """Costs of every op on every kind; `efficiency` is the share of the peaks that is reached."""
    if not 0 < efficiency <= 1:
        raise CostError(f"an efficiency of {efficiency} is not a share; give a number above 0, up to 1")
    rate = cluster.flops_per_s[:, graph.dtype].T  # [N, K]
    with np.errstate(over="ignore"):  # beyond the largest float is inf: cannot run there
        math_s = graph.flops[:, None] / rate
        memory_s = graph.bytes_moved[:, None] / cluster.memory_bytes_per_s
        compute_s = np.maximum(math_s, memory_s) / efficiency + cluster.overhead_s
    compute_s[takes_no_time(graph)] = 0.0
    return Costs(
        compute_s=compute_s,
        issue_s=np.zeros(graph.num_ops),
        transfer_s=np.full(graph.num_tensors, BY_ROUTE),
        origin=np.full(graph.num_ops, Origin.ANALYTIC, dtype=np.int8),
        rel_error=np.full(graph.num_ops, REL_ERROR),
    )


def takes_no_time(graph: Graph) -> Bools:
    """[N] ops nothing is launched for."""
    view = np.fromiter((kind == "view" for kind in graph.op_kind), dtype=np.bool_, count=graph.num_ops)
    idle = (graph.flops == 0) & (graph.bytes_moved == 0)
    free: Bools = view | idle | (graph.phase == Phase.PARAM)
    return free

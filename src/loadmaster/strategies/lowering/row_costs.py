"""Row costs: seconds of every op on every device kind when it runs on a share of the batch.

    seconds(share) = head + max(math * share, fixed + memory * share)

By the roofline, `math` are flops, `memory` bytes of rows and `fixed` bytes of weights and of their
gradients, which every replica moves whole. Measured and given times have one part beside the launch
overhead. An op whose work does not shrink with the rows has a head alone.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.graph import Phase
from loadmaster.core.problem import Origin, Problem
from loadmaster.cost.roofline import roofline_costs
from loadmaster.strategies.splitting.forms import Form, Splits


@dataclass(frozen=True, slots=True, eq=False)
class RowCosts:
    """Four columns of seconds for N ops on K kinds."""

    head: Floats  # [N, K]
    math: Floats  # [N, K] of the whole batch
    fixed: Floats  # [N, K]
    memory: Floats  # [N, K] of the whole batch

    def seconds(self, ops: Ints, share: float) -> Floats:
        """[n, K] seconds of some ops on a share of the rows."""
        moved = self.fixed[ops] + self.memory[ops] * share
        total: Floats = self.head[ops] + np.maximum(self.math[ops] * share, moved)
        return total


def find_row_costs(problem: Problem, splits: Splits) -> RowCosts:
    """How the times of a problem follow the rows."""
    graph, cluster, whole = problem.graph, problem.cluster, problem.costs.compute_s
    scales = splits.scales[:, None] & np.isfinite(whole)
    head = whole.copy()
    math, fixed, memory = (np.zeros_like(whole) for _ in range(3))
    overhead = np.minimum(cluster.overhead_s[None, :], np.where(np.isfinite(whole), whole, 0.0))
    analytic = (problem.costs.origin == Origin.ANALYTIC)[:, None] & scales
    given = scales & ~analytic
    head = np.where(scales, overhead, head)
    math = np.where(given, np.where(given, whole, 0.0) - overhead, math)
    roof = roofline_costs(graph, cluster).compute_s - cluster.overhead_s
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(analytic & (roof > 0), (np.where(analytic, whole, 0.0) - overhead) / roof, 0.0)
    rate = cluster.flops_per_s[:, graph.dtype].T
    still = np.minimum(_weight_bytes(problem, splits), graph.bytes_moved)
    math = np.where(analytic, factor * graph.flops[:, None] / rate, math)
    fixed = np.where(analytic, factor * still[:, None] / cluster.memory_bytes_per_s, fixed)
    moved = (graph.bytes_moved - still)[:, None] / cluster.memory_bytes_per_s
    memory = np.where(analytic, factor * moved, memory)
    return RowCosts(head, math, fixed, memory)


def _weight_bytes(problem: Problem, splits: Splits) -> Floats:
    """[N] bytes each op moves whatever its rows: weights it reads, sums it makes."""
    graph = problem.graph
    total = np.zeros(graph.num_ops)
    maker = graph.phase[graph.tensor_op[graph.use_tensor]] == Phase.PARAM
    np.add.at(total, graph.use_op[maker], graph.tensor_bytes[graph.use_tensor[maker]])
    sums = np.flatnonzero(splits.form == Form.SUM)
    np.add.at(total, graph.tensor_op[sums], graph.tensor_bytes[sums])
    return total

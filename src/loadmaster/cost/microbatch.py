"""A micro-batch of a step whose graph is of the whole batch, where it cannot be captured on its own.

The rule: of the forward and backward pass, what belongs to samples is divided by the number of micro-batches
(flops, bytes of activations and their gradients, workspaces, and the time of transfers). What belongs to
weights stays: their bytes, read in every pass, their gradients, and updates. Roofline times follow from
those; given and measured times are divided but for the launch overhead of the device kind. So smaller
micro-batches cost more for each sample, as they do.
"""

from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Bools, Longs
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.problem import BY_ROUTE, Costs, Origin, Problem
from loadmaster.cost.roofline import roofline_costs


def make_microbatch(problem: Problem, count: int) -> Problem:
    """The problem of one of `count` equal micro-batches, by the rule above."""
    if count == 1:
        return problem
    graph, costs = problem.graph, problem.costs
    part = _scale_graph(graph, count)
    passes = np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    if (costs.origin == Origin.ANALYTIC).all() and not costs.issue_s.any():
        fresh = roofline_costs(part, problem.cluster)
        whole = roofline_costs(graph, problem.cluster).compute_s
        share = fresh.compute_s / np.where(whole > 0, whole, 1.0)  # the times may be those of an efficiency
        compute_s = np.where(whole > 0, costs.compute_s * share, costs.compute_s)
    else:
        overhead = np.minimum(problem.cluster.overhead_s[None, :], costs.compute_s)
        compute_s = np.where(
            passes[:, None], overhead + (costs.compute_s - overhead) / count, costs.compute_s
        )
    given = np.where(costs.transfer_s == BY_ROUTE, BY_ROUTE, costs.transfer_s / count)
    of_samples = _sample_tensors(graph)
    scaled = replace(costs, compute_s=compute_s, transfer_s=np.where(of_samples, given, costs.transfer_s))
    assert isinstance(scaled, Costs)
    return replace(problem, graph=part, costs=scaled)


def _scale_graph(graph: Graph, count: int) -> Graph:
    passes = np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    of_samples = _sample_tensors(graph)
    fixed = np.minimum(_weight_bytes(graph, of_samples), graph.bytes_moved)
    moved = fixed + (graph.bytes_moved - fixed) // count
    return replace(
        graph,
        flops=np.where(passes, graph.flops / count, graph.flops),
        bytes_moved=np.where(passes, moved, graph.bytes_moved),
        workspace_bytes=np.where(passes, graph.workspace_bytes // count, graph.workspace_bytes),
        tensor_bytes=np.where(of_samples, -(-graph.tensor_bytes // count), graph.tensor_bytes),
    )


def _sample_tensors(graph: Graph) -> Bools:
    """[T] tensors that grow with the batch: of forward and backward ops, gradients of weights apart."""
    maker = graph.phase[graph.tensor_op]
    found: Bools = np.isin(maker, (Phase.FORWARD, Phase.BACKWARD))
    adds = (graph.phase == Phase.BACKWARD) & (graph.mirror < 0)
    of_weights = (graph.phase[graph.use_op] == Phase.UPDATE) | adds[graph.use_op]
    found[graph.use_tensor[of_weights & (maker[graph.use_tensor] == Phase.BACKWARD)]] = False
    return found


def _weight_bytes(graph: Graph, of_samples: Bools) -> Longs:
    """[N] bytes of weights that each op reads, and of their gradients that it makes."""
    total = np.zeros(graph.num_ops, dtype=np.int64)
    reads = graph.use_tensor[graph.phase[graph.tensor_op[graph.use_tensor]] == Phase.PARAM]
    users = graph.use_op[graph.phase[graph.tensor_op[graph.use_tensor]] == Phase.PARAM]
    np.add.at(total, users, graph.tensor_bytes[reads])
    makes = np.flatnonzero(~of_samples & (graph.phase[graph.tensor_op] == Phase.BACKWARD))
    np.add.at(total, graph.tensor_op[makes], graph.tensor_bytes[makes])
    return total

"""Group facts: a problem in numbers of groups and segments, for evaluations of less than a millisecond.

A segment is a run of a group's ops in the forward or backward pass that nothing of another group stands
between. Its seconds are tabulated over shares of the batch; tensors that go from segment to segment are
added up.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, sorted_unique
from loadmaster.core.cluster import NO_LINK, process_cluster
from loadmaster.core.graph import NO_STORAGE, Phase
from loadmaster.core.problem import Problem
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.strategies.lowering.row_costs import RowCosts
from loadmaster.strategies.splitting.forms import Form, Splits

SHARES = np.array([0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0])


@dataclass(frozen=True, slots=True, eq=False)
class GroupFacts:
    """G groups, S segments in the order in which devices run them, E edges between segments."""

    batch: int
    group_of: Ints  # [N]
    splits: Bools  # [G] may be replicated
    segment_of: Ints  # [N] of forward and backward ops
    segment_group: Ints  # [S]
    seconds: Floats  # [S, K, SHARES]
    gradient_bytes: Floats  # [S] of weights, whose gradients are ready when it ends
    edge_source: Ints  # [E]
    edge_target: Ints  # [E] sorted
    edge_part: Floats  # [E] bytes of rows
    edge_full: Floats  # [E] bytes that every replica has whole
    edge_of: Ints  # [S + 1] edges into each segment
    update_s: Floats  # [G, K]
    weight_bytes: Floats  # [G]
    resident_bytes: Floats  # [G] weights and state
    group_gradient_bytes: Floats  # [G]
    saved_part: Floats  # [G] bytes of rows kept for the backward pass
    saved_full: Floats  # [G]
    transient: Floats  # [G] bytes of rows held for a moment
    update_bytes: Floats  # [G] workspace of its largest update
    host: Ints  # [D]
    kind: Ints  # [D]
    route: Ints  # [D, D, H]
    latency_s: Floats  # [D, D]
    bytes_per_s: Floats  # [D, D]
    usable_bytes: Floats  # [D]
    can_run: Bools  # [G, D]

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.splits)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.kind)


def find_facts(problem: Problem, splits: Splits, costs: RowCosts, group_of: Ints) -> GroupFacts:
    """The numbers of a problem whose ops are in groups."""
    graph, cluster = problem.graph, process_cluster(problem.cluster)
    groups = int(group_of.max()) + 1
    segment, order_of = _segments(problem, group_of)
    num = len(order_of)
    passes = np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    kinds = costs.head.shape[1]
    table = np.zeros((num, kinds, len(SHARES)))
    ops = np.flatnonzero(passes)
    finite = np.isfinite(problem.costs.compute_s)
    for at, share in enumerate(SHARES.tolist()):
        seconds = np.where(finite[ops], costs.seconds(ops.astype(np.int32), share), 0.0)
        np.add.at(table[:, :, at], segment[ops], seconds)
    updates = np.flatnonzero(graph.phase == Phase.UPDATE)
    update_s = np.zeros((groups, kinds))
    np.add.at(update_s, group_of[updates], np.where(finite[updates], problem.costs.compute_s[updates], 0.0))
    update_bytes = np.zeros(groups)
    np.maximum.at(update_bytes, group_of[updates], graph.workspace_bytes[updates].astype(np.float64))
    maker = graph.tensor_op[graph.use_tensor]
    to_update = graph.phase[graph.use_op] == Phase.UPDATE
    gradients = sorted_unique(
        graph.use_tensor[to_update & (splits.form[graph.use_tensor] == Form.SUM)].astype(np.int64)
    )
    gradient = np.zeros(num)
    np.add.at(gradient, segment[graph.tensor_op[gradients]], graph.tensor_bytes[gradients].astype(np.float64))
    group_gradient = _per_group(graph.tensor_bytes[gradients], group_of[graph.tensor_op[gradients]], groups)
    source, target, part, full = _edges(problem, splits, segment, group_of)
    weights = np.flatnonzero(graph.phase[graph.tensor_op] == Phase.PARAM)
    owned = weights[graph.tensor_storage[weights] == weights]
    saved_part, saved_full, transient = _kept(problem, splits, group_of, groups, maker)
    runs = np.ones((groups, cluster.num_devices), dtype=np.bool_)
    np.logical_and.at(runs, group_of, finite[:, cluster.kind])
    whole = np.ones(groups, dtype=np.bool_)
    np.logical_and.at(whole, group_of, splits.splits)
    segment_group = np.zeros(num, dtype=np.int32)
    segment_group[segment[ops]] = group_of[ops]
    return GroupFacts(
        batch=splits.batch,
        group_of=group_of,
        splits=whole,
        segment_of=segment,
        segment_group=segment_group,
        seconds=table,
        gradient_bytes=gradient,
        edge_source=source,
        edge_target=target,
        edge_part=part,
        edge_full=full,
        edge_of=np.searchsorted(target, np.arange(num + 1)).astype(np.int32),
        update_s=update_s,
        weight_bytes=_per_group(graph.tensor_bytes[owned], group_of[graph.tensor_op[owned]], groups),
        resident_bytes=_per_group(graph.resident_bytes, group_of, groups),
        group_gradient_bytes=group_gradient,
        saved_part=saved_part,
        saved_full=saved_full,
        transient=transient,
        update_bytes=update_bytes,
        host=cluster.host,
        kind=cluster.kind,
        route=np.ascontiguousarray(np.where(cluster.route == NO_LINK, -1, cluster.route)),
        latency_s=route_latency_s(cluster),
        bytes_per_s=route_bytes_per_s(cluster),
        usable_bytes=cluster.usable_bytes.astype(np.float64),
        can_run=runs,
    )


def _per_group(values: Longs, group: Ints, groups: int) -> Floats:
    total = np.zeros(groups)
    np.add.at(total, group, values.astype(np.float64))
    return total


def _segments(problem: Problem, group_of: Ints) -> tuple[Ints, Ints]:
    """[N] the segment of each op (0 for weights and updates), and the first op of each.

    Depth is how often the group changes on the way to an op; ops of one group, pass and depth are one
    segment. A change raises the depth, so segments have no cycle.
    """
    graph = problem.graph
    depth = np.zeros(graph.num_ops, dtype=np.int64)
    group, phase = group_of.tolist(), graph.phase.tolist()
    source = graph.tensor_op[graph.use_tensor]
    order = np.argsort(graph.use_op, kind="stable")
    passes = (int(Phase.FORWARD), int(Phase.BACKWARD))
    for use in order.tolist():
        a, b = int(source[use]), int(graph.use_op[use])
        if phase[a] in passes and phase[b] in passes:
            depth[b] = max(depth[b], depth[a] + (group[a] != group[b] or phase[a] != phase[b]))
    own = np.isin(graph.phase, passes)
    key = (depth * 2 + (graph.phase == Phase.BACKWARD)) * (int(group_of.max()) + 1) + group_of
    found, first, inverse = np.unique(key[own], return_index=True, return_inverse=True)
    first = np.flatnonzero(own)[first]
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.lexsort((first, depth[first]))] = np.arange(len(first), dtype=np.int32)
    segment = np.zeros(graph.num_ops, dtype=np.int32)
    segment[own] = rank[inverse]
    where = np.empty(len(found), dtype=np.int32)
    where[rank] = first
    return segment, where


def _edges(
    problem: Problem, splits: Splits, segment: Ints, group_of: Ints
) -> tuple[Ints, Ints, Floats, Floats]:
    """Bytes from segment to segment: a tensor is sent to a group once, for the first that reads it."""
    graph = problem.graph
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    passes = (Phase.FORWARD, Phase.BACKWARD)
    reads = np.zeros(graph.num_ops, dtype=np.bool_)
    reads[graph.use_op] = True
    at_hand = ~reads & (graph.flops == 0) & (graph.bytes_moved == 0)
    goes = np.isin(graph.phase[maker], passes) & np.isin(graph.phase[user], passes)
    goes &= (segment[maker] != segment[user]) & ~at_hand[maker]
    use = np.flatnonzero(goes)
    across = group_of[maker[use]] != group_of[user[use]]
    tensor, target = graph.use_tensor[use].astype(np.int64), segment[user[use]]
    key = tensor * (int(group_of.max()) + 1) + group_of[user[use]]
    order = np.lexsort((target, key))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = key[order][1:] != key[order][:-1]
    counted = np.zeros(len(use), dtype=np.bool_)
    counted[order[first]] = True
    size = np.where(counted & across, graph.tensor_bytes[tensor], 0).astype(np.float64)
    part = splits.form[tensor] == Form.PART
    pair = segment[maker[use]].astype(np.int64) + target.astype(np.int64) * (int(segment.max()) + 1)
    found, inverse = np.unique(pair, return_inverse=True)
    rows, whole = np.zeros(len(found)), np.zeros(len(found))
    np.add.at(rows, inverse, np.where(part, size, 0.0))
    np.add.at(whole, inverse, np.where(part, 0.0, size))
    width = int(segment.max()) + 1
    return (found % width).astype(np.int32), (found // width).astype(np.int32), rows, whole


def _kept(
    problem: Problem, splits: Splits, group_of: Ints, groups: int, maker: Ints
) -> tuple[Floats, Floats, Floats]:
    """Bytes that each group keeps of the forward pass, by form, and its largest op's own."""
    graph = problem.graph
    kept = graph.keep.copy()
    kept &= graph.phase[graph.tensor_op] == Phase.FORWARD
    late = (graph.phase[maker] == Phase.FORWARD) & (graph.phase[graph.use_op] == Phase.BACKWARD)
    kept[graph.use_tensor[late]] = True
    base = graph.tensor_storage[np.flatnonzero(kept)]
    stores = sorted_unique(base[base != NO_STORAGE].astype(np.int64))
    stores = stores[graph.phase[graph.tensor_op[stores]] != Phase.PARAM]
    part = splits.form[stores] == Form.PART
    where = group_of[graph.tensor_op[stores]]
    size = graph.tensor_bytes[stores]
    saved_part = _per_group(np.where(part, size, 0), where, groups)
    saved_full = _per_group(np.where(part, 0, size), where, groups)
    touched = np.zeros(graph.num_ops)
    rows = splits.form == Form.PART
    np.add.at(touched, graph.tensor_op[rows], graph.tensor_bytes[rows].astype(np.float64))
    read = rows[graph.use_tensor] & (graph.phase[maker] == Phase.BACKWARD)
    np.add.at(touched, graph.use_op[read], graph.tensor_bytes[graph.use_tensor[read]].astype(np.float64))
    touched += graph.workspace_bytes
    back = graph.phase == Phase.BACKWARD
    transient = np.zeros(groups)
    np.maximum.at(transient, group_of[back], touched[back])
    return saved_part, saved_full, transient

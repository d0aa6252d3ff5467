"""Coarsening: many ops contracted to one, with the maps back.

Work and held bytes are kept exactly. Two things are estimates: the workspace of a coarse op
is the largest of its members', and tensors that live and die inside it take no memory. Merging is
a restriction, so a lower bound must never come from a coarse graph.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, sorted_unique
from loadmaster.core.errors import CostError, PlanError
from loadmaster.core.graph import (
    NO_GROUP,
    NO_MIRROR,
    NO_SIGNATURE,
    NO_STORAGE,
    Graph,
    Phase,
    home_bytes,
)
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Costs


@dataclass(frozen=True, slots=True, eq=False)
class CoarseGraph:
    """A coarse graph and where its parts come from."""

    graph: Graph
    op_of: Ints  # [N] coarse op of each fine op
    tensor_of: Ints  # [coarse T] fine tensor of each coarse tensor


def contract_to(
    graph: Graph, op_of: Ints, num_ops: int, *, tied: Ints | None = None, named: bool = True
) -> CoarseGraph:
    """Contract ops to the coarse op that `op_of` [N] names; those must be in topological order.

    `tied` [coarse N] has equal numbers where coarse ops must share a device; without it the groups of the
    members say so. Unless `named`, a coarse op has the name, kind and module of its first member: making
    better ones takes longer than all the rest.
    """
    members = _Members(op_of, num_ops)
    tensor_of, keep, extra_bytes = _find_surviving_tensors(graph, op_of, num_ops)
    tensor_at = np.full(graph.num_tensors + 1, NO_STORAGE, dtype=np.int32)  # last row: nowhere
    tensor_at[tensor_of] = np.arange(len(tensor_of), dtype=np.int32)
    use_tensor, use_op = _list_outer_uses(graph, op_of)
    alone = members.count == 1
    main = members.argmax(graph.flops)
    first = members.first
    coarse = Graph(
        name=graph.name,
        op_name=_name_coarse_ops(graph, members) if named else _pick(graph.op_name, first),
        op_kind=_kinds_of_coarse_ops(graph, members) if named else _pick(graph.op_kind, first),
        module=_modules_of_coarse_ops(graph.module, members) if named else _pick(graph.module, first),
        phase=graph.phase[first],
        mirror=_find_mirrors(graph, op_of, members),
        group=_join_groups(graph.group, op_of, num_ops) if tied is None else _group_tied_ops(tied),
        signature=np.where(alone, graph.signature[first], np.int32(NO_SIGNATURE)),
        signature_table=graph.signature_table,
        dtype=graph.dtype[main],
        flops=members.sum_float(graph.flops),
        bytes_moved=members.sum(graph.bytes_moved),
        resident_bytes=members.sum(graph.resident_bytes) + extra_bytes,
        workspace_bytes=members.max(graph.workspace_bytes),
        tensor_op=op_of[graph.tensor_op[tensor_of]],
        tensor_bytes=graph.tensor_bytes[tensor_of],
        tensor_storage=tensor_at[graph.tensor_storage[tensor_of]],
        keep=keep[tensor_of],
        use_tensor=tensor_at[use_tensor],
        use_op=use_op,
        capture=graph.capture,
        assumptions=graph.assumptions,
        warnings=graph.warnings,
        notes=graph.notes,
    )
    return CoarseGraph(graph=coarse, op_of=op_of, tensor_of=tensor_of)


def coarsen_costs(costs: Costs, coarse: CoarseGraph) -> Costs:
    """The costs of the coarse graph: members' times add up, the least trusted origin and worst error stay."""
    if len(costs.compute_s) != len(coarse.op_of):
        raise CostError(f"costs of {len(costs.compute_s)} ops do not fit a map of {len(coarse.op_of)} ops")
    members = _Members(coarse.op_of, coarse.graph.num_ops)
    return Costs(
        compute_s=np.stack([members.sum_float(of_kind) for of_kind in costs.compute_s.T], axis=1),
        issue_s=members.sum_float(costs.issue_s),
        transfer_s=costs.transfer_s[coarse.tensor_of],
        origin=np.minimum.reduceat(costs.origin[members.op], members.start),
        rel_error=np.maximum.reduceat(costs.rel_error[members.op], members.start),
    )


def expand(plan: Plan, coarse: CoarseGraph) -> Plan:
    """The plan of the fine graph that does what `plan` says: members together, in graph order."""
    if len(plan.device) != coarse.graph.num_ops:
        raise PlanError(f"a plan of {len(plan.device)} ops does not fit {coarse.graph.num_ops} coarse ops")
    op_of = coarse.op_of
    order = np.argsort(plan.priority[op_of], kind="stable")
    priority = np.empty(len(op_of), dtype=np.int32)
    priority[order] = np.arange(len(op_of), dtype=np.int32)
    return Plan(
        device=plan.device[op_of],
        priority=priority,
        recompute=plan.recompute[op_of],
        pipeline=None if plan.pipeline is None else _expand_pipeline(plan.pipeline, op_of),
    )


def _expand_pipeline(pipeline: Pipeline, op_of: Ints) -> Pipeline:
    return Pipeline(
        stage=pipeline.stage[op_of],
        replicas=pipeline.replicas,
        num_microbatches=pipeline.num_microbatches,
        schedule=pipeline.schedule,
        in_flight=pipeline.in_flight,
        stage_s=pipeline.stage_s,
    )


class _Members:
    """The fine ops of each coarse op, side by side."""

    def __init__(self, op_of: Ints, num_ops: int) -> None:
        self.op = np.argsort(op_of, kind="stable")
        self.count = np.bincount(op_of, minlength=num_ops)
        self.start = np.cumsum(self.count) - self.count
        self.first = self.op[self.start]

    def sum(self, column: Longs) -> Longs:
        result: Longs = np.add.reduceat(column[self.op], self.start)
        return result

    def sum_float(self, column: Floats) -> Floats:
        result: Floats = np.add.reduceat(column[self.op], self.start)
        return result

    def max(self, column: Longs) -> Longs:
        result: Longs = np.maximum.reduceat(column[self.op], self.start)
        return result

    def argmax(self, column: Floats) -> Longs:
        """[coarse N] the member with the largest value, the first of equals."""
        most = np.repeat(np.maximum.reduceat(column[self.op], self.start), self.count)
        place = np.where(column[self.op] == most, np.arange(len(self.op)), len(self.op))
        result: Longs = self.op[np.minimum.reduceat(place, self.start)]
        return result


def _find_surviving_tensors(graph: Graph, op_of: Ints, num_ops: int) -> tuple[Ints, Bools, Longs]:
    """Fine tensors that stay, what is kept to the end [T], and bytes that become resident [coarse N].

    A tensor stays if another coarse op uses it, and a storage if any of its tensors does. What is
    kept of a storage that goes is resident from now on.
    """
    stays = np.zeros(graph.num_tensors, dtype=np.bool_)
    stays[graph.use_tensor[_leaves_coarse_op(graph, op_of)]] = True
    stored = graph.tensor_storage != NO_STORAGE
    base = graph.tensor_storage[stored]
    keep = graph.keep.copy()
    keep[base[graph.keep[stored]]] = True  # a kept view keeps its storage
    stays[base[stays[stored]]] = True
    gone = keep & ~stays
    extra = np.zeros(num_ops, dtype=np.int64)
    np.add.at(extra, op_of[graph.tensor_op[gone]], home_bytes(graph)[gone])
    return np.flatnonzero(stays).astype(np.int32), keep, extra


def _leaves_coarse_op(graph: Graph, op_of: Ints) -> Bools:
    """[U] uses by another coarse op than the producer's."""
    leaves: Bools = op_of[graph.tensor_op[graph.use_tensor]] != op_of[graph.use_op]
    return leaves


def _list_outer_uses(graph: Graph, op_of: Ints) -> tuple[Ints, Ints]:
    """Uses between coarse ops, each once: fine tensor and coarse op."""
    leaves = _leaves_coarse_op(graph, op_of)
    pair = graph.use_tensor[leaves].astype(np.int64) * graph.num_ops + op_of[graph.use_op[leaves]]
    pair = sorted_unique(pair)
    return (pair // graph.num_ops).astype(np.int32), (pair % graph.num_ops).astype(np.int32)


def _find_mirrors(graph: Graph, op_of: Ints, members: _Members) -> Ints:
    """The coarse op that holds all forward ops its members mirror, where there is just one."""
    low = np.full(len(members.count), graph.num_ops, dtype=np.int64)
    high = np.full(len(members.count), NO_MIRROR, dtype=np.int64)
    ops = np.flatnonzero(graph.mirror != NO_MIRROR)
    np.minimum.at(low, op_of[ops], op_of[graph.mirror[ops]])
    np.maximum.at(high, op_of[ops], op_of[graph.mirror[ops]])
    own = np.arange(len(low))
    good = (low == high) & (low != own) & (graph.phase[members.first] == Phase.BACKWARD)
    return np.where(good, low, NO_MIRROR).astype(np.int32)


def _join_groups(group: Ints, op_of: Ints, num_ops: int) -> Ints:
    """Groups joined where a coarse op has members of several."""
    ops = np.flatnonzero(group != NO_GROUP)
    _, row = np.unique(group[ops], return_inverse=True)
    rows = int(row.max()) + 1 if len(row) else 0
    joined = _label_components(op_of[ops], (num_ops + row).astype(np.int32), num_ops + rows)
    return _group_tied_ops(joined[:num_ops])


def _group_tied_ops(tied: Ints) -> Ints:
    """Group of each coarse op, by what it is tied to; one op alone needs none."""
    shared = np.bincount(tied) > 1
    label, _ = _renumber_by_first(tied)
    return np.where(shared[tied], label, np.int32(NO_GROUP))


def _name_coarse_ops(graph: Graph, members: _Members) -> tuple[str, ...]:
    """The first member's name and how many more there are; made unique."""
    pairs = zip([graph.op_name[op] for op in members.first.tolist()], members.count.tolist(), strict=True)
    result = [name if count == 1 else f"{name} (+{count - 1})" for name, count in pairs]
    if len(set(result)) == len(result):
        return tuple(result)
    taken: set[str] = set()
    for op, plain in enumerate(result):
        name, number = plain, 1
        while name in taken:
            number += 1
            name = f"{plain} #{number}"
        taken.add(name)
        result[op] = name
    return tuple(result)


def _kinds_of_coarse_ops(graph: Graph, members: _Members) -> tuple[str, ...]:
    """The kind of an op that is alone."""
    pairs = zip([graph.op_kind[op] for op in members.first.tolist()], members.count.tolist(), strict=True)
    return tuple([kind if count == 1 else "fused" for kind, count in pairs])


def _pick(values: tuple[str, ...], index: Longs) -> tuple[str, ...]:
    return tuple(map(values.__getitem__, index.tolist()))


def _modules_of_coarse_ops(module: tuple[str, ...], members: _Members) -> tuple[str, ...]:
    """The path that the modules of all members begin with."""
    result = [module[op] for op in members.first.tolist()]
    paths = list(dict.fromkeys(module))
    number = dict(zip(paths, range(len(paths)), strict=True))
    row = np.fromiter(map(number.__getitem__, module), dtype=np.int64, count=len(module))[members.op]
    owner = np.repeat(np.arange(len(result)), members.count)
    other = row != row[members.start][owner]  # than the first member's
    pair = sorted_unique(owner[other] * len(paths) + row[other])
    for op, at in zip((pair // len(paths)).tolist(), (pair % len(paths)).tolist(), strict=True):
        result[op] = _common_path(result[op], paths[at])
    return tuple(result)


def _common_path(one: str, other: str) -> str:
    """The path two paths begin with: the longer is no beginning of the shorter, so its last name goes."""
    while one != other:
        if len(one) >= len(other):
            one = one.rpartition(".")[0]
        else:
            other = other.rpartition(".")[0]
    return one


def _label_components(source: Ints, target: Ints, num: int) -> Ints:
    """[num] number of the component each node is in."""
    # imported here because scipy takes longer to load than most commands take to run
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    matrix = coo_array((np.ones(len(source)), (source, target)), shape=(num, num))
    _, label = connected_components(matrix.tocsr(), connection="weak")
    return np.asarray(label, dtype=np.int32)


def _renumber_by_first(label: Ints) -> tuple[Ints, int]:
    """Labels renumbered by first appearance, and their number."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[inverse], len(first)

"""Stage facts: seconds and bytes of each stage of a pipeline, for one micro-batch.

A stage runs as one module: it waits for what comes in, runs its ops in the graph's order, then sends. So a
stage is a few numbers, and a step is unrolled from them (`lowering.py`).

* Tensors go between neighbours: one that skips a stage is carried through it. What a backward op needs of an
  earlier stage is carried as well. Inputs of the graph are at hand on every stage.
* A weight that several stages use is held by each of them, with gradient and optimizer state, and updated by
  each; their gradients are summed before (`tied`).
* The part of a backward pass that may wait (`weight_s`) is the ops that make gradients of weights alone.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, sorted_unique
from loadmaster.core.graph import NO_GROUP, Graph, Phase
from loadmaster.core.pipelines.in_flight import find_kept, grown_storages, kept_storages, stash_of
from loadmaster.core.problem import BY_ROUTE, Problem


@dataclass(frozen=True, slots=True, eq=False)
class StageFacts:
    """S stages on K kinds of devices."""

    forward_s: Floats  # [S, K]
    backward_s: Floats  # [S, K] with its part for weights, and the forward pass again if recomputed
    weight_s: Floats  # [S, K] the part for weights
    update_s: Floats  # [S, K]
    forward_bytes: Longs  # [S] sent to the next stage
    backward_bytes: Longs  # [S] sent to the stage before
    forward_transfer_s: Floats  # [S] where transfer times are given, else BY_ROUTE
    backward_transfer_s: Floats  # [S]
    resident_bytes: Longs  # [S] weights, optimizer state and gradients
    stash_bytes: Longs  # [S] kept from forward to backward
    put_off_bytes: Longs  # [S] kept from the backward pass of inputs to that of weights
    forward_temporary_bytes: Longs  # [S] held while a forward pass runs, beside the above
    backward_temporary_bytes: Longs  # [S]
    gradient_bytes: Longs  # [S] of weights
    tied: tuple[tuple[tuple[int, ...], int], ...]  # (stages, bytes): gradients summed over stages

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_bytes)

    @property
    def input_s(self) -> Floats:
        """[S, K] backward passes without their part for weights, inf where they cannot run."""
        runs = np.isfinite(self.backward_s)
        return np.where(runs, self.backward_s - np.where(runs, self.weight_s, 0.0), np.inf)


def find_facts(problem: Problem, stage: Ints, recompute: Bools, num_stages: int) -> StageFacts:
    """What stages of ops take and hold when op n is in `stage[n]`."""
    graph, num = problem.graph, num_stages
    weight_only = find_weight_ops(graph)
    backward = graph.phase == Phase.BACKWARD
    rerun = find_rerun(graph, recompute)
    ties = find_ties(graph, stage)
    crossing = _Crossing(problem, stage, num)
    stash = stash_of(graph, stage, recompute, num)
    forward_temporary, backward_temporary = _temporaries(graph, stage, recompute, num, crossing.storages)
    forward_s = _block_seconds(problem, stage, num, graph.phase == Phase.FORWARD)
    backward_s = _block_seconds(problem, stage, num, backward)
    again_s = _block_seconds(problem, stage, num, rerun)
    update_s = _block_seconds(problem, stage, num, graph.phase == Phase.UPDATE)
    return StageFacts(
        forward_s=forward_s,
        backward_s=backward_s + again_s,
        weight_s=np.minimum(_block_seconds(problem, stage, num, backward & weight_only), backward_s),
        update_s=update_s + ties.update_s(problem, num),
        forward_bytes=crossing.forward_bytes,
        backward_bytes=crossing.backward_bytes,
        forward_transfer_s=crossing.forward_s,
        backward_transfer_s=crossing.backward_s,
        resident_bytes=_resident(graph, stage, num) + ties.extra_bytes(graph, num),
        stash_bytes=stash.each,
        put_off_bytes=_put_off(graph, stage, weight_only, num),
        forward_temporary_bytes=forward_temporary,
        backward_temporary_bytes=backward_temporary + _remade(graph, stage, recompute, num),
        gradient_bytes=ties.gradient_bytes(graph, num),
        tied=ties.groups(graph),
    )


def find_weight_ops(graph: Graph) -> Bools:
    """[N] backward ops that only make, or add up, gradients of weights, for updates alone."""
    backward = graph.phase == Phase.BACKWARD
    found: Bools = backward.copy()
    maker = graph.tensor_op[graph.use_tensor]
    adding = backward & (graph.mirror < 0)  # sums of gradients of a weight
    onwards = backward[graph.use_op] & ~adding[graph.use_op]
    found[maker[onwards]] = False
    ends = np.zeros(graph.num_ops, dtype=np.bool_)
    ends[maker[np.isin(graph.phase[graph.use_op], (Phase.UPDATE,)) | adding[graph.use_op]]] = True
    ends[graph.tensor_op[graph.keep]] = True
    both: Bools = found & ends
    return both


def find_rerun(graph: Graph, recompute: Bools) -> Bools:
    """[N] forward ops that run again before the backward pass."""
    again: Bools = recompute & (graph.phase == Phase.FORWARD)
    return again


def find_inputs(graph: Graph) -> Bools:
    """[N] forward ops that take nothing and cost nothing: inputs of the step, at hand on every stage."""
    needs = np.zeros(graph.num_ops, dtype=np.bool_)
    needs[graph.use_op] = True
    found: Bools = (graph.phase == Phase.FORWARD) & ~needs & (graph.flops == 0) & (graph.bytes_moved == 0)
    return found


def _block_seconds(problem: Problem, stage: Ints, num: int, ops: Bools) -> Floats:
    """[S, K] seconds of some ops of each stage, one after the other, none before the host has issued it."""
    costs, cluster = problem.costs, problem.cluster
    chosen = np.flatnonzero(ops)
    seconds = np.zeros((num, len(cluster.kind_name)))
    np.add.at(seconds, stage[chosen], costs.compute_s[chosen])
    if not costs.issue_s[chosen].any():
        return seconds
    for s in range(num):
        here = chosen[stage[chosen] == s]
        issued = np.cumsum(costs.issue_s[here])
        for kind in range(seconds.shape[1]):
            compute = costs.compute_s[here, kind]
            if cluster.on_host[kind]:
                seconds[s, kind] += float(costs.issue_s[here].sum())
            elif len(here) and np.isfinite(compute).all():
                before = np.cumsum(compute) - compute
                seconds[s, kind] = float((issued - before).max() + compute.sum())
    return seconds


class _Crossing:
    """What goes from stage to stage: each tensor once over every border up to its last user."""

    def __init__(self, problem: Problem, stage: Ints, num: int) -> None:
        graph = problem.graph
        forward_end, backward_end = find_reach(graph, stage)
        home = stage[graph.tensor_op]
        self.forward_bytes, self.forward_s = _sum_borders(problem, home, forward_end, num)
        down, down_s = _sum_borders(problem, backward_end, home, num)
        # border b lies between stages b and b + 1: gradients go over it from b + 1
        # Where a tensor was sent, its gradients are summed before one of its size comes back.
        down = np.minimum(down, self.forward_bytes)
        both = (down_s != BY_ROUTE) & (self.forward_s != BY_ROUTE)
        down_s = np.where(both, np.minimum(down_s, self.forward_s), down_s)
        self.backward_bytes, self.backward_s = np.roll(down, 1), np.roll(down_s, 1)
        across = (forward_end > home) | (backward_end < home)
        root = graph.tensor_storage
        self.storages: Bools = np.zeros(graph.num_tensors, dtype=np.bool_)
        self.storages[root[across & (root >= 0)]] = True


def find_reach(graph: Graph, stage: Ints) -> tuple[Ints, Ints]:
    """[T] the last stage that a tensor goes up to, and the first that it goes down to; its own if it stays.

    Stages may be positions in a line of ops: the same holds for every cut of it.
    """
    home = stage[graph.tensor_op]
    maker = graph.tensor_op[graph.use_tensor]
    target = stage[graph.use_op]
    goes = np.isin(graph.phase[maker], (Phase.FORWARD, Phase.BACKWARD)) & ~find_inputs(graph)[maker]
    goes &= np.isin(graph.phase[graph.use_op], (Phase.FORWARD, Phase.BACKWARD))
    adds = (graph.phase == Phase.BACKWARD) & (graph.mirror < 0)
    goes &= ~(adds[graph.use_op] & find_weight_ops(graph)[maker])  # summed over stages at the end
    up, down = home.copy(), home.copy()
    np.maximum.at(up, graph.use_tensor[goes], target[goes])
    np.minimum.at(down, graph.use_tensor[goes], target[goes])
    return up, down


def _sum_borders(problem: Problem, first: Ints, last: Ints, num: int) -> tuple[Longs, Floats]:
    """[S] bytes and given seconds over the border after each stage, of tensors from `first` to `last`."""
    graph, given = problem.graph, problem.costs.transfer_s
    moves = np.flatnonzero(last > first)
    total, seconds = np.zeros(num + 1, dtype=np.int64), np.zeros(num + 1)
    routed = np.zeros(num + 1, dtype=np.int64)
    for column, values in (
        (total, graph.tensor_bytes[moves]),
        (seconds, np.maximum(given[moves], 0.0)),
        (routed, (given[moves] == BY_ROUTE).astype(np.int64)),
    ):
        np.add.at(column, first[moves], values)
        np.subtract.at(column, last[moves], values)
    times = np.where(np.cumsum(routed) > 0, BY_ROUTE, np.maximum(np.cumsum(seconds), 0.0))
    none = np.cumsum(total) == 0
    timed = np.where(none & (times <= 0), BY_ROUTE, times)
    return np.cumsum(total)[:num], timed[:num]


def _resident(graph: Graph, stage: Ints, num: int) -> Longs:
    """[S] weights, state and gradients of each stage."""
    held = graph.resident_bytes.copy()
    grown = grown_storages(graph) & (graph.tensor_storage == np.arange(graph.num_tensors))
    np.add.at(held, graph.tensor_op[grown], graph.tensor_bytes[grown])
    made = gradient_tensors(graph) & ~grown
    np.add.at(held, graph.tensor_op[made], graph.tensor_bytes[made])
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, stage, held)
    return total


def gradient_tensors(graph: Graph) -> Bools:
    """[T] storages of the backward pass that updates read: they add up over micro-batches."""
    read = np.zeros(graph.num_tensors, dtype=np.bool_)
    read[graph.use_tensor[graph.phase[graph.use_op] == Phase.UPDATE]] = True
    owns = graph.tensor_storage == np.arange(graph.num_tensors)
    found: Bools = read & owns & (graph.phase[graph.tensor_op] == Phase.BACKWARD)
    return found


def _put_off(graph: Graph, stage: Ints, weight_only: Bools, num: int) -> Longs:
    """[S] bytes that the backward pass of inputs leaves for that of weights."""
    maker = graph.tensor_op[graph.use_tensor]
    left = (graph.phase[maker] == Phase.BACKWARD) & ~weight_only[maker] & weight_only[graph.use_op]
    left &= stage[maker] == stage[graph.use_op]
    root = graph.tensor_storage[graph.use_tensor[left]]
    tensor = sorted_unique(root[root >= 0].astype(np.int64))
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, stage[graph.tensor_op[tensor]], graph.tensor_bytes[tensor])
    return total


def _remade(graph: Graph, stage: Ints, recompute: Bools, num: int) -> Longs:
    """[S] bytes that a recomputed stage makes again for one backward pass."""
    if not recompute.any():
        return np.zeros(num, dtype=np.int64)
    found = find_kept(graph, stage, recompute, num)
    again = found.made & found.saved
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, found.pair[again] % num, graph.tensor_bytes[found.pair[again] // num])
    return total


def _temporaries(
    graph: Graph, stage: Ints, recompute: Bools, num: int, crossing: Bools
) -> tuple[Longs, Longs]:
    """[S] most bytes held at once by what a pass makes and drops again, workspaces with it."""
    found = find_kept(graph, stage, recompute, num)
    stays = np.zeros(graph.num_tensors, dtype=np.bool_)
    tensor, at = found.pair // num, found.pair % num
    here = ~found.made & (stage[graph.tensor_op[tensor]] == at)
    stays[tensor[here]] = True
    stays |= kept_storages(graph) | crossing | gradient_tensors(graph)
    return (
        _most_held(graph, stage, num, Phase.FORWARD, stays),
        _most_held(graph, stage, num, Phase.BACKWARD, stays),
    )


def _most_held(graph: Graph, stage: Ints, num: int, phase: Phase, stays: Bools) -> Longs:
    """[S] the peak of storages made by ops of a phase that do not stay, while a stage's ops run in turn."""
    ops = np.flatnonzero(graph.phase == phase)
    ops = ops[np.argsort(stage[ops], kind="stable")]
    place = np.full(graph.num_ops, -1, dtype=np.int64)
    place[ops] = np.arange(len(ops))
    owns = graph.tensor_storage == np.arange(graph.num_tensors)
    drops = np.flatnonzero(owns & ~stays & (graph.phase[graph.tensor_op] == phase))
    last = place[graph.tensor_op]
    root = graph.tensor_storage[graph.use_tensor]
    same = (root >= 0) & (graph.phase[graph.use_op] == phase)
    same[same] &= stage[graph.use_op[same]] == stage[graph.tensor_op[root[same]]]
    np.maximum.at(last, root[same], place[graph.use_op[same]])
    change = np.zeros(len(ops) + 1, dtype=np.int64)
    np.add.at(change, place[graph.tensor_op[drops]], graph.tensor_bytes[drops])
    np.subtract.at(change, last[drops] + 1, graph.tensor_bytes[drops])
    held = np.cumsum(change)[: len(ops)] + graph.workspace_bytes[ops]
    most = np.zeros(num, dtype=np.int64)
    np.maximum.at(most, stage[ops], held)
    return most


@dataclass(frozen=True, slots=True, eq=False)
class Ties:
    """Weights and the stages that use them."""

    op: Ints  # [P] a parameter
    stage: Ints  # [P] one of the stages that hold it
    home: Bools  # [P] whether it is the stage of its op
    update: Ints  # [U] update ops
    update_of: Ints  # [U] the parameter of each

    def extra_bytes(self, graph: Graph, num: int) -> Longs:
        """[S] weights, state and gradients held again by stages that are not at home."""
        total = np.zeros(num, dtype=np.int64)
        away = ~self.home
        each = graph.resident_bytes[self.op] + self._gradients(graph)
        np.add.at(total, self.stage[away], each[away])
        return total

    def update_s(self, problem: Problem, num: int) -> Floats:
        """[S, K] seconds of updating what is held again."""
        total = np.zeros((num, problem.costs.compute_s.shape[1]))
        for op, stage in zip(self.op[~self.home].tolist(), self.stage[~self.home].tolist(), strict=True):
            total[stage] += problem.costs.compute_s[self.update[self.update_of == op]].sum(axis=0)
        return total

    def gradient_bytes(self, graph: Graph, num: int) -> Longs:
        """[S] gradients of the weights of each stage."""
        total = np.zeros(num, dtype=np.int64)
        np.add.at(total, self.stage, self._gradients(graph))
        return total

    def groups(self, graph: Graph) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Stages that share weights, and the bytes of the gradients they sum; equal stages together."""
        found: dict[tuple[int, ...], int] = {}
        size = self._gradients(graph)
        for op in np.unique(self.op[~self.home]).tolist():
            rows = np.flatnonzero(self.op == op)
            stages = tuple(sorted(self.stage[rows].tolist()))
            found[stages] = found.get(stages, 0) + int(size[rows[0]])
        return tuple(sorted((stages, size) for stages, size in found.items() if size))

    def _gradients(self, graph: Graph) -> Longs:
        """[P] bytes of the gradient of each: those of the weight itself, where it is trained."""
        weight = np.zeros(graph.num_ops, dtype=np.int64)
        np.add.at(weight, graph.tensor_op, graph.tensor_bytes)
        trained = np.zeros(graph.num_ops, dtype=np.bool_)
        trained[self.update_of] = True
        return np.where(trained[self.op], weight[self.op], 0)


def find_ties(graph: Graph, stage: Ints) -> Ties:
    """Which stages hold which weights: those that read it in a forward or backward op, and its own."""
    param = graph.phase == Phase.PARAM
    maker = graph.tensor_op[graph.use_tensor]
    read = param[maker] & np.isin(graph.phase[graph.use_op], (Phase.FORWARD, Phase.BACKWARD))
    num = int(stage.max()) + 1
    own = np.flatnonzero(param)
    used = sorted_unique(maker[read].astype(np.int64) * num + stage[graph.use_op[read]])
    pair = sorted_unique(np.concatenate([used, own.astype(np.int64) * num + stage[own]]))
    op, at = (pair // num).astype(np.int32), (pair % num).astype(np.int32)
    return Ties(op, at, at == stage[op], *_find_updates(graph))


def _find_updates(graph: Graph) -> tuple[Ints, Ints]:
    """Update ops and the weight of each: the one it reads, else those of its group."""
    param = graph.phase == Phase.PARAM
    maker = graph.tensor_op[graph.use_tensor]
    reads = param[maker] & (graph.phase[graph.use_op] == Phase.UPDATE)
    known = np.zeros(graph.num_ops, dtype=np.bool_)
    known[graph.use_op[reads]] = True
    rest = np.flatnonzero((graph.phase == Phase.UPDATE) & ~known & (graph.group != NO_GROUP))
    weights: dict[int, list[int]] = {}
    for op in np.flatnonzero(param & (graph.group != NO_GROUP)).tolist():
        weights.setdefault(int(graph.group[op]), []).append(op)
    pairs = [(u, w) for u in rest.tolist() for w in weights.get(int(graph.group[u]), [])]
    more = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return (
        np.concatenate([graph.use_op[reads], more[:, 0]]),
        np.concatenate([maker[reads], more[:, 1]]),
    )

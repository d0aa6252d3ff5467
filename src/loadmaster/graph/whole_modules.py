"""Whole modules: a graph whose plans the hook engine can run, since it places modules and not single ops.

The hook engine runs every function on the device of the module that calls it. What only looks at memory runs
where that memory is. An input is counted where it is first read. A loss outside of the model is computed
where the outputs are. Ops that it keeps together are made one group, so that every plan of the graph is one
that will be run, with the copies and the peaks it really has.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import NO_GROUP, NO_STORAGE, Graph, Phase

LOSS = "loss"  # the module of ops that are not the model's own
_SUMS = ("add", "add_")


def group_by_module(graph: Graph, *, sums_apart: bool = True) -> Graph:
    """The same ops and tensors; ops that hooks run on one device are in one group.

    `sums_apart`: for several devices, where a sum of gradients may have a term that came from another one.
    """
    lead = list(range(graph.num_ops))

    def find(op: int) -> int:
        while lead[op] != op:
            lead[op] = lead[lead[op]]
            op = lead[op]
        return op

    for a, b in [*_pair_groups(graph.group), *_pair_modules(graph)]:
        first, second = sorted((find(a), find(b)))
        lead[second] = first
    group = np.array([find(op) for op in range(graph.num_ops)], dtype=np.int32)
    alone = np.bincount(group, minlength=graph.num_ops)[group] == 1
    graph = replace(graph, group=np.where(alone, NO_GROUP, group).astype(np.int32))
    return replace(graph, tensor_storage=_list_sum_storages(graph)) if sums_apart else graph


def _list_sum_storages(graph: Graph) -> Ints:
    """Sums of gradients in memory of their own: autograd adds in place only what it alone holds.

    A term that came from another device is held by the copy's sender too, and which terms come from others is
    not known before there is a plan.
    """
    storage = graph.tensor_storage.copy()
    sums = (graph.phase == Phase.BACKWARD) & np.array([kind in _SUMS for kind in graph.op_kind])
    made = np.flatnonzero(sums[graph.tensor_op] & (storage != NO_STORAGE))
    for tensor in made.tolist():
        if graph.tensor_op[storage[tensor]] != graph.tensor_op[tensor]:
            storage[tensor] = tensor
    return storage


def _pair_groups(group: Ints) -> list[tuple[int, int]]:
    """Groups that the graph has already."""
    first: dict[int, int] = {}
    return [(first.setdefault(g, op), op) for op, g in enumerate(group.tolist()) if g != NO_GROUP]


def _pair_modules(graph: Graph) -> list[tuple[int, int]]:
    """Pairs of ops that hooks run on one device."""
    base = find_viewed_ops(graph)
    read, readers = _find_first_reads(graph, base)
    first: dict[str, int] = {}
    pairs = []
    for op, (kind, module, phase) in enumerate(
        zip(graph.op_kind, graph.module, graph.phase.tolist(), strict=True)
    ):
        mirror = int(graph.mirror[op])
        if phase == Phase.BACKWARD and mirror >= 0:
            pairs.append((mirror, op))
        elif kind == "input":
            pairs += [(op, readers[op])] if op in readers else []
        elif op in base and phase == Phase.FORWARD:
            pairs.append((base[op], op))
        elif module == LOSS:
            pairs += [(read[op], op)] if op in read else []
        elif phase != Phase.UPDATE:
            pairs.append((first.setdefault(module, op), op))
    return pairs


def _find_first_reads(graph: Graph, base: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """The op whose tensor each op reads first, inputs left out; and the first op that computes with each."""
    read: dict[int, int] = {}
    readers: dict[int, int] = {}
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        made = int(graph.tensor_op[tensor])
        origin = base.get(made, made)
        if op not in base:
            readers[origin] = min(op, readers.get(origin, op))
        if graph.op_kind[made] != "input":
            read.setdefault(op, made)
    return read, readers


def find_viewed_ops(graph: Graph) -> dict[int, int]:
    """[op that only gives views] the op whose memory they look at; a view of a weight is with its module."""
    made: dict[int, set[int]] = {}
    for op, storage in zip(graph.tensor_op.tolist(), graph.tensor_storage.tolist(), strict=True):
        made.setdefault(op, set()).add(op if storage == NO_STORAGE else int(graph.tensor_op[storage]))
    return {op: min(bases) for op, bases in made.items() if op not in bases and len(bases) == 1}

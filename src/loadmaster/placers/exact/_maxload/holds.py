"""Holds: what the micro-batches in flight keep on a device, as nets over the classes of a chain.

`in_flight.py` counts the bytes of a plan; this is the same sum for a set S of classes, in a form that
changes little when a class joins the set. A storage with its home class h, the classes `saved` that need it
in their backward ops and `again` those whose ops read it when they are recomputed, is kept

    plain        of every micro-batch, if `saved` meets S
    recomputed   once, if h is in S (and `saved` meets it); else of every micro-batch, if either meets S
    FIXED        as above without the first case: nobody recomputes it
    COPY         once, if h is not in S and `saved` meets it: a weight or a gradient from elsewhere
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.in_flight import find_mirrored_ops, kept_storages
from loadmaster.core.problem import Problem
from loadmaster.placers.exact._maxload.model import MaxLoad

MADE, FIXED, COPY = 0, 1, 2
Storage = tuple[int, int, tuple[int, ...], tuple[int, ...], int]  # code, home, saved, again, bytes


@dataclass(frozen=True, slots=True, eq=False)
class Holds:
    """H nets over C classes, their classes as words of 64."""

    code: Ints  # [H] MADE, FIXED or COPY
    home: Ints  # [H]
    num_bytes: Longs  # [H]
    ptr: Longs  # [H + 1] into word, saved and needed
    word: Ints
    saved: "np.typing.NDArray[np.uint64]"
    needed: "np.typing.NDArray[np.uint64]"  # saved or read again
    of_class: Longs  # [C + 1] into net
    net: Ints  # nets that a class changes
    again_s: Floats  # [C, T] seconds more when recomputed


def holds_of(problem: Problem, model: MaxLoad) -> Holds:
    """What the classes of a model keep for each other."""
    sizes: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], int] = {}
    for code, home, saved, again, size in _list_storages(problem, model.of_op):
        key = (code, home, saved, again)
        sizes[key] = sizes.get(key, 0) + size
    ptr, word, saved_mask, needed_mask = [0], [], [], []
    touched: list[list[int]] = [[] for _ in range(model.num_classes)]
    for net, (_, home, saved, again) in enumerate(sizes):
        for w in sorted({v // 64 for v in (*saved, *again)}):
            word.append(w)
            saved_mask.append(_class_mask(saved, w))
            needed_mask.append(_class_mask((*saved, *again), w))
        ptr.append(len(word))
        for v in sorted({home, *saved, *again}):
            touched[v].append(net)
    counts = np.cumsum([0, *map(len, touched)])
    return Holds(
        code=np.array([key[0] for key in sizes], dtype=np.int32),
        home=np.array([key[1] for key in sizes], dtype=np.int32),
        num_bytes=np.array(list(sizes.values()), dtype=np.int64),
        ptr=np.array(ptr, dtype=np.int64),
        word=np.array(word, dtype=np.int32),
        saved=np.array(saved_mask, dtype=np.uint64),
        needed=np.array(needed_mask, dtype=np.uint64),
        of_class=counts.astype(np.int64),
        net=np.array([net for nets in touched for net in nets], dtype=np.int32),
        again_s=_recompute_s(problem, model),
    )


def _class_mask(classes: tuple[int, ...], word: int) -> int:
    return sum(1 << (v % 64) for v in set(classes) if v // 64 == word)


def _recompute_s(problem: Problem, model: MaxLoad) -> Floats:
    """[C, T] seconds of the ops that a recomputed class runs again."""
    rerun = find_mirrored_ops(problem.graph)
    kind = problem.cluster.kind[[alike[0] for alike in model.devices]]
    found = np.zeros((model.num_classes, model.num_types))
    np.add.at(found, model.of_op[rerun], problem.costs.compute_s[rerun][:, kind])
    return np.where(np.isfinite(found), found, 0.0)  # a class that cannot run there is barred anyway


def _list_storages(problem: Problem, of_op: Ints) -> list[Storage]:
    """Every storage that counts."""
    graph = problem.graph
    later = np.isin(graph.phase, (Phase.BACKWARD, Phase.UPDATE))
    rerun, kept = find_mirrored_ops(graph), kept_storages(graph)
    saved: list[set[int]] = [set() for _ in range(graph.num_tensors)]
    again: list[set[int]] = [set() for _ in range(graph.num_tensors)]
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        root = int(graph.tensor_storage[tensor])
        if root < 0:
            continue
        forward = graph.phase[graph.tensor_op[root]] == Phase.FORWARD
        if later[op] or (kept[root] and forward):
            saved[root].add(int(of_op[op]))
        if rerun[op]:
            again[root].add(int(of_op[op]))
    found: list[Storage] = []
    for root in np.flatnonzero(graph.tensor_storage == np.arange(graph.num_tensors)).tolist():
        maker, size = int(graph.tensor_op[root]), int(graph.tensor_bytes[root])
        home, phase = int(of_op[maker]), graph.phase[maker]
        if size == 0:
            continue
        if phase != Phase.FORWARD:
            away = saved[root] - {home}
            if away and (phase == Phase.PARAM or kept[root]):
                found.append((COPY, home, tuple(sorted(away)), (), size))
            continue
        if kept[root]:
            saved[root].add(home)
        if saved[root] or again[root]:
            code = MADE if rerun[maker] and not kept[root] else FIXED
            found.append((code, home, tuple(sorted(saved[root])), tuple(sorted(again[root])), size))
    return found

"""Breakdown: a peak taken apart into weights, gradients, optimizer state, activations and workspace.

    weights      what a parameter op makes, buffers and frozen weights included; copies of it elsewhere
    optimizer    what else is resident at a parameter: moments, a float32 master copy
    gradients    storages that an update reads, or that the backward pass makes and keeps
    activations  all other tensors: inputs, saved values, gradients of activations on their way
    workspace    what an op takes while it runs, and what updates make on the way
    resident     what a source says an op holds without saying what it is (files without parameters)

Every byte of the peak is in exactly one of them. By module: of the op that made it; a gradient belongs to the
module of its weight.
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from loadmaster.capacity.peak_moment import HeldMemory
from loadmaster.core.answers.fit_answer import ModuleParts, Parts
from loadmaster.core.arrays import Ints, Longs
from loadmaster.core.graph import NO_STORAGE, Graph, Phase
from loadmaster.cost.memory import pair_weights_with_updates

PARTS = ("weights", "gradients", "optimizer", "activations", "workspace", "resident")
_WEIGHTS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _WORKSPACE, _RESIDENT = range(len(PARTS))
NO_MODULE = "(no module)"


def parts_of(graph: Graph, held: HeldMemory) -> Parts:
    """A device's peak taken apart."""
    return _sum_parts(_list_held_bytes(graph, held)[1])


def modules_of(graph: Graph, held: HeldMemory, *, most: int = 24) -> tuple[ModuleParts, ...]:
    """The tree of modules from the top, the largest opened first while there are `most` unlike rows."""
    module, table = _list_held_bytes(graph, held)
    total: dict[str, Longs] = {}
    children: dict[str, dict[str, None]] = {}
    for name, row in _sum_by_module(module, table).items():
        for above, below in _parent_child_pairs(name):
            total[below] = total.get(below, np.zeros(len(PARTS), dtype=np.int64)) + row
            children.setdefault(above, {})[below] = None
        total[""] = total.get("", np.zeros(len(PARTS), dtype=np.int64)) + row
    return tuple(_select_rows(total, children, most))


def _parent_child_pairs(path: str) -> list[tuple[str, str]]:
    """('', 'a'), ('a', 'a.b'), ... down to the path."""
    words = path.split(".")
    names = [".".join(words[:at]) for at in range(len(words) + 1)]
    return list(itertools.pairwise(names))


def _select_rows(
    total: Mapping[str, Longs], children: Mapping[str, Iterable[str]], most: int
) -> list[ModuleParts]:
    """Rows in the order of a tree, siblings by size; of modules that are alike only the first is opened."""
    place = {name: at for at, name in enumerate(total)}
    settled: set[tuple[object, ...]] = set()  # opened, or too large to open
    shown, rows = {""}, 1
    while True:
        closed = [name for name in shown if name in children and _sibling_key(total, name) not in settled]
        if not closed:
            break
        name = max(closed, key=lambda name: (int(total[name].sum()), -place[name]))
        settled.add(_sibling_key(total, name))
        below = [child for child in children[name] if total[child].any()]
        distinct = {_sibling_key(total, child) for child in below}
        if name and rows + len(distinct) > most:
            continue
        rows += len(distinct)
        shown.update(below)
    drawn, stack = [], [("", 0)]
    while stack:
        name, depth = stack.pop()
        drawn.append(ModuleParts(name, depth, _sum_parts(total[name][None])))
        below = [child for child in children.get(name, ()) if child in shown]
        stack += [(c, depth + 1) for c in sorted(below, key=lambda c: (int(total[c].sum()), -place[c]))]
    return drawn


def _sibling_key(total: Mapping[str, Longs], name: str) -> tuple[object, ...]:
    """What siblings that are alike have in common."""
    return name.rpartition(".")[0], name == "", *total[name].tolist()


def _sum_by_module(module: list[str], table: Longs) -> dict[str, Longs]:
    found: dict[str, Longs] = {}
    for name, row in zip(module, table, strict=True):
        found[name] = found[name] + row if name in found else row
    return found


def _sum_parts(table: Longs) -> Parts:
    weights, gradients, optimizer, activations, workspace, resident = table.sum(axis=0).tolist()
    total = int(table.sum())
    return Parts(weights, gradients, optimizer, activations, workspace, resident, total)


def _list_held_bytes(graph: Graph, held: HeldMemory) -> tuple[list[str], Longs]:
    """The module of everything held, and its bytes [things, PARTS]."""
    rows: list[tuple[int, int, int]] = []  # op whose module it is, part, bytes
    own = weight_bytes(graph)
    for op in held.resident_op.tolist():
        whole = int(graph.resident_bytes[op])
        if graph.phase[op] != Phase.PARAM:
            rows.append((op, _RESIDENT, whole))
            continue
        weight = min(int(own[op]), whole)
        rows += [(op, _WEIGHTS, weight), (op, _OPTIMIZER, whole - weight)]
    rows += [(op, _WORKSPACE, int(graph.workspace_bytes[op])) for op in held.workspace_op.tolist()]
    part, home = tensor_parts(graph)
    for tensor, size in zip(held.tensor.tolist(), held.tensor_bytes.tolist(), strict=True):
        rows.append((int(home[tensor]), int(part[tensor]), size))
    table = np.zeros((len(rows), len(PARTS)), dtype=np.int64)
    for at, (_, kind, size) in enumerate(rows):
        table[at, kind] = size
    return [graph.module[op] or NO_MODULE for op, _, _ in rows], table


def weight_bytes(graph: Graph) -> Longs:
    """[N] bytes of a parameter op's weight; all it holds where no update belongs to it."""
    own = (graph.tensor_storage == np.arange(graph.num_tensors)) | (graph.tensor_storage == NO_STORAGE)
    weight = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(weight, graph.tensor_op[own], graph.tensor_bytes[own])
    param = graph.phase == Phase.PARAM
    if (graph.phase == Phase.UPDATE).any():
        frozen = param.copy()
        frozen[pair_weights_with_updates(graph)[0]] = False
        weight[frozen] = graph.resident_bytes[frozen]
    return np.where(param, weight, 0)


def gradient_tensors(graph: Graph) -> tuple[Ints, Ints]:
    """Storages of gradients of weights, and the update op that reads each (its maker where none does)."""
    reader: dict[int, int] = {}
    maker = graph.tensor_op[graph.use_tensor]
    reads = (graph.phase[graph.use_op] == Phase.UPDATE) & (graph.phase[maker] != Phase.PARAM)
    reads &= graph.phase[maker] != Phase.UPDATE
    for tensor, op in zip(graph.use_tensor[reads].tolist(), graph.use_op[reads].tolist(), strict=True):
        base = int(graph.tensor_storage[tensor])
        reader.setdefault(tensor if base == NO_STORAGE else base, op)
    kept = np.flatnonzero(graph.keep & (graph.phase[graph.tensor_op] == Phase.BACKWARD))
    for tensor in kept.tolist():
        base = int(graph.tensor_storage[tensor])
        base = tensor if base == NO_STORAGE else base
        if graph.phase[graph.tensor_op[base]] == Phase.BACKWARD:
            reader.setdefault(base, int(graph.tensor_op[base]))
    return np.array(list(reader), dtype=np.int32), np.array(list(reader.values()), dtype=np.int32)


def tensor_parts(graph: Graph) -> tuple[Ints, Ints]:
    """[T] part of every tensor by its storage, and the op whose module it counts to."""
    base = np.where(graph.tensor_storage == NO_STORAGE, np.arange(graph.num_tensors), graph.tensor_storage)
    part = np.full(graph.num_tensors, _ACTIVATIONS, dtype=np.int32)
    home = graph.tensor_op.copy()
    part[graph.phase[home] == Phase.PARAM] = _WEIGHTS
    part[graph.phase[home] == Phase.UPDATE] = _WORKSPACE
    gradient, reader = gradient_tensors(graph)
    part[gradient] = _GRADIENTS
    home[gradient] = reader
    return part[base], home[base]

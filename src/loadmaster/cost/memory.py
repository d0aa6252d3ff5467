"""Memory: what an optimizer keeps on the device beside each weight, and what its update moves.

    sgd        nothing                   adam, adamw  two moments
    momentum   one buffer                adafactor    a row and a column of second moments for every matrix
                                                      of the last two axes; all of them for a vector
    mixed      (bf16-mixed, fp16-mixed) states are float32; a weight of 16 bits or fewer has a float32
               master copy as well
    fp32       states have the weight's own dtype (float32: 4 bytes), as PyTorch makes them
    bf16       the same, and everything that was float32 is bfloat16

Resident at a param op is its weight and this state. A step counter per weight (a few bytes) is left out.
Integer weights are not trained and have no state.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.core.errors import GraphError, UnknownNameError
from loadmaster.core.graph import NO_GROUP, NO_SIGNATURE, NO_STORAGE, Dtype, Graph, Phase

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adafactor")
PRECISIONS = ("fp32", "mixed", "bf16-mixed", "fp16-mixed", "bf16")
_FULL_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
_TRAINED = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT64, Dtype.FLOAT8)
_SHAPE = re.compile(r"\b([a-z]+[0-9]+)\[((?:[0-9]{1,18}(?:\s*,\s*[0-9]{1,18})*)?)\]")
_MOST_BYTES = 2**62


def state_bytes(
    shape: Sequence[int], optimizer: str, *, precision: str = "fp32", dtype: Dtype = Dtype.FLOAT32
) -> int:
    """Bytes that stay on the device beside a weight of that shape and dtype."""
    name = _require_known("optimizer", optimizer, OPTIMIZERS)
    mixed = _require_known("precision", precision, PRECISIONS).endswith("mixed")
    if dtype not in _TRAINED:
        return 0
    elements = math.prod(shape)
    if name == "adafactor":
        factored = len(shape) >= 2
        states = math.prod(shape[:-2]) * (shape[-2] + shape[-1]) if factored else elements
    else:
        states = _FULL_STATES[name] * elements
    wide = Dtype.FLOAT32.itemsize
    item_bytes = max(wide, dtype.itemsize) if mixed else dtype.itemsize
    master_bytes = wide * elements if mixed and dtype.itemsize < wide else 0
    return states * item_bytes + master_bytes


def with_optimizer(graph: Graph, optimizer: str, *, precision: str = "fp32") -> Graph:
    """The graph with weights and optimizer state resident at its param ops and counted in its update ops.

    Both are set, not added, so that a second call replaces the first. An update op moves, for each of its
    weights: the weight read and written, the gradient read, the states (and master copy) read and written,
    so 3 x weight + 2 x state bytes. Where a graph has update ops, a weight without one is frozen and has
    no state. Under any precision but fp32 a float32 graph is cast first (`cast_to_16_bits`).
    """
    _require_known("optimizer", optimizer, OPTIMIZERS)
    if _require_known("precision", precision, PRECISIONS) != "fp32":
        graph = cast_to_16_bits(graph)
    param = graph.phase == Phase.PARAM
    weight_bytes = _weight_bytes(graph)
    weight, update = pair_weights_with_updates(graph)
    state = np.zeros(graph.num_ops, dtype=np.int64)
    for op in np.flatnonzero(_find_stateful_params(graph, weight, update)).tolist():
        shape, dtype = _shape_of(graph, op, int(weight_bytes[op]))
        num_bytes = state_bytes(shape, optimizer, precision=precision, dtype=dtype)
        state[op] = _check_size(num_bytes, graph.op_name[op])
    resident = np.where(param, state + weight_bytes, graph.resident_bytes)
    moved = graph.bytes_moved.copy()
    moved[update] = 0
    np.add.at(moved, update, 3 * weight_bytes[weight] + 2 * state[weight])
    return dataclasses.replace(graph, resident_bytes=resident, bytes_moved=moved)


def cast_to_16_bits(graph: Graph) -> Graph:
    """The graph as mixed precision runs it: float32 ops compute, and their tensors are held, in bfloat16.

    Update ops go on in float32: they work on the master copy.
    """
    cast = (graph.dtype == Dtype.FLOAT32) & (graph.phase != Phase.UPDATE)
    if not cast.any():
        return graph
    signatures = tuple(text.replace("float32[", "bfloat16[") for text in graph.signature_table)
    halved = cast[graph.tensor_op]
    return dataclasses.replace(
        graph,
        dtype=np.where(cast, Dtype.BFLOAT16, graph.dtype).astype(np.int8),
        bytes_moved=np.where(cast, graph.bytes_moved // 2, graph.bytes_moved),
        workspace_bytes=np.where(cast, graph.workspace_bytes // 2, graph.workspace_bytes),
        tensor_bytes=np.where(halved, graph.tensor_bytes // 2, graph.tensor_bytes),
        signature_table=signatures,
    )


def _require_known(what: str, name: str, names: Sequence[str]) -> str:
    if not isinstance(name, str) or name.lower() not in names:
        raise UnknownNameError(what, str(name), names)
    return name.lower()


def _weight_bytes(graph: Graph) -> Longs:
    """[N] bytes of each op's outputs that are no views."""
    own = graph.tensor_storage == np.arange(graph.num_tensors)
    own |= graph.tensor_storage == NO_STORAGE
    weight = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(weight, graph.tensor_op[own], graph.tensor_bytes[own])
    return weight


def pair_weights_with_updates(graph: Graph) -> tuple[Ints, Ints]:
    """Distinct (param op, update op) pairs: the update reads the weight, or shares a group with it alone."""
    maker = graph.tensor_op[graph.use_tensor]
    reads = (graph.phase[maker] == Phase.PARAM) & (graph.phase[graph.use_op] == Phase.UPDATE)
    reading = np.unique(np.stack([maker[reads], graph.use_op[reads]]), axis=1)
    param, update = (_find_grouped_ops(graph, phase) for phase in (Phase.PARAM, Phase.UPDATE))
    update = update[~np.isin(update, reading[1])]
    label, first, count = np.unique(graph.group[param], return_index=True, return_counts=True)
    alone = dict(zip(label[count == 1].tolist(), param[first[count == 1]].tolist(), strict=True))
    labelled = zip(update.tolist(), graph.group[update].tolist(), strict=True)
    read = set(reading[0].tolist())  # what else is done to their gradients is no second update
    rest = [(alone[group], op) for op, group in labelled if group in alone and alone[group] not in read]
    pairs = np.concatenate([reading, np.array(rest, dtype=np.int32).reshape(-1, 2).T], axis=1)
    return pairs[0], pairs[1]


def _find_stateful_params(graph: Graph, updated: Ints, update: Ints) -> Bools:
    """[N] param ops with state: those with an update op, or all where the graph has no update op.

    Where no update op of a group is known to be of one weight, all weights of the group are updated.
    """
    param: Bools = graph.phase == Phase.PARAM
    if not (graph.phase == Phase.UPDATE).any():
        return param
    groups = np.setdiff1d(graph.group[_find_grouped_ops(graph, Phase.UPDATE)], graph.group[update])
    trained: Bools = param & np.isin(graph.group, groups)
    trained[updated] = True
    return trained


def _find_grouped_ops(graph: Graph, phase: Phase) -> Ints:
    return np.flatnonzero((graph.phase == phase) & (graph.group != NO_GROUP)).astype(np.int32)


def _shape_of(graph: Graph, op: int, weight_bytes: int) -> tuple[tuple[int, ...], Dtype]:
    """Shape and dtype from the signature ('param float32[768,2304]'), else a vector of the op's dtype."""
    row = int(graph.signature[op])
    match = _SHAPE.search(graph.signature_table[row]) if row != NO_SIGNATURE else None
    if match is not None and match[1].upper() in Dtype.__members__:
        dims = tuple(int(size) for size in match[2].split(",")) if match[2] else ()
        return dims, Dtype[match[1].upper()]
    dtype = Dtype(int(graph.dtype[op]))
    return (weight_bytes // dtype.itemsize,), dtype


def _check_size(num_bytes: int, name: str) -> int:
    if num_bytes > _MOST_BYTES:
        raise GraphError(f"op {name!r}: its optimizer state would be {num_bytes} bytes; check its signature")
    return num_bytes

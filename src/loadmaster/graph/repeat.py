"""repeat_layers: a graph of three layers made as deep as wanted, by copying columns.

    three layers   rest  0 1 2      rest  2 1 0      rest
    five layers    rest  0 1 1 1 2  rest  2 1 1 1 0  rest

A reference made inside layer 1 (op to tensor, view to base, backward to forward op) points into
its own layer, the one before, the one after, or outside all layers; in copy i of that layer it
points to i, i - 1, i + 1, or the same place outside.
"""

import numpy as np

from loadmaster.core.arrays import Ints, Longs
from loadmaster.core.errors import GraphError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_STORAGE, Graph

OUTSIDE = -1  # the layer of what belongs to none


def repeat_layers(graph: Graph, num_layers: int, *, prefix: str) -> Graph:
    """`graph` of three layers at `num_layers` layers.

    Op names and modules of layer 1 start with prefix + '1.'; a group is named by the index of one
    of its ops (as `Tape` does).
    """
    if num_layers < 3:
        raise GraphError(f"a graph of three layers cannot be repeated to {num_layers}; ask for 3 or more")
    layer = np.array([_layer_of_name(name, prefix) for name in graph.op_name], dtype=np.int64)
    ops = _Copies(layer, num_layers)
    tensors = _Copies(layer[graph.tensor_op], num_layers)
    uses = _Copies(layer[graph.use_op], num_layers)
    order = _order_copies(ops)  # of the copies of ops; tensors and uses follow the op they belong to
    place = _invert_order(order)
    by_maker = np.argsort(place[ops.find(tensors, graph.tensor_op)], kind="stable")
    by_user = np.argsort(place[ops.find(uses, graph.use_op)], kind="stable")
    tensor_place = _invert_order(by_maker)
    row, tensor_row = ops.row[order], tensors.row[by_maker]
    return Graph(
        name=graph.name,
        op_name=_rename_layers(graph.op_name, ops, order, prefix),
        op_kind=tuple(graph.op_kind[i] for i in row.tolist()),
        module=_rename_layers(graph.module, ops, order, prefix),
        phase=graph.phase[row],
        mirror=_map_optional_references(graph.mirror, ops, NO_MIRROR, place)[order],
        group=_map_optional_references(graph.group, ops, NO_GROUP, place)[order],
        signature=graph.signature[row],
        signature_table=graph.signature_table,
        dtype=graph.dtype[row],
        flops=graph.flops[row],
        bytes_moved=graph.bytes_moved[row],
        resident_bytes=graph.resident_bytes[row],
        workspace_bytes=graph.workspace_bytes[row],
        tensor_op=place[ops.find(tensors, graph.tensor_op)][by_maker],
        tensor_bytes=graph.tensor_bytes[tensor_row],
        tensor_storage=_map_optional_references(graph.tensor_storage, tensors, NO_STORAGE, tensor_place)[
            by_maker
        ],
        keep=graph.keep[tensor_row],
        use_tensor=tensor_place[tensors.find(uses, graph.use_tensor)][by_user],
        use_op=place[ops.find(uses, graph.use_op)][by_user],
        capture=graph.capture,
        assumptions=graph.assumptions,
        warnings=graph.warnings,
        notes=graph.notes,
    )


class _Copies:
    """The rows of a table (of ops, tensors or uses) repeated: those outside first, then layer by layer."""

    def __init__(self, layer: Longs, num_layers: int) -> None:
        blocks = [np.flatnonzero(layer == block) for block in (OUTSIDE, 0, 1, 2)]
        times = (1, 1, num_layers - 2, 1)
        self.num_layers = num_layers
        self.old_layer = layer
        self.start = np.cumsum([0, *(len(block) * many for block, many in zip(blocks, times, strict=True))])
        self.size = len(blocks[2])  # rows of one layer
        self.local = np.empty(len(layer), dtype=np.int64)  # place of an old row in its layer
        for block in blocks:
            self.local[block] = np.arange(len(block))
        self.row = np.concatenate([np.tile(block, many) for block, many in zip(blocks, times, strict=True)])
        middle = np.repeat(np.arange(1, num_layers - 1), len(blocks[2]))
        sides = [np.full(len(blocks[b]), at) for b, at in ((0, OUTSIDE), (1, 0), (3, num_layers - 1))]
        self.layer = np.concatenate([*sides[:2], middle, sides[2]])

    def find(self, source: "_Copies", reference: Ints) -> Ints:
        """Where the copies of `source` point, when old row r of it pointed to old row reference[r] here."""
        old = reference[source.row]
        block, from_block = self.old_layer[old], source.old_layer[source.row]
        outside = from_block == OUTSIDE
        step = block - from_block
        far = np.where(outside, block == 1, (np.abs(step) > 1) & (block != OUTSIDE))
        if far.any():
            raise GraphError("a layer refers to one that is not its neighbour; it cannot be repeated")
        end = np.where(block == 0, 0, self.num_layers - 1)
        layer = np.where(outside, end, source.layer + step)
        inner = self.start[2] + (layer - 1) * self.size
        first = np.select(
            [block == OUTSIDE, layer == 0, layer == self.num_layers - 1],
            [0, self.start[1], self.start[3]],
            inner,
        )
        found: Ints = (first + self.local[old]).astype(np.int32)
        return found


def _layer_of_name(name: str, prefix: str) -> int:
    """0, 1 or 2, or OUTSIDE."""
    if not name.startswith(prefix):
        return OUTSIDE
    number = name[len(prefix) :].partition(".")[0]
    if number not in ("0", "1", "2"):
        raise GraphError(f"op {name!r} is in layer {number!r}; only a graph of layers 0 to 2 can be repeated")
    return int(number)


def _order_copies(ops: _Copies) -> Longs:
    """The copies in the order of the old graph, its zones of layers running the same way."""
    old = ops.old_layer
    inside = old != OUTSIDE
    opens = np.concatenate([[True], ~(inside[1:] & inside[:-1])])
    zone = np.flatnonzero(opens)[np.cumsum(opens) - 1]  # first old row of each row's zone
    downward = old[zone] > 0  # starts with the last layer
    rank = np.where(downward[ops.row], -ops.layer, ops.layer)
    order: Longs = np.lexsort((ops.row, rank, zone[ops.row]))
    return order


def _invert_order(order: Longs) -> Ints:
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return place


def _map_optional_references(reference: Ints, table: _Copies, nothing: int, place: Ints) -> Ints:
    """References of a table to itself, some of them to nothing."""
    has = reference != nothing
    old = np.where(has, reference, np.arange(len(reference))).astype(np.int32)
    return np.where(has[table.row], place[table.find(table, old)], np.int32(nothing))


def _rename_layers(names: tuple[str, ...], ops: _Copies, order: Longs, prefix: str) -> tuple[str, ...]:
    """Names with the number of their layer put right; equal names of a layer stay one object."""
    skip = len(prefix) + 1
    made: dict[tuple[int, int], str] = {}
    tails: dict[str, int] = {}
    tail = [tails.setdefault(name[skip:] if name.startswith(prefix) else name, len(tails)) for name in names]
    text = list(tails)
    result = []
    for row, layer in zip(ops.row[order].tolist(), ops.layer[order].tolist(), strict=True):
        if layer == OUTSIDE:
            result.append(names[row])
            continue
        key = (layer, tail[row])
        if key not in made:
            made[key] = f"{prefix}{layer}{text[tail[row]]}"
        result.append(made[key])
    return tuple(result)

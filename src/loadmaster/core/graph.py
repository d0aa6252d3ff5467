"""Graph: what is to be computed, as ops in topological order with tensors and uses.

A parameter is an op too (phase `param`, no time, its weight as output, weight and optimizer
state resident where it is placed). A gradient is a tensor from its backward op to the end of
its update. Tensors *and* uses rather than plain edges: a tensor needed by three ops on one
device is sent once and freed once.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from loadmaster.core.arrays import (
    Bools,
    Bytes8,
    Floats,
    Ints,
    Longs,
    content_digest,
    require_finite,
    require_range,
    require_unique,
    set_column,
    set_names,
    sorted_unique,
)
from loadmaster.core.errors import GraphError
from loadmaster.core.findings import Assumption, Finding


class Phase(IntEnum):
    """What part of a training step an op belongs to."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    PARAM = 3


class Dtype(IntEnum):
    """Element types; a cluster's `flops_per_s` has one column for each."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT64 = 3
    FLOAT8 = 4
    INT8 = 5
    INT32 = 6
    INT64 = 7
    BOOL = 8

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    Dtype.FLOAT32: 4,
    Dtype.FLOAT16: 2,
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT64: 8,
    Dtype.FLOAT8: 1,
    Dtype.INT8: 1,
    Dtype.INT32: 4,
    Dtype.INT64: 8,
    Dtype.BOOL: 1,
}
NO_MIRROR = -1
NO_GROUP = -1
NO_SIGNATURE = -1
NO_STORAGE = -1  # the tensor's memory is counted elsewhere (in its op's resident bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """N ops, T tensors, U uses. Ops stand in topological order."""

    name: str
    op_name: tuple[str, ...]  # [N] unique
    op_kind: tuple[str, ...]  # [N] e.g. 'matmul'
    module: tuple[str, ...]  # [N] module path, '' = none
    phase: Bytes8  # [N] Phase
    mirror: Ints  # [N] forward op of a backward op, else NO_MIRROR
    group: Ints  # [N] equal id = same device, NO_GROUP = free
    signature: Ints  # [N] row of signature_table, or NO_SIGNATURE
    signature_table: tuple[str, ...]  # op + shapes + dtypes: the key of measured costs
    dtype: Bytes8  # [N] Dtype the op computes in
    flops: Floats  # [N]
    bytes_moved: Longs  # [N] device memory traffic
    resident_bytes: Longs  # [N] held where the op is placed, all step long
    workspace_bytes: Longs  # [N] held while the op runs
    tensor_op: Ints  # [T] producer
    tensor_bytes: Longs  # [T]
    tensor_storage: Ints  # [T] itself, the base it is a view of, or NO_STORAGE
    keep: Bools  # [T] lives to the end of the step
    use_tensor: Ints  # [U]
    use_op: Ints  # [U]
    capture: str  # how it was made
    assumptions: tuple[Assumption, ...] = ()  # values that capture could not know
    warnings: tuple[Finding, ...] = ()  # what looks wrong in the captured step
    notes: tuple[str, ...] = ()  # what else to know of it, e.g. that it depends on a random number

    def __post_init__(self) -> None:
        """Check every invariant once, in an order that names the root cause first."""
        num_ops, num_tensors = len(self.op_name), len(self.tensor_op)
        if num_ops == 0:
            raise GraphError(f"graph {self.name!r} has 0 ops; nothing can be placed")
        for field in ("op_name", "op_kind", "module"):
            set_names(self, field, num_ops, GraphError)
        set_names(self, "signature_table", -1, GraphError)
        for field in ("phase", "dtype"):
            set_column(self, field, np.int8, (num_ops,), GraphError)
        for field in ("mirror", "group", "signature"):
            set_column(self, field, np.int32, (num_ops,), GraphError)
        set_column(self, "flops", np.float64, (num_ops,), GraphError)
        for field in ("bytes_moved", "resident_bytes", "workspace_bytes"):
            set_column(self, field, np.int64, (num_ops,), GraphError)
        for field in ("tensor_op", "tensor_storage"):
            set_column(self, field, np.int32, (num_tensors,), GraphError)
        set_column(self, "tensor_bytes", np.int64, (num_tensors,), GraphError)
        set_column(self, "keep", np.bool_, (num_tensors,), GraphError)
        set_column(self, "use_tensor", np.int32, (len(self.use_tensor),), GraphError)
        set_column(self, "use_op", np.int32, (len(self.use_tensor),), GraphError)
        self._check_ops(num_ops)
        self._check_tensors(num_ops, num_tensors)

    def _check_ops(self, num_ops: int) -> None:
        require_unique(self.op_name, "op", GraphError)
        require_range(self.phase, 0, len(Phase), "Graph.phase", GraphError)
        require_range(self.dtype, 0, len(Dtype), "Graph.dtype", GraphError)
        require_range(self.mirror, NO_MIRROR, num_ops, "Graph.mirror", GraphError)
        require_range(self.group, NO_GROUP, 2**31 - 1, "Graph.group", GraphError)
        rows = len(self.signature_table)
        require_range(self.signature, NO_SIGNATURE, rows, "Graph.signature", GraphError)
        require_finite(self.flops, "Graph.flops", GraphError)
        for field in ("bytes_moved", "resident_bytes", "workspace_bytes", "tensor_bytes"):
            values: Longs = getattr(self, field)
            if values.size and values.min() < 0:
                raise GraphError(f"Graph.{field}: {values.min()} is negative; bytes are >= 0")
            if float(values.sum(dtype=np.float64)) >= 2.0**62:
                raise GraphError(f"Graph.{field}: the total is 4 EiB or more; no device holds that")
        mirrored = self.mirror != NO_MIRROR
        if (self.phase[mirrored] != Phase.BACKWARD).any():
            raise GraphError("Graph.mirror: only a backward op may name the forward op it mirrors")

    def _check_tensors(self, num_ops: int, num_tensors: int) -> None:
        require_range(self.tensor_op, 0, num_ops, "Graph.tensor_op", GraphError)
        require_range(self.use_op, 0, num_ops, "Graph.use_op", GraphError)
        require_range(self.use_tensor, 0, num_tensors, "Graph.use_tensor", GraphError)
        late = self.tensor_op[self.use_tensor] >= self.use_op
        if late.any():
            use = int(np.flatnonzero(late)[0])
            maker, user = int(self.tensor_op[self.use_tensor[use]]), int(self.use_op[use])
            raise GraphError(
                f"op {self.op_name[user]!r} uses a tensor of {self.op_name[maker]!r}, which does not"
                " come before it; ops must stand in topological order"
            )
        pair = self.use_tensor.astype(np.int64) * num_ops + self.use_op
        if len(sorted_unique(pair)) != len(pair):
            raise GraphError("an op lists the same tensor twice; one use per (tensor, op)")
        require_range(self.tensor_storage, NO_STORAGE, num_tensors, "Graph.tensor_storage", GraphError)
        stored = np.flatnonzero(self.tensor_storage != NO_STORAGE)
        base = self.tensor_storage[stored]
        if (self.tensor_storage[base] != base).any():
            bad = int(stored[self.tensor_storage[base] != base][0])
            raise GraphError(f"Graph.tensor_storage: tensor {bad} is a view of a view; name the base")
        if (self.tensor_op[base] > self.tensor_op[stored]).any():
            raise GraphError("Graph.tensor_storage: a view comes before its base")

    @property
    def num_ops(self) -> int:
        """N."""
        return len(self.op_name)

    @property
    def num_tensors(self) -> int:
        """T."""
        return len(self.tensor_op)

    @property
    def num_uses(self) -> int:
        """U."""
        return len(self.use_op)

    def __repr__(self) -> str:
        """One line; the columns may be long."""
        return f"<Graph {self.name!r}: {self.num_ops} ops, {self.num_tensors} tensors, {self.num_uses} uses>"

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content, the name left out; findings count where there are any."""
        return content_digest(self)


def edges(graph: Graph) -> tuple[Ints, Ints]:
    """Distinct (producer, consumer) pairs, sorted by producer, then consumer."""
    pair = graph.tensor_op[graph.use_tensor].astype(np.int64) * graph.num_ops + graph.use_op
    pair = sorted_unique(pair)
    return (pair // graph.num_ops).astype(np.int32), (pair % graph.num_ops).astype(np.int32)


def units(graph: Graph) -> tuple[Ints, int]:
    """The unit of each op and their number: ops of one group are one unit, a free op is its own.

    Units are numbered by their first op, so that they stand in the order of the graph.
    """
    own = np.arange(graph.num_ops, dtype=np.int64) + graph.num_ops
    key = np.where(graph.group == NO_GROUP, own + np.int64(2**31), graph.group)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return rank[inverse], len(first)


def held_bytes(graph: Graph) -> Longs:
    """Bytes each op holds on its device at the end of the step: resident plus kept storages."""
    held = graph.resident_bytes.copy()
    kept = graph.keep & (home_bytes(graph) > 0)
    np.add.at(held, graph.tensor_op[kept], graph.tensor_bytes[kept])
    return held


def home_bytes(graph: Graph) -> Longs:
    """[T] bytes a tensor takes where it is made: a view takes none, a weight is already resident."""
    owns = graph.tensor_storage == np.arange(graph.num_tensors)
    resident = graph.phase[graph.tensor_op] == Phase.PARAM
    return np.where(owns & ~resident, graph.tensor_bytes, 0)

"""FlatGraph: the ops, tensors and uses of a lowered strategy while they are put together.

The replicas of a graph's own ops are columns made at once; pieces, copies and collectives are added one by
one. Every op has a key: ops run in the order of keys, and it is a topological one.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, Graph, Phase

OWN = -1  # a tensor that is no view


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """Copies of a graph's own ops and tensors: columns."""

    op: Ints  # [n] which op
    device: Ints  # [n]
    shard: Ints  # [n]
    key: Floats  # [n]
    seconds: Floats  # [n, K]
    resident: Longs  # [n]
    workspace: Longs  # [n]
    mirror: Ints  # [n] replica of the forward op, or NO_MIRROR
    tensor: Ints  # [m] which tensor
    tensor_op: Ints  # [m] replica that makes it
    tensor_bytes: Longs  # [m]
    storage: Ints  # [m]


@dataclass(slots=True)
class FlatGraph:
    """Replicas with what is added to them."""

    graph: Graph
    base: Replicas
    device_name: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    keys: list[float] = field(default_factory=list)
    seconds: list[Floats] = field(default_factory=list)
    tensor_ops: list[int] = field(default_factory=list)
    tensor_bytes: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    use_tensor: list[Ints] = field(default_factory=list)
    use_op: list[Ints] = field(default_factory=list)
    single: list[tuple[int, int]] = field(default_factory=list)
    signals: dict[int, int] = field(default_factory=dict)

    def op(self, name: str, kind: str, phase: int, device: int, key: float, seconds: Floats) -> int:
        """Add an op."""
        self.names.append(name)
        self.kinds.append(kind)
        self.phases.append(phase)
        self.devices.append(device)
        self.keys.append(key)
        self.seconds.append(seconds)
        return len(self.base.op) + len(self.names) - 1

    def tensor(self, op: int, num_bytes: int, storage: int = OWN) -> int:
        """Add a tensor; a view names its base."""
        made = len(self.base.tensor) + len(self.tensor_ops)
        self.tensor_ops.append(op)
        self.tensor_bytes.append(num_bytes)
        self.storages.append(made if storage == OWN else storage)
        return made

    def signal(self, op: int) -> int:
        """The tensor of no bytes that says an op has ended."""
        if op not in self.signals:
            self.signals[op] = self.tensor(op, 0)
        return self.signals[op]

    def use(self, tensor: int, op: int) -> None:
        """Let an op read a tensor."""
        self.single.append((tensor, op))

    def use_all(self, tensors: Ints, ops: Ints) -> None:
        """Let ops read tensors, pair by pair."""
        self.use_tensor.append(tensors)
        self.use_op.append(ops)

    def key_of(self, op: int) -> float:
        """When an op is due."""
        own = len(self.base.op)
        return float(self.base.key[op]) if op < own else self.keys[op - own]

    def device_of(self, op: int) -> int:
        """Where an op is."""
        own = len(self.base.op)
        return int(self.base.device[op]) if op < own else self.devices[op - own]

    def finish(self, num_kinds: int) -> tuple[Graph, Ints, Floats, Ints]:
        """The graph, device and seconds of each op, and which replica it is (-1 = added)."""
        base, graph = self.base, self.graph
        own, added = len(base.op), len(self.names)
        key = np.concatenate([base.key, np.array(self.keys, dtype=np.float64)])
        order = np.argsort(key, kind="stable")
        place = np.empty(own + added, dtype=np.int32)
        place[order] = np.arange(own + added, dtype=np.int32)
        fresh = np.array(self.seconds).reshape(added, num_kinds)

        def column(first: NDArray[Any], value: float) -> NDArray[Any]:
            return np.concatenate([first, np.full(added, value, dtype=first.dtype)])[order]

        pick = order.tolist()
        source = base.op.tolist()
        # Shards of a pipeline share a device: a name has both.
        labels = [
            f"{graph.op_name[op]} @ {self.device_name[d]}" + (f" #{s}" if s else "")
            for op, d, s in zip(source, base.device.tolist(), base.shard.tolist(), strict=True)
        ]
        labels += self.names
        kinds = [*(graph.op_kind[op] for op in source), *self.kinds]
        modules = [*(graph.module[op] for op in source), *([""] * added)]
        mirror = np.concatenate([base.mirror, np.full(added, NO_MIRROR, dtype=np.int32)])[order]
        signature = column(graph.signature[base.op], NO_SIGNATURE)
        uses = np.array(self.single, dtype=np.int64).reshape(-1, 2)
        use_tensor = np.concatenate([*self.use_tensor, uses[:, 0]]).astype(np.int64)
        use_op = place[np.concatenate([*self.use_op, uses[:, 1]]).astype(np.int64)]
        tensor_op = np.concatenate([base.tensor_op, np.array(self.tensor_ops, dtype=np.int32)])
        pair = np.unique(use_tensor * (own + added) + use_op)
        made = Graph(
            name=f"{graph.name}, by strategy",
            op_name=tuple(labels[i] for i in pick),
            op_kind=tuple(kinds[i] for i in pick),
            module=tuple(modules[i] for i in pick),
            phase=np.concatenate([graph.phase[base.op], np.array(self.phases, dtype=np.int8)])[order],
            mirror=np.where(mirror == NO_MIRROR, NO_MIRROR, place[mirror]),
            group=np.full(own + added, NO_GROUP, dtype=np.int32),
            signature=signature,
            signature_table=graph.signature_table,
            dtype=column(graph.dtype[base.op], 0),
            flops=np.zeros(own + added),
            bytes_moved=np.zeros(own + added, dtype=np.int64),
            resident_bytes=column(base.resident, 0),
            workspace_bytes=column(base.workspace, 0),
            tensor_op=place[tensor_op],
            tensor_bytes=np.concatenate([base.tensor_bytes, np.array(self.tensor_bytes, dtype=np.int64)]),
            tensor_storage=np.concatenate([base.storage, np.array(self.storages, dtype=np.int32)]),
            keep=np.concatenate([graph.keep[base.tensor], np.zeros(len(self.tensor_ops), dtype=np.bool_)]),
            use_tensor=(pair // (own + added)).astype(np.int32),
            use_op=(pair % (own + added)).astype(np.int32),
            capture="strategy",
            assumptions=graph.assumptions,
        )
        device = np.concatenate([base.device, np.array(self.devices, dtype=np.int32)])[order]
        seconds = np.vstack([base.seconds, fresh])[order]
        replica = np.concatenate([np.arange(own), np.full(added, -1)]).astype(np.int32)[order]
        return made, device, seconds, replica


UPDATE, BACKWARD, FORWARD = int(Phase.UPDATE), int(Phase.BACKWARD), int(Phase.FORWARD)

"""What stands in memory while an op runs, whatever the plan: bytes that go wherever a unit is.

Let an op of a unit that has begun touch a tensor (make or use it), and an op of that unit that has not
ended use it. Both are on the unit's device, so there the tensor, or the storage that it looks into, or a
copy, stands all the time between. Its bytes are the least of the tensors that it may be a view of. Of
several views of a storage the largest counts, and a storage counts for one unit only: units on one device
may share it. A weight that an op of a unit has read and another one reads again stands there, too: as what is
resident, or as a copy.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.core.graph import NO_STORAGE, Graph, Phase, home_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """What units may be charged for at one moment: bytes of a storage, by storage and unit."""

    storage: Ints
    unit: Ints
    num_bytes: Longs

    def charge(self, wanted: Bools, num_units: int) -> Longs:
        """[units] bytes, every storage at one of the wanted units, where it is largest."""
        mine = wanted[self.unit]
        storage, unit, size = self.storage[mine], self.unit[mine], self.num_bytes[mine]
        order = np.lexsort((unit, -size, storage))
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = storage[order][1:] != storage[order][:-1]
        chosen = order[first]
        total = np.zeros(num_units, dtype=np.int64)
        np.add.at(total, unit[chosen], size[chosen])
        return total

    def select_storages(self, chosen: Bools) -> "Standing":
        """Only some storages, by tensor."""
        mine = chosen[self.storage]
        return Standing(self.storage[mine], self.unit[mine], self.num_bytes[mine])


class StandingBytes:
    """Prepared for any op of a graph."""

    def __init__(self, graph: Graph, unit: Ints, num_units: int, *, weights: bool = False) -> None:
        """`weights`: those of units that do nothing but hold and update them are counted; by `is_weight` they
        can be told from the rest, as they are part of what is resident where they are at home.
        """
        self.graph, self.num_units = graph, num_units
        is_param = graph.phase == Phase.PARAM
        stored = graph.tensor_storage != NO_STORAGE
        base = np.where(stored, graph.tensor_storage, 0)
        self.is_weight: Bools = is_param[graph.tensor_op[base]]
        held_only = np.ones(num_units, dtype=np.bool_)
        held_only[unit[~is_param & (graph.phase != Phase.UPDATE)]] = False
        counted = ~self.is_weight | held_only[unit[graph.tensor_op[base]]] & weights
        made = np.flatnonzero(stored & counted & ~is_param[graph.tensor_op])
        used = np.flatnonzero((stored & counted)[graph.use_tensor])
        self.size = least_view_bytes(graph)
        self.tensor = np.concatenate([made, graph.use_tensor[used]]).astype(np.int64)
        self.op = np.concatenate([graph.tensor_op[made], graph.use_op[used]]).astype(np.int64)
        self.uses = np.arange(len(self.tensor)) >= len(made)
        self.key = self.tensor * num_units + unit[self.op]

    def during(self, op: int, before: Bools, after: Bools) -> Standing:
        """While an op runs; `before` and `after` it in every run."""
        begun, not_ended = before.copy(), after.copy()
        begun[op] = not_ended[op] = True
        touched = self.key[begun[self.op]]
        again = self.key[(self.uses & not_ended[self.op]) | (self.op == op)]
        key = np.intersect1d(touched, again)
        tensor, unit = key // self.num_units, key % self.num_units
        storage = self.graph.tensor_storage[tensor].astype(np.int64)
        pair, where = np.unique(storage * self.num_units + unit, return_inverse=True)
        size = np.zeros(len(pair), dtype=np.int64)
        np.maximum.at(size, where.reshape(-1), self.size[tensor])
        kept = np.flatnonzero(self.graph.keep & (home_bytes(self.graph) > 0) & begun[self.graph.tensor_op])
        home = kept * self.num_units + self._unit_of(kept)
        pair = np.concatenate([pair, home])
        size = np.concatenate([size, self.size[kept]])
        return Standing(
            (pair // self.num_units).astype(np.int32), (pair % self.num_units).astype(np.int32), size
        )

    def _unit_of(self, tensor: Longs) -> Longs:
        """Units of the ops that make these tensors, each of which takes memory."""
        made = self.key[~self.uses]
        at = np.searchsorted(made // self.num_units, tensor)  # tensors stand in their order
        return made[at] % self.num_units


def least_view_bytes(graph: Graph) -> Longs:
    """[T] bytes of a tensor, or of what it is a view of, directly or not, if that is less.

    Of a weight no more than its share of what is resident.
    """
    least, outputs = graph.tensor_bytes.copy(), np.bincount(graph.tensor_op, minlength=graph.num_ops)
    weights = np.flatnonzero(graph.phase[graph.tensor_op] == Phase.PARAM)
    makers = graph.tensor_op[weights]
    least[weights] = np.minimum(least[weights], graph.resident_bytes[makers] // outputs[makers])
    inputs: dict[int, list[int]] = {}
    views = np.flatnonzero(
        (graph.tensor_storage != np.arange(graph.num_tensors)) & (graph.tensor_storage != NO_STORAGE)
    )
    viewers = set(graph.tensor_op[views].tolist())
    for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        if op in viewers:
            inputs.setdefault(op, []).append(t)
    storage = graph.tensor_storage
    for t in views[np.argsort(graph.tensor_op[views], kind="stable")].tolist():
        sources = [s for s in inputs.get(int(graph.tensor_op[t]), []) if storage[s] == storage[t]]
        smaller = [int(least[s]) for s in (*sources, int(storage[t]))]
        least[t] = min(int(least[t]), *smaller)
    return least

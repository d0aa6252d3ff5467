"""Replicas: every op of a graph once for each shard of its group, as columns.

An op of the forward or backward pass has the seconds, bytes and workspace of its rows. Weights are held
whole by every replica, with optimizer state where they are updated. The micro-batches of a pipeline
share weights, add their gradients up in one place and update once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.graph import NO_MIRROR, Phase
from loadmaster.core.problem import Problem
from loadmaster.core.strategy import Strategy, Sync
from loadmaster.strategies.lowering.flat_graph import Replicas
from loadmaster.strategies.lowering.layouts import Layout
from loadmaster.strategies.lowering.pipeline_keys import pipeline_keys
from loadmaster.strategies.lowering.row_costs import RowCosts
from loadmaster.strategies.splitting.forms import Form, Splits


class ReplicaMaker:
    """Makes the columns, and knows afterwards where the replicas of an op and of a tensor begin."""

    def __init__(
        self,
        problem: Problem,
        strategy: Strategy,
        splits: Splits,
        costs: RowCosts,
        layouts: list[Layout],
        layout_of_op: Ints,
        factors: Bools,
    ) -> None:
        """`factors` are ops that run on all rows in every shard."""
        self.problem, self.strategy, self.splits, self.costs = problem, strategy, splits, costs
        self.layouts, self.layout_of_op, self.factors = layouts, layout_of_op, factors
        self.graph, self.batch, self.group_of = problem.graph, strategy.batch, strategy.group_of
        found = [self.shards(op) for op in range(self.graph.num_ops)]
        self.count = np.array([len(s) for s in found], dtype=np.int32)  # [N] shards that run each op
        self.skip = np.array([s.start for s in found], dtype=np.int32)  # [N] the first of them
        self.first = np.concatenate([[0], np.cumsum(self.count)]).astype(np.int32)  # [N + 1]
        of_tensor = self.count[self.graph.tensor_op]
        self.tensor_first = np.concatenate([[0], np.cumsum(of_tensor)]).astype(np.int32)  # [T + 1]

    def shards(self, op: int) -> range:
        """The shards of an op's layout on which it runs."""
        layout = self.layouts[self.layout_of_op[op]]
        if self.graph.phase[op] == Phase.UPDATE:
            group = self.strategy.groups[self.group_of[op]]
            if group.sync == Sync.PS:
                at = layout.devices.index(group.server)
                return range(at, at + 1)
        if layout.stage >= 0 and self.graph.phase[op] in (Phase.PARAM, Phase.UPDATE):
            return range(1)
        return range(layout.num_shards)

    def make(self) -> Replicas:
        """The columns."""
        graph, kinds = self.graph, len(self.problem.cluster.kind_name)
        op = np.repeat(np.arange(graph.num_ops, dtype=np.int32), self.count)
        shard = (np.arange(len(op)) - self.first[op] + self.skip[op]).astype(np.int32)
        widest = max(layout.num_shards for layout in self.layouts)
        device_table = np.zeros((len(self.layouts), widest), dtype=np.int32)
        share_table = np.ones((len(self.layouts), widest))
        for at, layout in enumerate(self.layouts):
            device_table[at, : layout.num_shards] = layout.devices
            if layout.parts:
                share_table[at, : layout.num_shards] = np.array(layout.rows) / self.batch
        layout_at = self.layout_of_op[op]
        device, share = device_table[layout_at, shard], share_table[layout_at, shard]
        whole = self.factors[op]
        seconds = np.zeros((len(op), kinds + 1))
        seconds[:, kinds] = np.inf
        for value in np.unique(share):
            rows = np.flatnonzero((share == value) & ~whole)
            seconds[rows, :kinds] = self.costs.seconds(op[rows], float(value))
        rows = np.flatnonzero(whole)
        seconds[rows, :kinds] = self.costs.seconds(op[rows], 1.0)
        passes = np.isin(graph.phase[op], (Phase.FORWARD, Phase.BACKWARD)) & self.splits.scales[op] & ~whole
        workspace = np.where(passes, np.ceil(graph.workspace_bytes[op] * share), graph.workspace_bytes[op])
        back = graph.mirror[op]
        mirror = np.where(back == NO_MIRROR, NO_MIRROR, self.first[back] + shard - self.skip[back])
        mirror = np.where(mirror >= 0, np.minimum(mirror, self.first[back + 1] - 1), NO_MIRROR)
        return Replicas(
            op=op,
            device=device,
            shard=shard,
            key=self._keys(op, shard),
            seconds=seconds,
            resident=self._resident(op, device),
            workspace=workspace.astype(np.int64),
            mirror=mirror.astype(np.int32),
            **self._tensors(op, share),
        )

    def _keys(self, op: Ints, shard: Ints) -> Floats:
        keys = pipeline_keys(self.graph, self.strategy, self.layouts, self.layout_of_op)
        if keys is not None:
            return keys(op, shard)
        # Gradients from factors are made last, so that nothing waits while the factors are gathered.
        back = np.flatnonzero(self.graph.phase == Phase.BACKWARD)
        late = float(back[-1]) + 0.3 if len(back) else 0.0
        own: Floats = op.astype(np.float64)
        found: Floats = np.where(self.factors[op], late + own / (2 * self.graph.num_ops), own)
        return found

    def _resident(self, op: Ints, device: Ints) -> Longs:
        """Weight and state; replicas that do not update hold the weight alone."""
        graph = self.graph
        resident: Longs = graph.resident_bytes[op].copy()
        servers = np.array([group.server for group in self.strategy.groups])[self.group_of]
        if (servers < 0).all():
            return resident
        weight = np.zeros(graph.num_ops, dtype=np.int64)
        own = graph.tensor_storage == np.arange(graph.num_tensors)
        np.add.at(weight, graph.tensor_op[own], graph.tensor_bytes[own])
        trained = np.zeros(graph.num_ops, dtype=np.bool_)
        updates = graph.phase[graph.use_op] == Phase.UPDATE
        trained[graph.tensor_op[graph.use_tensor[updates]]] = True
        idle = (graph.phase[op] == Phase.PARAM) & trained[op] & (servers[op] >= 0) & (servers[op] != device)
        resident[idle] = np.minimum(resident, weight[op])[idle]
        return resident

    def _tensors(self, op: Ints, share: Floats) -> dict[str, NDArray[Any]]:
        graph = self.graph
        count = self.count[graph.tensor_op]
        tensor = np.repeat(np.arange(graph.num_tensors, dtype=np.int32), count)
        at = (np.arange(len(tensor)) - self.tensor_first[tensor]).astype(np.int32)
        made = (self.first[graph.tensor_op[tensor]] + at).astype(np.int32)
        part = self.splits.form[tensor] == Form.PART
        size = np.where(part, np.ceil(graph.tensor_bytes[tensor] * share[made]), graph.tensor_bytes[tensor])
        base = graph.tensor_storage[tensor]
        one = self.count[graph.tensor_op[np.maximum(base, 0)]] == 1
        same = self.layout_of_op[graph.tensor_op[np.maximum(base, 0)]] == self.layout_of_op[op[made]]
        viewed = self.tensor_first[np.maximum(base, 0)] + np.where(one, 0, at)
        storage = np.where(base < 0, base, np.where(same, viewed, np.arange(len(tensor))))
        # Micro-batches add their gradients up in one place.
        piped = np.array([layout.stage >= 0 for layout in self.layouts])[self.layout_of_op[op[made]]]
        summed = piped & (self.splits.form[tensor] == Form.SUM) & (storage == np.arange(len(tensor)))
        storage = np.where(summed, self.tensor_first[tensor], storage)
        return {
            "tensor": tensor,
            "tensor_op": made,
            "tensor_bytes": size.astype(np.int64),
            "storage": storage.astype(np.int32),
        }

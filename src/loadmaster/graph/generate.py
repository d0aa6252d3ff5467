"""Random graphs with seeds, and the cluster and costs that a generated graph brings.

Five families are published benchmarks of list-scheduling placers and are repeated draw for draw:
`random.Random(seed)` is asked in exactly the order written here, ops are numbered as they are
made. Each op has one output that is never freed (`keep`), its weight and gradient are resident,
and its microseconds are flops on a device of 1 TFLOP/s (the preset `ref`).
"""

import math
import random
from collections.abc import Callable

import numpy as np

from loadmaster.core.arrays import Longs
from loadmaster.core.cluster import star
from loadmaster.core.errors import InputError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, NO_STORAGE, Dtype, Graph, Phase
from loadmaster.core.problem import Costs, Origin, Workload
from loadmaster.graph.transformer import MOST_OPS, transformer_with_ops

FLOPS_PER_US = 1e6  # 1 TFLOP/s
NUM_DEVICES = 4
MEMORY_FACTOR = 2.0  # all devices together, over what all ops hold
US_PER_BYTE = 0.0001754
US_PER_TRANSFER = 134.0
_MIB = 2**20
_RESIDENT_PER_PARAM = 2  # weight and gradient


class _Draft:
    """Ops and edges in the making; `conv` and `small` are the two random ops of the families."""

    def __init__(self, num_ops: int, seed: int) -> None:
        if not 1 <= num_ops <= MOST_OPS:
            raise InputError(f"cannot generate {num_ops} ops; ask for 1 to {MOST_OPS}")
        self.rng = random.Random(seed)
        self.kind: list[str] = []
        self.module: list[str] = []
        self.compute_us: list[int] = []
        self.param_bytes: list[int] = []
        self.out_bytes: list[int] = []
        self.temp_bytes: list[int] = []
        self.source: list[int] = []
        self.target: list[int] = []

    def __len__(self) -> int:
        return len(self.kind)

    def op(
        self, kind: str, module: str, *, compute_us: int, param_bytes: int, out_bytes: int, temp_bytes: int
    ) -> int:
        self.kind.append(kind)
        self.module.append(module)
        self.compute_us.append(compute_us)
        self.param_bytes.append(param_bytes)
        self.out_bytes.append(out_bytes)
        self.temp_bytes.append(temp_bytes)
        return len(self.kind) - 1

    def conv(self, module: str) -> int:
        draw = self.rng.randint  # keyword arguments are evaluated, so drawn, in the order written
        return self.op(
            "conv",
            module,
            compute_us=draw(50, 2000),
            param_bytes=draw(1, 8) * _MIB,
            out_bytes=draw(1, 16) * _MIB,
            temp_bytes=draw(0, 8) * _MIB,
        )

    def small(self, module: str) -> int:
        draw = self.rng.randint
        return self.op(
            "small",
            module,
            compute_us=draw(1, 50),
            param_bytes=0,
            out_bytes=draw(1, 4) * _MIB,
            temp_bytes=0,
        )

    def link(self, source: int, target: int) -> None:
        self.source.append(source)
        self.target.append(target)

    def graph(self, name: str) -> Graph:
        """Tensor i is the output of op i."""
        num_ops = len(self)
        pair = np.sort(np.array(self.source, dtype=np.int64) * num_ops + np.array(self.target, np.int64))
        every = np.arange(num_ops, dtype=np.int32)
        return Graph(
            name=name,
            op_name=tuple(f"{kind}.{i}" for i, kind in enumerate(self.kind)),
            op_kind=tuple(self.kind),
            module=tuple(self.module),
            phase=np.zeros(num_ops, dtype=np.int8),
            mirror=np.full(num_ops, NO_MIRROR, dtype=np.int32),
            group=np.full(num_ops, NO_GROUP, dtype=np.int32),
            signature=np.full(num_ops, NO_SIGNATURE, dtype=np.int32),
            signature_table=(),
            dtype=np.full(num_ops, Dtype.FLOAT32, dtype=np.int8),
            flops=np.array(self.compute_us, dtype=np.float64) * FLOPS_PER_US,
            bytes_moved=np.zeros(num_ops, dtype=np.int64),
            resident_bytes=_RESIDENT_PER_PARAM * np.array(self.param_bytes, dtype=np.int64),
            workspace_bytes=np.array(self.temp_bytes, dtype=np.int64),
            tensor_op=every,
            tensor_bytes=np.array(self.out_bytes, dtype=np.int64),
            tensor_storage=every,
            keep=np.ones(num_ops, dtype=np.bool_),
            use_tensor=(pair // num_ops).astype(np.int32),
            use_op=(pair % num_ops).astype(np.int32),
            capture="generated",
        )


def chain(num_ops: int, seed: int = 0) -> Graph:
    """Ops in a row."""
    draft = _Draft(num_ops, seed)
    for i in range(num_ops):
        draft.conv("")
        if i:
            draft.link(i - 1, i)
    return draft.graph(f"chain {num_ops}")


def fork_join(num_ops: int, seed: int = 0) -> Graph:
    """Blocks of 2 to 6 parallel branches of 1 to 6 ops, like an inception network."""
    draft = _Draft(num_ops, seed)
    rng = draft.rng
    cur, block = draft.conv("stem"), 0
    while len(draft) < num_ops:
        ends = []
        for branch in range(rng.randint(2, 6)):
            module, last = f"block.{block}.{branch}", cur
            for _ in range(rng.randint(1, 6)):
                op = draft.conv(module) if rng.random() < 0.6 else draft.small(module)
                draft.link(last, op)
                last = op
            ends.append(last)
        cur = _add_join(draft, ends, f"block.{block}")
        block += 1
    return draft.graph(f"fork_join {num_ops}")


def _add_join(draft: _Draft, ends: list[int], module: str) -> int:
    join = draft.small(module)
    for end in ends:
        draft.link(end, join)
    return join


def rnn_grid(num_ops: int, seed: int = 0) -> Graph:
    """8 recurrent layers over num_ops // 8 steps (at least one)."""
    draft = _Draft(num_ops, seed)
    layers = 8
    for step in range(max(1, num_ops // layers)):
        for layer in range(layers):
            op = draft.op(
                "cell",
                f"layer.{layer}",
                compute_us=draft.rng.randint(200, 400),
                param_bytes=2 * _MIB,
                out_bytes=_MIB,
                temp_bytes=_MIB // 4,
            )
            if layer:
                draft.link(op - 1, op)
            if step:
                draft.link(op - layers, op)
    return draft.graph(f"rnn_grid {num_ops}")


def layered(num_ops: int, seed: int = 0) -> Graph:
    """Layers about sqrt(num_ops) wide; every op has 1 to 3 producers in the layer before."""
    draft = _Draft(num_ops, seed)
    rng, width, layer = draft.rng, max(2, math.isqrt(num_ops)), 0
    last = [draft.conv("layer.0") for _ in range(width)]
    while len(draft) < num_ops:
        layer += 1
        module, made = f"layer.{layer}", []
        for _ in range(width):
            op = draft.conv(module) if rng.random() < 0.5 else draft.small(module)
            for producer in rng.sample(last, min(width, rng.randint(1, 3))):
                draft.link(producer, op)
            made.append(op)
        last = made
    return draft.graph(f"layered {num_ops}")


def many_source(num_ops: int, seed: int = 0) -> Graph:
    """Fork-join in which every op has a parameter op of its own, like a TensorFlow 1 graph."""
    draft = _Draft(num_ops, seed)
    rng, cur, block = draft.rng, -1, 0
    while len(draft) < num_ops:
        ends = []
        for branch in range(rng.randint(2, 6)):
            module, last = f"block.{block}.{branch}", cur
            for _ in range(rng.randint(1, 4)):
                last = _add_op_with_source(draft, last, module)
            ends.append(last)
        cur = _add_join(draft, ends, f"block.{block}")
        block += 1
    return draft.graph(f"many_source {num_ops}")


def _add_op_with_source(draft: _Draft, last: int, module: str) -> int:
    """An op fed by its own source and by `last` (-1: by nothing else)."""
    source = draft.op("source", module, compute_us=1, param_bytes=_MIB, out_bytes=_MIB, temp_bytes=0)
    draw = draft.rng.randint
    compute_us, out_bytes = draw(50, 2000), draw(1, 16) * _MIB
    op = draft.op("op", module, compute_us=compute_us, param_bytes=0, out_bytes=out_bytes, temp_bytes=0)
    draft.link(source, op)
    if last >= 0:
        draft.link(last, op)
    return op


def diamond(num_ops: int, seed: int = 0) -> Graph:
    """Diamonds in a row: an op, two parallel ops, a join that opens the next diamond."""
    draft = _Draft(num_ops, seed)
    cur, block = draft.conv("stem"), 0
    while len(draft) < num_ops:
        sides = [draft.conv(f"block.{block}.{side}") for side in range(2)]
        for side in sides:
            draft.link(cur, side)
        cur = _add_join(draft, sides, f"block.{block}")
        block += 1
    return draft.graph(f"diamond {num_ops}")


FAMILIES: dict[str, Callable[[int, int], Graph]] = {
    "chain": chain,
    "diamond": diamond,
    "fork_join": fork_join,
    "layered": layered,
    "many_source": many_source,
    "rnn_grid": rnn_grid,
    "transformer": transformer_with_ops,
}


def with_benchmark_cluster(graph: Graph) -> Workload:
    """`graph` with the cluster and costs of the published benchmark, its flops read on `ref`.

    Four equal devices, one port each, with twice the memory of all that ops hold, and transfers
    of whole microseconds.
    """
    memory = math.floor(MEMORY_FACTOR * _total_bytes(graph) / NUM_DEVICES)
    memory = max(memory, _largest_op_bytes(graph), 1)
    cluster = star(
        f"{NUM_DEVICES} x ref",
        memory_bytes=[memory] * NUM_DEVICES,
        bytes_per_s=1.0 / (US_PER_BYTE * 1e-6),
        latency_s=US_PER_TRANSFER * 1e-6,
    )
    costs = Costs(
        compute_s=(graph.flops / (FLOPS_PER_US * 1e6))[:, np.newaxis],
        issue_s=np.zeros(graph.num_ops),
        transfer_s=np.rint(US_PER_BYTE * graph.tensor_bytes + US_PER_TRANSFER) / 1e6,
        origin=np.full(graph.num_ops, Origin.GIVEN, dtype=np.int8),
        rel_error=np.zeros(graph.num_ops),
    )
    return Workload(graph=graph, cluster=cluster, costs=costs)


def _total_bytes(graph: Graph) -> int:
    """Bytes of all ops and all their outputs at once; a weight counts once, resident or not."""
    outputs = _output_bytes(graph)
    weight = graph.phase == Phase.PARAM
    total = np.where(weight, np.maximum(graph.resident_bytes, outputs), graph.resident_bytes + outputs)
    return int(total.sum())


def _output_bytes(graph: Graph) -> Longs:
    """[N] bytes of the storages each op makes."""
    base = graph.tensor_storage == np.arange(graph.num_tensors)
    outputs = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(outputs, graph.tensor_op[base], graph.tensor_bytes[base])
    return outputs


def _largest_op_bytes(graph: Graph) -> int:
    """The most bytes one op needs at once: resident, workspace, outputs and inputs."""
    need = graph.resident_bytes + graph.workspace_bytes + _output_bytes(graph)
    storage = graph.tensor_storage[graph.use_tensor]
    read = storage != NO_STORAGE
    pair = np.sort(storage[read].astype(np.int64) * graph.num_ops + graph.use_op[read])
    pair = pair[np.diff(pair, prepend=-1) != 0]  # two views of one storage count once
    np.add.at(need, pair % graph.num_ops, graph.tensor_bytes[pair // graph.num_ops])
    return int(need.max())

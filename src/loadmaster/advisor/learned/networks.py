"""Three networks over the same observation: an MLP, one that also reads the job graph, and PAC-ML's own.

mlp     a job as its completion times over its deadline, and the servers with the times until they are free
graph   the same and two rounds of message passing over the job graph
pacml   what the published policy sees (section 2.8): the job graph and sums over it, how many servers are
        taken, the mask; not which servers are free, nor until when

All end in one value and one logit for each action, masked. Job graphs are read as one graph of many parts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from loadmaster.advisor.environments.batched import NUM_DEGREES, OBSERVATION_SIZE
from loadmaster.advisor.environments.blocks import all_blocks
from loadmaster.advisor.environments.profile import JobGraph
from loadmaster.core.errors import FileError, FormatError, InputError, UnknownNameError

NETWORKS = ("mlp", "graph", "pacml")
_WIDTH = 128
_GRAPH_WIDTH = 16
_NODE = 5
DEGREES_ONLY = 1 + NUM_DEGREES  # actions: reject, or a degree
JOINT = 1 + len(all_blocks().mask)  # reject, or a block
_MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Spec:
    """What weights belong to."""

    network: str
    world: str
    num_actions: int
    distribution: str


class Mlp(nn.Module):
    """Observation -> logits and value."""

    def __init__(self, num_actions: int, extra: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBSERVATION_SIZE + extra, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh()
        )
        self.actions = nn.Linear(_WIDTH, num_actions)
        self.value = nn.Linear(_WIDTH, 1)
        nn.init.orthogonal_(self.actions.weight, 0.01)

    def read(self) -> Tensor | None:
        """It reads no graphs."""
        return None

    def forward(
        self, seen: Tensor, mask: Tensor, model: Tensor | None = None, reading: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Masked logits [B, A] and values [B]."""
        hidden = self.body(seen)
        return self.actions(hidden).masked_fill(~mask, -1e9), self.value(hidden).squeeze(-1)


class GraphNet(nn.Module):
    """The MLP with a reading of the job graph beside the observation."""

    def __init__(self, num_actions: int, graphs: tuple[JobGraph, ...]) -> None:
        super().__init__()
        self.head = Mlp(num_actions, extra=_GRAPH_WIDTH)
        self.rounds = nn.ModuleList([_Round(_NODE, 2 * _GRAPH_WIDTH), _Round(2 * _GRAPH_WIDTH, _GRAPH_WIDTH)])
        self._graphs = _Graphs(graphs)

    def read(self) -> Tensor:
        """What each job graph says, [M, width]."""
        return self._graphs.read(self.rounds)

    def forward(
        self, seen: Tensor, mask: Tensor, model: Tensor, reading: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Each graph is read once for a batch, or was read before."""
        reading = self.read() if reading is None else reading
        logits, value = self.head(torch.cat([seen, reading[model]], dim=1), mask)
        return logits, value


class PacmlNet(nn.Module):
    """The published network on the published observation; the head has a value instead of advantages."""

    def __init__(self, num_actions: int, graphs: tuple[JobGraph, ...]) -> None:
        super().__init__()
        if num_actions != 1 + NUM_DEGREES:
            raise InputError("the published network chooses a degree and no block; leave joint out")
        self.rounds = nn.ModuleList([_Round(_NODE, 4 * _GRAPH_WIDTH), _Round(4 * _GRAPH_WIDTH, _GRAPH_WIDTH)])
        self._graphs = _Graphs(graphs)
        self._sums = _sums(graphs)
        width = self._sums.shape[1] + 5 + num_actions
        self.whole = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _GRAPH_WIDTH // 2))
        self.body = nn.Sequential(nn.Linear(_GRAPH_WIDTH + _GRAPH_WIDTH // 2, 2 * _WIDTH), nn.ReLU())
        self.actions = nn.Linear(2 * _WIDTH, num_actions)
        self.value = nn.Linear(2 * _WIDTH, 1)
        nn.init.orthogonal_(self.actions.weight, 0.01)

    def read(self) -> Tensor:
        """What each job graph says, [M, width]."""
        return self._graphs.read(self.rounds)

    def forward(
        self, seen: Tensor, mask: Tensor, model: Tensor, reading: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Work, deadline, their ratio, servers taken and running jobs are all it sees beside the graph."""
        reading = self.read() if reading is None else reading
        work, limit, free, running = seen[:, -4], seen[:, -3], seen[:, -2], seen[:, -1]
        shown = torch.stack([work, limit, limit / (work + 1e-6), 1 - free, running], dim=1)
        whole = self.whole(torch.cat([self._sums[model], shown, mask.float()], dim=1))
        hidden = self.body(torch.cat([reading[model], whole], dim=1))
        return self.actions(hidden).masked_fill(~mask, -1e9), self.value(hidden).squeeze(-1)


class _Round(nn.Module):
    """Mean of messages along edges and of a node's own (section 2.8)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        half = _GRAPH_WIDTH
        self.node = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, half), nn.ReLU())
        self.edge = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, half), nn.ReLU())
        self.merge = nn.Sequential(nn.LayerNorm(2 * half), nn.Linear(2 * half, out), nn.ReLU())

    def forward(self, nodes: Tensor, edges: Tensor, sizes: Tensor) -> Tensor:
        """New features of the nodes."""
        sent = self.node(nodes)
        messages = torch.cat([sent[edges[:, 0]], self.edge(sizes)], dim=1)
        own = torch.cat([sent, torch.zeros_like(sent)], dim=1)
        total: Tensor = self.merge(own).index_add(0, edges[:, 1], self.merge(messages))
        count = torch.ones(len(nodes)).index_add(0, edges[:, 1], torch.ones(len(edges)))
        return total / count[:, None]


class _Graphs:
    """Several job graphs as one of many parts."""

    def __init__(self, graphs: tuple[JobGraph, ...]) -> None:
        parts = [_tensors(graph) for graph in graphs]
        sizes = [len(nodes) for nodes, _, _ in parts]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.nodes = torch.cat([nodes for nodes, _, _ in parts])
        self.edges = torch.cat([edges + int(at) for (_, edges, _), at in zip(parts, offsets, strict=False)])
        self.sizes = torch.cat([size for _, _, size in parts])
        self.part = torch.as_tensor(np.repeat(np.arange(len(graphs)), sizes))
        self.count = torch.as_tensor(sizes, dtype=torch.float32)

    def read(self, rounds: nn.ModuleList) -> Tensor:
        """The mean over the nodes of each graph after all rounds."""
        hidden = self.nodes
        for one in rounds:
            hidden = one(hidden, self.edges, self.sizes)
        total = torch.zeros(len(self.count), hidden.shape[1]).index_add(0, self.part, hidden)
        return total / self.count[:, None]


def _tensors(graph: JobGraph) -> tuple[Tensor, Tensor, Tensor]:
    """Node features, edges and edge features, each over the job's maximum."""
    compute, memory = graph.compute_ms, graph.memory_bytes
    depth = _depths(graph)
    nodes = np.stack(
        [
            compute / max(compute.max(), 1e-9),
            compute == compute.max(),
            memory / max(memory.max(), 1.0),
            memory == memory.max(),
            depth / max(depth.max(), 1),
        ],
        axis=1,
    )
    size = graph.activation_bytes[graph.edge[:, 0]]
    sizes = np.stack([size / max(size.max(), 1.0), size == size.max()], axis=1)
    return (
        torch.tensor(nodes, dtype=torch.float32),
        torch.tensor(graph.edge),
        torch.tensor(sizes, dtype=torch.float32),
    )


def _depths(graph: JobGraph) -> NDArray[np.int64]:
    """Ops on the shortest path from the first source, 0 where there is none."""
    after: dict[int, list[int]] = {}
    for u, v in graph.edge.tolist():
        after.setdefault(u, []).append(v)
    first = graph.kahn_order()[0]
    depth = np.zeros(len(graph.compute_ms), np.int64)
    depth[first] = 1
    queue = [first]
    for op in queue:
        for other in after.get(op, ()):
            if depth[other] == 0:
                depth[other] = depth[op] + 1
                queue.append(other)
    return depth


def _sums(graphs: tuple[JobGraph, ...]) -> Tensor:
    """Sizes, totals, means and medians of each graph, [M, 10], totals over the largest of the pool."""
    rows = []
    for graph in graphs:
        size = graph.activation_bytes[graph.edge[:, 0]]
        rows.append([len(graph.compute_ms), len(graph.edge), graph.memory_bytes.sum(), size.sum()])
        for values in (graph.compute_ms, graph.memory_bytes, size):
            most = max(float(values.max()), 1e-9)
            rows[-1] += [float(values.mean()) / most, float(np.median(values)) / most]
    table = np.array(rows, dtype=np.float32)
    table[:, :4] /= table[:, :4].max(axis=0)
    return torch.tensor(table)


def make_network(spec: Spec, graphs: tuple[JobGraph, ...] = ()) -> nn.Module:
    """A fresh network."""
    if spec.network not in NETWORKS:
        raise UnknownNameError("network", spec.network, NETWORKS)
    if spec.network == "mlp":
        return Mlp(spec.num_actions)
    if not graphs:
        raise InputError(f"the {spec.network} network reads job graphs; give --graphs FOLDER")
    return (GraphNet if spec.network == "graph" else PacmlNet)(spec.num_actions, graphs)


def save_network(network: nn.Module, spec: Spec, path: str | Path) -> None:
    """Weights with what they belong to, written whole or not at all."""
    from safetensors.torch import save

    # one entry: safetensors writes several in any order
    about = {"loadmaster": json.dumps({name: getattr(spec, name) for name in spec.__dataclass_fields__})}
    target = Path(path)
    partial = target.with_name(f".{target.name}.part")
    try:
        partial.write_bytes(save({k: v.contiguous() for k, v in network.state_dict().items()}, about))
        partial.replace(target)
    except OSError as trouble:
        raise FileError(f"cannot write {path}: {trouble}") from None


def _about(metadata: Any) -> dict[str, Any]:
    """What weights say of themselves; nothing where they are another program's."""
    try:
        found = json.loads((metadata or {}).get("loadmaster", "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def load_network(
    path: str | Path, *, world: str, num_actions: int | None = None, graphs: tuple[JobGraph, ...] = ()
) -> tuple[nn.Module, Spec]:
    """A trained network and what it is; weights that were trained for something else are refused."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise FormatError(f"{path} has {file.stat().st_size} bytes; weights have at most {_MAX_BYTES}")
        with safe_open(str(file), framework="pt") as found:
            about = _about(found.metadata())
            state = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118  # not a dict
    except OSError as trouble:
        raise FileError(f"cannot read {path}: {trouble}") from None
    except SafetensorError as trouble:
        raise FormatError(f"{path} is not a file of weights: {trouble}") from None
    spec = Spec(
        str(about.get("network", "")),
        str(about.get("world", "")),
        int(about.get("num_actions", 0) or 0),
        str(about.get("distribution", "")),
    )
    wanted = JOINT if num_actions is None and spec.num_actions == JOINT else num_actions or DEGREES_ONLY
    if spec.world != world or spec.num_actions != wanted:
        raise InputError(
            f"{path} was trained for {spec.world or 'nothing known'} with {spec.num_actions} actions,"
            f" and this is {world} with {wanted}; train weights for it: loadmaster advise train"
        )
    network = make_network(spec, graphs)
    try:
        network.load_state_dict(state)
    except RuntimeError as trouble:
        raise FormatError(f"{path}: {str(trouble).splitlines()[0]}") from None
    return network.eval(), spec

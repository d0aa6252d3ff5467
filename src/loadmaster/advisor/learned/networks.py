"""Two networks over the same observation: an MLP, and one that also reads the job graph.

The MLP sees a job as its completion times over its deadline. The graph network adds two rounds of message
passing over
the job graph (PAC-ML, section 2.8) to that. Both end in one value and one logit for each action, masked.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loadmaster.advisor.environments.batched import OBSERVATION_SIZE
from loadmaster.advisor.environments.profile import JobGraph
from loadmaster.core.errors import FileError, FormatError, InputError, UnknownNameError

NETWORKS = ("mlp", "graph")
_WIDTH = 128
_GRAPH_WIDTH = 16
_NODE = 5
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

    def forward(self, seen: Tensor, mask: Tensor, model: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Masked logits [B, A] and values [B]."""
        hidden = self.body(seen)
        return self.actions(hidden).masked_fill(~mask, -1e9), self.value(hidden).squeeze(-1)


class GraphNet(nn.Module):
    """The MLP with a reading of the job graph beside the observation."""

    def __init__(self, num_actions: int, graphs: tuple[JobGraph, ...]) -> None:
        super().__init__()
        self.head = Mlp(num_actions, extra=_GRAPH_WIDTH)
        self.rounds = nn.ModuleList([_Round(_NODE, 2 * _GRAPH_WIDTH), _Round(2 * _GRAPH_WIDTH, _GRAPH_WIDTH)])
        self._graphs = [_tensors(graph) for graph in graphs]

    def forward(self, seen: Tensor, mask: Tensor, model: Tensor) -> tuple[Tensor, Tensor]:
        """Each graph is read once for a batch."""
        read = []
        for nodes, edges, sizes in self._graphs:
            hidden = nodes
            for one in self.rounds:
                hidden = one(hidden, edges, sizes)
            read.append(hidden.mean(dim=0))
        logits, value = self.head(torch.cat([seen, torch.stack(read)[model]], dim=1), mask)
        return logits, value


class _Round(nn.Module):
    """Mean of messages along edges and of a node's own."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.node = nn.Linear(width, out // 2)
        self.edge = nn.Linear(2, out // 2)
        self.merge = nn.Linear(out, out)

    def forward(self, nodes: Tensor, edges: Tensor, sizes: Tensor) -> Tensor:
        sent = torch.relu(self.node(nodes))
        messages = torch.cat([sent[edges[:, 0]], torch.relu(self.edge(sizes))], dim=1)
        own = torch.cat([sent, torch.zeros_like(sent)], dim=1)
        total = torch.relu(self.merge(own)).index_add(0, edges[:, 1], torch.relu(self.merge(messages)))
        count = torch.ones(len(nodes)).index_add(0, edges[:, 1], torch.ones(len(edges)))
        return total / count[:, None]


def _tensors(graph: JobGraph) -> tuple[Tensor, Tensor, Tensor]:
    """Node features, edges and edge features, each over the job's maximum."""
    compute, memory = graph.compute_ms, graph.memory_bytes
    place = np.linspace(0, 1, len(compute))
    nodes = np.stack(
        [
            compute / max(compute.max(), 1e-9),
            compute == compute.max(),
            memory / max(memory.max(), 1.0),
            memory == memory.max(),
            place,
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


def make_network(spec: Spec, graphs: tuple[JobGraph, ...] = ()) -> nn.Module:
    """A fresh network."""
    if spec.network not in NETWORKS:
        raise UnknownNameError("network", spec.network, NETWORKS)
    if spec.network == "mlp":
        return Mlp(spec.num_actions)
    if not graphs:
        raise InputError("the graph network reads job graphs; give --graphs FOLDER")
    return GraphNet(spec.num_actions, graphs)


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
    path: str | Path, *, world: str, num_actions: int, graphs: tuple[JobGraph, ...] = ()
) -> nn.Module:
    """A trained network; weights that were trained for something else are refused."""
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
    if spec.world != world or spec.num_actions != num_actions:
        raise InputError(
            f"{path} was trained for {spec.world or 'nothing known'} with {spec.num_actions} actions,"
            f" and this is {world} with {num_actions}; train weights for it: loadmaster advise train"
        )
    network = make_network(spec, graphs)
    try:
        network.load_state_dict(state)
    except RuntimeError as trouble:
        raise FormatError(f"{path}: {str(trouble).splitlines()[0]}") from None
    return network.eval()

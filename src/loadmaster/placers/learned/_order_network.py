"""The network of `learned_order`: messages along and against the edges, a key and scores a node.

Separate weights for predecessors and successors, `rounds` rounds with residuals and layer norm; messages are
gated by what an edge costs. A device is embedded by its own features, and a node scores it bilinearly, so
any number of devices works, and renaming them renames the scores. O(rounds (N H^2 + E H) + N D H).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loadmaster.placers.learned._scene import DEVICE, EDGE, HEAD, NODE, PAIR, STEP, TAIL, TAIL_C, Scene

_LEARNED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class NetworkSize:
    """Width of the hidden features, and rounds of messages."""

    width: int = 48
    rounds: int = 5


class OrderNetwork(nn.Module):
    """Keys [N], the lower the sooner, and scores [N, D], the higher the better."""

    def __init__(self, size: NetworkSize) -> None:
        super().__init__()
        width = size.width
        self.size = size
        self.enter = nn.Sequential(nn.Linear(NODE, width), nn.ReLU(), nn.Linear(width, width))
        self.meet = nn.Sequential(nn.Linear(DEVICE, width), nn.ReLU(), nn.Linear(width, width))
        self.gate = nn.Linear(EDGE, 2 * width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(size.rounds))
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(size.rounds))
        self.after = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(size.rounds))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(size.rounds))
        self.key = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.query = nn.Linear(width, width)
        self.pair = nn.Sequential(nn.Linear(PAIR, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, seen: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of one scene."""
        node, source, target = seen["node"], seen["source"], seen["target"]
        device = self.meet(seen["device"])  # [D, H]
        h = self.enter(node) + device.mean(dim=0, keepdim=True)
        forth, back = torch.sigmoid(self.gate(seen["edge"])).chunk(2, dim=1)
        for own, before, after, norm in zip(self.own, self.before, self.after, self.norm, strict=True):
            from_before = (
                torch.zeros_like(h).index_add_(0, target, before(h)[source] * forth) * seen["per_in"]
            )
            from_after = torch.zeros_like(h).index_add_(0, source, after(h)[target] * back) * seen["per_out"]
            h = norm(h + torch.relu(own(h) + from_before + from_after))
        # What is learned is added to a known order: HEFT's rank for a step, else both longest ways.
        known = torch.where(node[:, STEP] >= 1.0, -2.0 * node[:, TAIL_C], node[:, HEAD] - node[:, TAIL])
        key = known + _LEARNED_SHARE * self.key(h)[:, 0]
        score = self.query(h) @ device.T / device.shape[1] ** 0.5 + self.pair(seen["pair"])[:, :, 0]
        return key, score.masked_fill(~seen["allowed"], -1e9)


def tensors_of(scene: Scene) -> dict[str, Tensor]:
    """A scene as the network takes it."""
    num = scene.num_nodes
    per_in = 1.0 / np.sqrt(np.maximum(np.bincount(scene.target, minlength=num), 1))
    per_out = 1.0 / np.sqrt(np.maximum(np.bincount(scene.source, minlength=num), 1))
    columns: dict[str, Any] = {
        "node": scene.node,
        "device": scene.device,
        "pair": scene.pair,
        "edge": scene.edge,
        "per_in": per_in[:, None].astype(np.float32),
        "per_out": per_out[:, None].astype(np.float32),
    }
    found = {name: torch.from_numpy(np.array(column)) for name, column in columns.items()}
    found["allowed"] = torch.from_numpy(np.array(scene.allowed))
    for name, column in (("source", scene.source), ("target", scene.target)):
        found[name] = torch.from_numpy(column.astype(np.int64))
    return found


def make_network(size: NetworkSize, seed: int) -> OrderNetwork:
    """An untrained network; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = OrderNetwork(size)
    return network

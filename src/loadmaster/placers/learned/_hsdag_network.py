"""HSDAG's networks: an encoder, a scorer of edges that parses the graph into groups, a policy over groups.

Steps 3 and 4 of Duan et al. (`hsdag.py`). Grouping is a deterministic arg-max: only the choice of devices has
a likelihood, and the scorer learns through the factors it puts into the features of groups.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loadmaster.core.arrays import Ints


class HsdagNetwork(nn.Module):
    """Features of merged nodes -> groups, and a logit for each group and device."""

    def __init__(self, num_features: int, num_devices: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.enter = nn.ModuleList([nn.Linear(num_features, width), nn.Linear(width, width)])
        self.score_gcn = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.group_gcn = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.edge = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, 1)])
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.choose = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, num_devices)])
        self.leave = nn.Linear(width, num_features)

    def forward(
        self, features: Tensor, source: Tensor, target: Tensor, *, passes: int, least_groups: int, drop: Any
    ) -> tuple[Tensor, Ints, Tensor]:
        """Logits [G, D], the group of every node, and what is added to its features."""
        h = torch.relu(self.enter[1](drop(torch.relu(self.enter[0](features)))))
        label = np.arange(len(features), dtype=np.int32)
        for _ in range(passes):
            if len(source) == 0:
                break
            z = h
            for layer, norm in zip(self.score_gcn, self.norms[:2], strict=True):
                z = norm(z + drop(torch.relu(layer(_spread(z, source, target)))))
            both = z[source] * z[target]
            score = torch.sigmoid(self.edge[1](torch.relu(self.edge[0](both))))[:, 0]
            group, inner = keep_best_edges(len(h), source.numpy(), target.numpy(), score.detach().numpy())
            if int(group.max()) + 1 < least_groups:
                break
            h = self._pool(h, source, target, score, group, inner, drop)
            label = group[label].astype(np.int32)
            source, target = _pool_edges(group, source.numpy(), target.numpy())
        logits = self.choose[1](drop(torch.relu(self.choose[0](h))))
        return logits, label, self.leave(h)

    def _pool(
        self,
        h: Tensor,
        source: Tensor,
        target: Tensor,
        score: Tensor,
        group: Ints,
        inner: "np.typing.NDArray[np.bool_]",
        drop: Any,
    ) -> Tensor:
        """Features of groups: the sum of their members', times the mean inner score, times inner edges."""
        num, of = int(group.max()) + 1, torch.from_numpy(group.astype(np.int64))
        wide = self.norms[2](h + drop(torch.relu(self.group_gcn(_spread(h, source, target)))))
        total = torch.zeros(num, h.shape[1]).index_add_(0, of, torch.relu(self.before(wide)))
        kept = torch.from_numpy(np.flatnonzero(inner))
        of_edge = of[source[kept]]
        count = torch.zeros(num).index_add_(0, of_edge, torch.ones(len(kept)))
        mean = torch.zeros(num).index_add_(0, of_edge, score[kept]) / count.clamp(min=1.0)
        factor = torch.where(count > 0, mean * count, torch.ones(num))  # a node alone keeps its features
        return self.norms[3](self.after(total) * factor[:, None])


def _spread(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """One round over the symmetric adjacency with loops, normalised by degrees."""
    one, other = torch.cat([source, target]), torch.cat([target, source])
    degree = torch.ones(len(h)).index_add_(0, one, torch.ones(len(one)))
    scale = degree.rsqrt()[:, None]
    return torch.zeros_like(h).index_add_(0, other, (h * scale)[one]) * scale + h / degree[:, None]


def keep_best_edges(
    num: int, source: Any, target: Any, score: Any
) -> tuple[Ints, "np.typing.NDArray[np.bool_]"]:
    """[num] group of each node when every node keeps its best-scored edge; [E] whether an edge is inside."""
    best = np.full(num, -1, dtype=np.int64)
    order = np.argsort(score, kind="stable")  # the best is written last
    for end in (source, target):
        for e in order.tolist():
            u = int(end[e])
            if best[u] < 0 or score[e] >= score[best[u]]:
                best[u] = e
    parent = np.arange(num)

    def find(u: int) -> int:
        while parent[u] != u:
            parent[u] = parent[parent[u]]
            u = int(parent[u])
        return u

    for e in best[best >= 0].tolist():
        parent[find(int(source[e]))] = find(int(target[e]))
    root = np.array([find(u) for u in range(num)])
    _, group = np.unique(root, return_inverse=True)
    group = group.reshape(-1)
    return group.astype(np.int32), np.asarray(group[source] == group[target])


def _pool_edges(group: Ints, source: Any, target: Any) -> tuple[Tensor, Tensor]:
    num = int(group.max()) + 1
    one, other = group[source].astype(np.int64), group[target].astype(np.int64)
    pair = np.unique(np.minimum(one, other) * num + np.maximum(one, other))
    pair = pair[pair // num != pair % num]
    return torch.from_numpy(pair // num), torch.from_numpy(pair % num)

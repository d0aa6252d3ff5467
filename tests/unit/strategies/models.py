"""Small models whose steps are captured once for the tests of this folder."""

from functools import cache
from typing import Any

import torch
from torch import nn

from loadmaster.core.graph import Graph
from loadmaster.graph.capture import capture


class Mixed(nn.Module):
    """Convolution, batch norm, attention, layer norm, dropout and a loss: most rules at once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.query, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale, self.drop, self.head = nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        parts = self.query(rows).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        rows = self.scale(rows + self.out(seen.transpose(1, 2).flatten(2)))
        return nn.functional.cross_entropy(self.head(self.drop(rows.mean(1))), labels)


class Wide(nn.Module):
    """Three linear layers; the middle one is wide, so that its gradient is dear to send."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), labels)


class Along(nn.Module):
    """One op between two linear layers."""

    def __init__(self, op: Any, width: int = 16) -> None:
        super().__init__()
        self.op, self.first, self.last = op, nn.Linear(width, width), nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.op(self.first(x))).square().mean()


def capture_step(model: nn.Module, *inputs: torch.Tensor, optimizer: Any = torch.optim.Adam) -> Graph:
    """The training step of a model."""
    return capture(model, inputs, optimizer=optimizer, path="joint")


@cache
def mixed_step(batch: int = 6) -> Graph:
    return capture_step(Mixed(), torch.zeros(batch, 3, 8, 8), torch.zeros(batch, dtype=torch.long))


@cache
def wide_step(batch: int = 6, width: int = 64) -> Graph:
    return capture_step(Wide(width), torch.zeros(batch, 8), torch.zeros(batch, dtype=torch.long))


def along_step(op: Any, batch: int = 16) -> Graph:
    model = Along(op)
    model(torch.zeros(batch, 16))  # sizes the last layer
    return capture_step(model, torch.zeros(batch, 16))

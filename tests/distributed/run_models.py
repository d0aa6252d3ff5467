"""Models and functions that worker processes import."""

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """A small net with dropout and batch norm."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.relu(layer(x)))
        return self.head(self.norm(x))


class Slow(Net):
    """Long enough steps to be hit in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            for layer in self.layers:
                x = x + 0.01 * torch.relu(layer(x))
        return self.head(self.norm(x))


def compare(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(out, target)


def square(out: Any) -> torch.Tensor:
    """Of outputs alone."""
    return (out**2).mean()


def sgd(weights: list[Any]) -> torch.optim.Optimizer:
    """A large step."""
    return torch.optim.SGD(weights, lr=0.1)


def adamw(weights: list[Any]) -> torch.optim.Optimizer:
    """With two states for each weight."""
    return torch.optim.AdamW(weights, lr=0.01)


def halve(optimizer: Any) -> Any:
    """A schedule."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def fail_at_seven(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that raises on some data."""
    if int(target.max()) == 2:
        raise ValueError("the target has a seven")
    return compare(out, target)


def build(batch: int = 4) -> dict[str, Any]:
    """For the command line."""
    return {"model": Net(), "args": (torch.randn(batch, 16),), "loss": square, "optimizer": adamw}

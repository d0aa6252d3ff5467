"""Models and functions that worker processes import."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


class Tangled(nn.Module):
    """Cannot be exported: how often a layer runs depends on values, and its forward does much by itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)) for _ in range(4)
        )
        self.pair = Pair(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x += 0.5  # into what a module gave
        x = x * self.scale
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.1, self.training)
            if x.abs().mean().item() > 0.9:
                x = x * 0.8
        some = self.pair(x)
        x = some["left"] * some["right"][0]
        x = torch.nn.functional.linear(x, self.embed.weight)  # tied
        return self.head(x * self.scale)


class Pair(nn.Module):
    """Gives a dict of a tensor and a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"left": torch.tanh(self.left(x)), "right": [torch.sigmoid(self.right(x)), None, 3]}


class Counting(Tangled):
    """Counts its calls in a buffer, and looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return super().forward(x * (1.0 if self.count.item() < 5 else 0.5))


class HalfFrozen(nn.Module):
    """Its first layers are not trained, and one batch norm keeps what it knows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.known = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width).requires_grad_(False).eval()
        self.learns = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.learns(self.norm(self.known(x)))))


class Averaging(nn.Module):
    """Reads a moving average that its forward writes, in the middle and at the end."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.register_buffer("middle", torch.ones(width))
        self.register_buffer("end", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(self.first(x)))
        with torch.no_grad():
            self.middle.mul_(0.5).add_(x.mean(0))
        x = self.head(x * self.middle)
        with torch.no_grad():
            self.end.mul_(0.5).add_(x.mean(0))
        return x * self.end


class Checkpointed(nn.Module):
    """Computes each of its blocks again by itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Rows(nn.Module):
    """Every row by itself: linear layers, a norm of layers, weights without rows, one weight read twice."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.where = nn.Parameter(torch.randn(5, width) * 0.1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.where * 2.0  # has no rows, and crosses to other groups
        x = x[:, None, :] + shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = (x + shift).flatten(0, 1)  # five rows for each row of the batch
        return self.head(self.norm(x)).reshape(-1, 5, 3)


class Pictures(nn.Module):
    """Convolutions without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(x.flatten(1))


def build_rows(batch: int = 4) -> dict[str, Any]:
    """For the command line."""
    return {"model": Rows(), "args": (torch.randn(batch, 16),), "loss": square, "optimizer": adamw}

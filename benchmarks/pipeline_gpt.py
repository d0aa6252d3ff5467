"""A GPT of about 350 million parameters for pipelines: 24 layers of width 1024, vocabulary 24,000.

Also a tiny one of the same shape, with which a benchmark can be tried on any machine.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.gpt import Embed, Layer, Linear


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT and the rows of a micro-batch."""

    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    rows: int
    builder: str  # the function below that builds it in a worker


FULL = Size(24, 1024, 16, 24000, 512, 4, "build_full")
TINY = Size(6, 64, 4, 500, 32, 2, "build_tiny")


class Gpt(nn.Module):
    """Tokens and labels to a loss."""

    def __init__(self, size: Size = FULL, layers: int | None = None) -> None:
        super().__init__()
        self.embed = Embed(size.vocab, size.length, size.width)
        number = size.layers if layers is None else layers
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(number))
        self.norm, self.head = nn.LayerNorm(size.width), Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Small steps."""
    return torch.optim.SGD(weights, lr=1e-3)


def inputs(rows: int, size: Size = FULL) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and labels."""
    chance = torch.Generator().manual_seed(0)
    made = torch.randint(0, size.vocab, (2, rows, size.length), generator=chance)
    return made[0], made[1]


def build_full() -> dict[str, Any]:
    """The model and a micro-batch, for the workers."""
    return {"model": Gpt(FULL), "args": inputs(FULL.rows, FULL), "optimizer": "sgd"}


def build_tiny() -> dict[str, Any]:
    """The tiny one."""
    return {"model": Gpt(TINY), "args": inputs(TINY.rows, TINY), "optimizer": "sgd"}

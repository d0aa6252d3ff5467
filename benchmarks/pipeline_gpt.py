"""A GPT of about 350 million parameters for pipelines: 24 layers of width 1024, vocabulary 24,000."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.gpt import Embed, Layer, Linear

LAYERS, WIDTH, HEADS, VOCAB, LENGTH = 24, 1024, 16, 24000, 512


class Gpt(nn.Module):
    """Tokens and labels to a loss."""

    def __init__(
        self, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS, vocab: int = VOCAB
    ) -> None:
        super().__init__()
        self.embed = Embed(vocab, LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Small steps."""
    return torch.optim.SGD(weights, lr=1e-3)


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and labels."""
    chance = torch.Generator().manual_seed(0)
    made = torch.randint(0, VOCAB, (2, rows, LENGTH), generator=chance)
    return made[0], made[1]

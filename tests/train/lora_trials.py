"""Small trials with a frozen backbone and trained adapters."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from loadmaster.shards.spec.trial import Trial

WIDTH, NUM_LAYERS = 16, 6


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank correction and dropout."""

    def __init__(self, width: int, *, frozen_seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(frozen_seed)
        self.weight = nn.Parameter(
            (torch.randn(width, width, generator=made) / width**0.5).to(dtype), requires_grad=False
        )
        self.down = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, 2) / 10)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.linear(self.drop(x), self.down), self.up)
        return x + torch.tanh(F.linear(x, self.weight.to(x.dtype)) + low)


class Frozen(nn.Module):
    """A frozen embedding or head."""

    def __init__(self, rows: int, *, embed: bool) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(rows)
        self.weight = nn.Parameter(torch.randn(rows, WIDTH, generator=made) / 4, requires_grad=False)
        self.embed = embed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x, self.weight) if self.embed else F.linear(x, self.weight)


def build(*, backbone: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    middle = [Adapted(WIDTH, frozen_seed=100 * backbone + n, dtype=dtype) for n in range(NUM_LAYERS)]
    return nn.Sequential(Frozen(11, embed=True), *middle, Frozen(11, embed=False))


def tokens(seed: int, num_batches: int = 4) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(11, (2, 5), generator=made), torch.randint(11, (2, 5), generator=made))
        for _ in range(num_batches)
    ]


def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.float().view(-1, 11), targets.view(-1))


def lora(name: str, *, lr: float = 1e-2, seed: int = 0, backbone: int = 0, **more: Any) -> Trial:
    given: dict[str, Any] = {
        "build": lambda: build(backbone=backbone),
        "loss": loss,
        "data": lambda: tokens(seed),
        "optim": lambda ps: torch.optim.AdamW(ps, lr=lr),
        "epochs": 2,
        "seed": seed,
    }
    return Trial(name=name, **(given | more))

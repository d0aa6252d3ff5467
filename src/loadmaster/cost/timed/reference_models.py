"""Reference models: small models of usual modules, whose steps are timed beside their ops. [torch]"""

import torch
from torch import nn

WIDTH = 16
_HEADS, _ROWS = 2, (2, 8)


class _Block(nn.Module):
    """A layer as people write them: modules, views, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention by hand, then a product."""
        batch, rows, width = x.shape
        parts = self.mix(self.norm(x)).view(batch, rows, _HEADS, 3, width // _HEADS)
        query, key, value = parts.permute(3, 0, 2, 1, 4).unbind(0)
        scores = torch.softmax(query @ key.transpose(-2, -1), dim=-1)
        seen = (scores @ value).transpose(1, 2).reshape(batch, rows, width)
        made: torch.Tensor = x + self.act(self.out(seen))
        return made


def make_model(width: int, depth: int) -> nn.Module:
    """A stack of layers."""
    return nn.Sequential(*(_Block(width) for _ in range(depth)))


def small_input(device: torch.device | str | None = None) -> torch.Tensor:
    """A batch for a model of WIDTH."""
    return torch.zeros(*_ROWS, WIDTH, device=device)

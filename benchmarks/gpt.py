"""A GPT of our own for the training figures: 48 layers of width 1600 and a head are 1.64 B parameters.

Modules fill themselves, each matrix from one short random vector, a place further on for every row (building
must not take longer than training); so a trial is built without memory and filled where it is held. The
residual stream is bf16 where autocast is, and the loss runs over positions in slices, so that all logits
never stand at once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

_SLICES = 16


def _fill(weight: torch.Tensor) -> None:
    rows, columns = weight.shape
    source = torch.randn(rows + columns, device=weight.device) * 0.02
    with torch.no_grad():
        weight.copy_(source.as_strided((rows, columns), (1, 1)))


class Linear(nn.Linear):
    """Quickly filled."""

    def reset_parameters(self) -> None:
        """Matrix from a vector, bias zero."""
        _fill(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Quickly filled."""

    def reset_parameters(self) -> None:
        """Matrix from a vector."""
        _fill(self.weight)


class Layer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Embed(nn.Module):
    """Tokens and positions."""

    def __init__(self, vocab: int, length: int, width: int) -> None:
        super().__init__()
        self.token, self.position = Embedding(vocab, width), Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return x.bfloat16() if torch.is_autocast_enabled(tokens.device.type) else x


class Head(nn.Module):
    """The last norm; the output layer goes on to the loss, which applies it slice by slice."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Module]:
        """Normed stream and output layer."""
        return self.norm(x), self.out


def gpt(
    layers: int = 48, width: int = 1600, heads: int = 25, vocab: int = 50257, length: int = 1024
) -> nn.Module:
    """The model as a chain."""
    return nn.Sequential(
        Embed(vocab, length, width), *(Layer(width, heads) for _ in range(layers)), Head(vocab, width)
    )


class _SlicedLoss(torch.autograd.Function):
    """Sum of cross-entropies whose logits never stand whole: a slice's gradient is taken while it is there.

    Rows of logits are padded to a multiple of 64: products into rows of odd length are several times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum, and the gradients for later."""
        vocab = weight.shape[0]
        padded = -(-vocab // 64) * 64
        slope_x, slope_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = x.new_zeros((), dtype=torch.float32)
        rows = -(-x.shape[0] // _SLICES)
        for first in range(0, x.shape[0], rows):
            part, wanted = x[first : first + rows], targets[first : first + rows, None]
            logits = x.new_empty(part.shape[0], padded)[:, :vocab]
            torch.mm(part, weight.t(), out=logits)
            likely = torch.log_softmax(logits, -1, dtype=torch.float32)
            total -= likely.gather(1, wanted).sum()
            likely.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
            logits.copy_(likely)
            del likely  # before the next one is made
            torch.mm(logits, weight, out=slope_x[first : first + rows])
            slope_weight.addmm_(logits.t(), part)
            del logits
        ctx.save_for_backward(slope_x, slope_weight)
        return total

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """What was taken on the way, times what comes from above; in place, for nobody else reads it."""
        slope_x, slope_weight = ctx.saved_tensors
        return slope_x.mul_(slope.to(slope_x.dtype)), slope_weight.mul_(slope.to(slope_weight.dtype)), None


def gpt_loss(out: Any, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, a slice of positions at a time."""
    stream, project = out
    dtype = torch.get_autocast_dtype(stream.device.type) if _autocast(stream) else stream.dtype
    with torch.autocast(stream.device.type, enabled=False):
        flat, weight = stream.flatten(0, 1).to(dtype), project.weight.to(dtype)
        return _SlicedLoss.apply(flat, weight, targets.flatten()) / targets.numel()


def _autocast(stream: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(stream.device.type)


def tokens(
    num_batches: int, *, batch: int = 8, length: int = 1024, vocab: int = 50257
) -> Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Random token batches, the same each epoch."""

    def make() -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        shape = (batch, length)
        return [
            tuple(torch.randint(vocab, shape, generator=generator) for _ in range(2))  # type: ignore[misc]
            for _ in range(num_batches)
        ]

    return make

"""A model whose rows take their time in both passes, asleep: two cores are enough for more devices."""

import time
from typing import Any

import torch
from torch import nn

NAP_S = 0.02  # of a row in a layer, either way

if not hasattr(torch.ops.napping, "silu"):  # once in a process, however often this file is read

    @torch.library.custom_op("napping::silu", mutates_args=())
    def nap(x: torch.Tensor) -> torch.Tensor:
        """Named after an op that works within rows, as this does."""
        time.sleep(NAP_S * len(x))
        return x.clone()

    @nap.register_fake
    def _shape(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def _backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.napping.silu(grad)

    nap.register_autograd(_backward)


class Layer(nn.Module):
    """One number, and a nap for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.napping.silu(x * self.scale)


def square(out: torch.Tensor) -> torch.Tensor:
    """Of outputs alone."""
    return (out**2).mean()


def build(batch: int = 4) -> dict[str, Any]:
    """For the command line."""
    model = nn.Sequential(*(Layer() for _ in range(4)))
    return {"model": model, "args": (torch.randn(batch, 64),), "loss": square, "optimizer": torch.optim.SGD}

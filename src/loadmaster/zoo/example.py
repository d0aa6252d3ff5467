"""Example: a model with inputs to run it on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Example:
    """What `capture` needs to know of a model."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None


def random_tokens(batch: int, seq: int, vocab: int, *, device: str = "meta", seed: int = 0) -> torch.Tensor:
    """Random tokens; the same for the same seed."""
    if device == "meta":
        return torch.empty(batch, seq, dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, seq), generator=generator).to(device)

"""Whole forward: where all ops have one share of the rows, every rank runs the user's own forward on its own.

Nothing is exported, so any model can be run like this.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from loadmaster.modules.randomness import derive_seed
from loadmaster.runtime.distributed.strategy.clock import Clock
from loadmaster.runtime.distributed.strategy.factors import FactorMode, Factors
from loadmaster.runtime.distributed.strategy.layout import RowShare


@dataclass(slots=True)
class WholeForward:
    """One rank's part of a step: its rows through the whole model."""

    model: nn.Module
    share: RowShare
    rank: int
    where: torch.device
    clock: Clock
    seed: int

    final_share: int = 0

    @property
    def final(self) -> RowShare:
        """Who makes the loss."""
        return self.share

    def run(
        self,
        parts: Callable[[int], Any],
        finish: Callable[[Any], Any],
        factors: Factors | None,
        *,
        grad: bool,
        step: int,
    ) -> Any:
        """Forward, and backward where gradients are asked for; gives what `finish` makes of the output."""
        args, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(self.where), parts(0))
        begin = 0 if self.share.whole else self.share.bounds(self.rank)[0]
        torch.manual_seed(derive_seed(self.seed, step=step, micro_batch=begin, block=0))
        watched = factors is not None and bool(factors.share)
        with factors.watching() if factors is not None and watched else nullcontext():
            with self.clock.span("F", 0), FactorMode(factors) if factors and watched else nullcontext():
                value = finish(self.model(*args, **kwargs))
            if grad:
                with self.clock.span("B", 0):
                    value.backward()
        return value

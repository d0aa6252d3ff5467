"""Synthetic batches: inputs of the example's shapes, the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from loadmaster.graph.export import find_size
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions


@dataclass(slots=True)
class SyntheticBatches:
    """One batch after the other: whole numbers are the example's own, shuffled."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    micro_batches: int
    seed: int
    loss: Any = None
    optimizer: Any = None
    autocast: torch.dtype | None = None
    _chance: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Random numbers of its own."""
        self._chance = torch.Generator().manual_seed(self.seed)

    @classmethod
    def of(cls, parts: Mapping[str, Any], micro_batches: int, seed: int) -> "SyntheticBatches":
        """Of a model's parts (`graph.models`), whose example is one micro-batch."""
        args = parts.get("args", ())
        return cls(
            (args,) if isinstance(args, torch.Tensor) else tuple(args),
            dict(parts.get("kwargs") or {}),
            micro_batches,
            seed,
            parts.get("loss"),
            parts.get("optimizer") or "adamw",
            parts.get("autocast"),
        )

    def complete(self, options: TrainOptions) -> TrainOptions:
        """The options with the model's own loss, optimizer and autocast where none was asked for."""
        return replace(
            options,
            loss=options.loss or self.loss,
            optimizer=options.optimizer or self.optimizer,
            autocast=options.autocast or self.autocast,
        )

    def skip(self, steps: int) -> None:
        """Go on as after so many steps."""
        self._chance.manual_seed(self.seed)
        for _ in range(steps):
            self.next()

    def next(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A whole batch: as many rows as all micro-batches have."""
        rows = find_size((self.args, self.kwargs), "batch")

        def make(tensor: torch.Tensor) -> torch.Tensor:
            copies = self.micro_batches if tensor.dim() and tensor.shape[0] == rows else 1
            many = torch.cat([tensor.detach()] * copies) if copies > 1 else tensor.detach().clone()
            if many.is_floating_point():
                return torch.randn(many.shape, generator=self._chance, dtype=torch.float32).to(many.dtype)
            order = torch.randperm(many.numel(), generator=self._chance)
            return many.flatten()[order].reshape(many.shape)

        made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, make, (self.args, dict(self.kwargs))
        )
        return made

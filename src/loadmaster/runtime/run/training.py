"""Training: plain steps of a placed model on synthetic data, timed as a whole or op by op."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from loadmaster.core.errors import InputError
from loadmaster.graph.export import micro_step_suffix
from loadmaster.graph.models import CaptureOptions
from loadmaster.modules.loss import compute_loss
from loadmaster.modules.named_optimizers import make_optimizer
from loadmaster.runtime.graph_engine.op_clock import LOSS, Clock, UpdateTimer


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What is trained on what."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any
    autocast: torch.dtype | None = None
    accumulation: int = 1
    grad_scaler: bool = False


def make_task(parts: Mapping[str, Any], asked: CaptureOptions) -> TrainingTask:
    """The task of a model's parts (`graph.models`), as it was captured."""
    options, args = asked.options, parts.get("args", ())
    return TrainingTask(
        args=(args,) if isinstance(args, torch.Tensor) else tuple(args),
        kwargs=dict(parts.get("kwargs") or {}),
        loss=parts.get("loss"),
        optimizer=parts.get("optimizer") or "adamw",
        autocast=options.get("autocast", parts.get("autocast")),
        accumulation=int(options.get("accumulation") or parts.get("accumulation") or 1),
        grad_scaler=bool(options.get("grad_scaler") or parts.get("grad_scaler")),
    )


@dataclass(slots=True)
class Training:
    """Steps one after the other."""

    model: nn.Module  # placed or not
    task: TrainingTask
    seed: int = 0
    loaded: torch.device = torch.device("cpu")  # noqa: RUF009  # where a batch lies when a step begins
    optimizer: Any = field(init=False)
    _scaler: Any = field(init=False)
    _chance: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """An optimizer as the plan was made for."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        if not weights:
            raise InputError("no weight of the model is trained, so there is no step to run")
        self.optimizer = make_optimizer(self.task.optimizer, weights)
        kinds = {weight.device.type for weight in weights}
        self._scaler = torch.amp.GradScaler(max(kinds), enabled=self.task.grad_scaler)
        self._chance = torch.Generator().manual_seed(self.seed)

    def step(self, clock: Clock | None = None) -> tuple[float, float]:
        """One step; gives its seconds and its loss."""
        batches = [self._make_batch() for _ in range(self.task.accumulation)]
        self._synchronize()
        began, losses = time.perf_counter(), []
        for number, (args, kwargs) in enumerate(batches, 1):
            if clock is not None:
                clock.suffix = micro_step_suffix(number)
            losses.append(self._pass(args, kwargs, clock))
        self._update(clock)
        self.optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        seconds = time.perf_counter() - began
        return seconds, float(sum(loss.item() for loss in losses))

    def _pass(self, args: Any, kwargs: Any, clock: Clock | None) -> torch.Tensor:
        with self._enter_autocast():
            out = self.model(*args, **kwargs)
            with nullcontext() if clock is None else clock.loss():
                loss = compute_loss(out, self.task.loss) / (self.task.accumulation if self._splits else 1)
        scaled = self._scaler.scale(loss) if self.task.grad_scaler else loss
        if clock is not None:
            clock.watch_backward(scaled, -1, LOSS)
        scaled.backward()
        return loss.detach()

    @property
    def _splits(self) -> bool:
        return self.task.accumulation > 1

    def _update(self, clock: Clock | None) -> None:
        if clock is None:
            self._scaler.step(self.optimizer)
        else:
            updates = UpdateTimer(clock, self.model, self.optimizer)
            with updates:
                self._scaler.step(self.optimizer)
            updates.close()
        self._scaler.update()

    def _enter_autocast(self) -> ExitStack:
        stack = ExitStack()
        if self.task.autocast is not None:
            for kind in sorted({weight.device.type for weight in self.model.parameters()}):
                stack.enter_context(torch.autocast(kind, dtype=self.task.autocast))
        return stack

    def _make_batch(self) -> Any:
        """Inputs of the example's shapes: whole numbers are the example's own, shuffled."""
        return tree_map_only(torch.Tensor, self._random_like, (self.task.args, dict(self.task.kwargs)))

    def _random_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            made = torch.randn(tensor.shape, generator=self._chance).to(self.loaded, tensor.dtype)
            return made.requires_grad_(tensor.requires_grad)
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.loaded)
        order = torch.randperm(tensor.numel(), generator=self._chance)
        return tensor.detach().cpu().flatten()[order].reshape(tensor.shape).to(self.loaded)

    def _synchronize(self) -> None:
        for where in {weight.device for weight in self.model.parameters() if weight.is_cuda}:
            torch.cuda.synchronize(where)

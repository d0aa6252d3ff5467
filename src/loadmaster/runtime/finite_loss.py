"""Reports a loss that is not finite at the step where it appears.

Two places are looked at: the loss that the model itself gives, and the gradient of its smallest weight, which
a loss of your own loop reaches, too. On the CPU both are looked at at once. A GPU is not waited for: its
answer is read when the next step begins, and names the step it belongs to. Under float16 autocast gradients
may overflow by design, so there only the loss is looked at.
"""

import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import LossError

RAISE, WARN = "raise", "warn"
HOWS = (RAISE, WARN)


@dataclass(slots=True, weakref_slot=True)
class FiniteCheck:
    """Looks at the losses of one placed model."""

    how: str
    step: int = 0  # forward passes in training
    _reported: int = -1
    _overflows: bool = False
    _waiting: list[tuple[int, str, torch.Tensor, Any]] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        """Look at the smallest weight's gradient, as long as this lives."""
        trained = [
            (weight.numel(), name) for name, weight in model.named_parameters() if weight.requires_grad
        ]
        if not trained:
            return
        name = min(trained)[1]
        this = weakref.ref(self)

        def look(weight: Any) -> None:
            found = this()
            if found is not None and not found._overflows:
                found._look(weight.grad, f"the gradient of {name}")

        handle = model.get_parameter(name).register_post_accumulate_grad_hook(look)
        weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """A forward pass in training begins: what a GPU has answered meanwhile is read."""
        self.step += 1
        waiting, self._waiting = self._waiting, []
        for step, what, flag, done in waiting:
            if not done.query():
                self._waiting.append((step, what, flag, done))
            elif bool(flag):
                self._report(step, what)

    def loss(self, out: Any) -> None:
        """Look at the loss among what the model gave, where it has one."""
        kinds = ("cpu", "cuda")
        self._overflows = any(
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
            for kind in kinds
        )
        own = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", out)
        if isinstance(own, torch.Tensor) and own.numel() == 1 and own.is_floating_point():
            self._look(own, "the loss")

    def _look(self, tensor: torch.Tensor, what: str) -> None:
        flag = ~torch.isfinite(tensor.detach()).all()
        if not flag.is_cuda:
            if bool(flag):
                self._report(self.step, what)
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(flag, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(flag.device))
        self._waiting.append((self.step, what, answer, done))

    def _report(self, step: int, what: str) -> None:
        if self._reported == step:
            return
        self._reported = step
        text = (
            f"{what} is not a finite number at step {step} of the placed model; a smaller learning rate,"
            " clipped gradients or other data may help (place(..., on_nan='raise') stops there)"
        )
        if self.how == RAISE:
            raise LossError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)

"""Verify: loss and gradients of a placed model against the unplaced one, and where they first part.

One batch, one seed: the model itself, then the placed model, watched op by op (module by module under the
hook engine). Buffers and random numbers are as before when it ends, and no gradient of the user's is touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loadmaster.core.errors import InputError
from loadmaster.modules.loss import compute_loss
from loadmaster.modules.rounding import is_close, max_difference
from loadmaster.runtime.hook_engine.engine import HookEngine
from loadmaster.runtime.verify.compare_modules import ModuleComparison
from loadmaster.runtime.verify.compare_ops import OpComparison
from loadmaster.runtime.verify.unplaced import Loss, Runs, run_unplaced, seed_and_restore

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of comparing."""

    loss: float
    reference_loss: float
    gradients: dict[str, float]  # largest difference of each weight's gradient
    finding: str  # the first op that differs and how, '' = none

    @property
    def ok(self) -> bool:
        """Whether the numbers are the model's."""
        return not self.finding

    def __str__(self) -> str:
        """A few lines: the finding, and the weights that differ most."""
        worst = sorted(self.gradients.items(), key=lambda item: -item[1])[:_SHOWN]
        shown = ", ".join(f"{name} {difference:.3g}" for name, difference in worst)
        head = self.finding or "same numbers as the unplaced model"
        return (
            f"{head}\nloss {self.loss:.9g}, unplaced {self.reference_loss:.9g};"
            f" largest differences of gradients: {shown}"
        )


def compare_batch(
    engine: Runs, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, loss: Loss | None, seed: int = 0
) -> Verification:
    """Compare one batch."""
    own, own_grads = run_unplaced(engine, args, kwargs, loss, seed)
    comparison: OpComparison | ModuleComparison
    if isinstance(engine, HookEngine):
        comparison = ModuleComparison(engine, args, kwargs, seed=seed)
    else:
        comparison = OpComparison(engine, args, kwargs, loss=loss, seed=seed)
    weights = {name: weight for name, weight in engine.model.named_parameters() if weight.requires_grad}
    with seed_and_restore(engine, seed), torch.enable_grad():
        placed = compute_loss(comparison.run(), loss)
        grads = torch.autograd.grad(placed, list(weights.values()), allow_unused=True)
    found = dict(zip(weights, grads, strict=True))
    differences = {name: max_difference(own_grads[name], grad) for name, grad in found.items()}
    finding = comparison.finding() or _unexplained_difference(own, placed, own_grads, found)
    return Verification(placed.item(), own.item(), differences, finding)


def _unexplained_difference(
    own: torch.Tensor, placed: torch.Tensor, own_grads: Mapping[str, Any], grads: Mapping[str, Any]
) -> str:
    """A difference that no op or module explains."""
    if not is_close(own.detach(), placed.detach()):
        return "the loss differs, but nothing it is made of: what was exported is not the model's own forward"
    for name, grad in grads.items():
        if not is_close(own_grads[name], grad):
            return f"the gradient of weight {name!r} differs, but no value does: its backward is another"
    return ""


def parse_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a batch: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise InputError(f"{type(batch).__name__} is not a batch; give a tensor, a tuple or a dict of arguments")

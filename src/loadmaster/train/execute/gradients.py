"""Gradients of a step, summed as a plain loop would sum them.

One micro-batch: what autograd gave, in the compute dtype. Several: summed in the parameter's dtype, in order.
A tied parameter first sums what its shards gave for one micro-batch, then over micro-batches.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch

from loadmaster.core.errors import RunError
from loadmaster.train.execute.optimizer_step import scale_grad
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.execute.units import MicroBatch


class Gradients:
    """Gradients that are not yet updates."""

    def __init__(self, state: TrialState, device: torch.device) -> None:
        self._state, self._device = state, device
        self._tied = {n for piece in state.layout.pieces if piece.tied for n in piece.parameters}
        self._leaves: dict[int, torch.Tensor] = {}
        self._sum: dict[int, torch.Tensor] = {}
        self._parts: dict[int, dict[int, torch.Tensor]] = {}  # [tied parameter][micro-batch]
        self._seen: set[int] = set()
        self._norms: dict[int, torch.Tensor] = {}
        self._finite: list[torch.Tensor] = []
        self.noted: dict[int, list[int]] = {}  # [piece] positions with a gradient, for a deferred update

    def watch(self, shard: int, leaves: Mapping[int, torch.Tensor]) -> None:
        """The leaves the coming unit fills."""
        self._leaves = dict(leaves)

    def take(self, shard: int, moment: MicroBatch) -> None:
        """Add what the unit's leaves got for one micro-batch."""
        for number, leaf in self._leaves.items():
            grad, leaf.grad = leaf.grad, None
            if grad is None:
                continue
            self._seen.add(number)
            if number in self._tied:
                parts = self._parts.setdefault(number, {})
                known = parts.get(moment.micro_batch)
                parts[moment.micro_batch] = grad if known is None else known + grad
            else:
                self._add(number, grad, moment.num_micro_batches)

    def put(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Gradients of a micro-batch by itself, by parameter.

        A second one is added as autograd adds it: checkpoints go backward one by one.
        """
        self._seen.update(grads)
        for number, grad in grads.items():
            known = self._sum.get(number)
            self._sum[number] = grad if known is None else known.add_(grad)

    def is_tied(self, number: int) -> bool:
        """Whether shards share a parameter."""
        return number in self._tied

    def collect(self, piece: int) -> dict[int, torch.Tensor]:
        """The gradients of a piece by position, now the caller's."""
        found = {}
        for position, number in enumerate(self._state.pieces[piece].piece.parameters):
            parts = self._parts.pop(number, None)
            for micro_batch in sorted(parts or ()):
                self._add(number, parts[micro_batch], len(parts))  # type: ignore[index, arg-type]
            if number in self._sum:
                found[position] = self._sum.pop(number)
        return found

    def check_all_seen(self) -> None:
        """After the first step: a trained parameter without a gradient is a mistake unless declared."""
        names, trial = self._state.chain.parameter_name, self._state.trial
        silent = [
            names[number]
            for number, group in enumerate(self._state.group_of)
            if group >= 0 and number not in self._seen and names[number] not in trial.unused
        ]
        if silent and self._state.chain.by_call:
            warnings.warn(
                f"trial {trial.name!r}: {len(silent)} of {len(names)} parameters got no gradient in the first"
                f" step ({', '.join(silent[:3])}); the model's own forward does not use them here, so they"
                " are not trained until it does. Freeze them, or name them in Trial(unused=...), to say so",
                RuntimeWarning,
                stacklevel=2,
            )
        elif silent:
            raise RunError(
                f"trial {trial.name!r}: {len(silent)} of {len(names)} parameters got no gradient in the first"
                f" step ({', '.join(silent[:3])}); freeze them, or name them in Trial(unused=...)"
            )

    def note_norms(self, piece: int, grads: Mapping[int, torch.Tensor], scale: float) -> None:
        """Remember each gradient's norm, for a deferred update."""
        host = self._state.pieces[piece]
        self.noted[piece] = sorted(grads)
        for position, grad in grads.items():
            wide = scale_grad(grad, host.master[position].dtype, () if scale == 1.0 else (1 / scale,))
            if self._state.trial.precision == "fp16":
                self._finite.append(torch.isfinite(wide).all())
            if self._state.trial.clip_norm is not None:
                self._norms[host.piece.parameters[position]] = _grad_norm(wide)

    def factors(self, scale: float) -> tuple[tuple[float, ...], bool]:
        """What every gradient is to be multiplied by in turn; and whether one is not finite."""
        if self._finite and not bool(torch.stack(self._finite).all()):
            return (), True
        found = [] if scale == 1.0 else [1 / scale]
        clip = self._state.trial.clip_norm
        if clip is not None:
            total = torch.linalg.vector_norm(torch.stack([self._norms[n] for n in sorted(self._norms)]))
            found.append(float(torch.clamp(clip / (total + 1e-6), max=1.0)))
        return tuple(found), False

    def forget(self) -> None:
        """After a deferred update."""
        self._norms.clear()
        self._finite.clear()
        self.noted.clear()

    @staticmethod
    def widen_grad(grad: torch.Tensor, dtype: torch.dtype, factors: Sequence[float]) -> torch.Tensor:
        """The gradient in the parameter's dtype with its factors."""
        return scale_grad(grad, dtype, factors)

    def _add(self, number: int, grad: torch.Tensor, num_micro_batches: int) -> None:
        if number in self._sum:
            self._sum[number].add_(grad)
        elif num_micro_batches > 1 or self._state.trial.accumulate > 1:
            self._sum[number] = grad.to(self._state.chain.parameters[number].dtype)
        else:
            self._sum[number] = grad


def _grad_norm(grad: torch.Tensor) -> torch.Tensor:
    """As `clip_grad_norm_` takes it on this kind of device."""
    if grad.device.type == "cuda":
        return torch._foreach_norm([grad])[0]
    return torch.linalg.vector_norm(grad)

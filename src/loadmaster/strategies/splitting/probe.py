"""Probe: an op without a rule is run on random rows, whole and in two uneven pieces, and compared. [torch]

    the pieces joined give the whole       PART
    their sum gives it                     SUM
    their mean weighted by rows gives it   WEIGHTED
    each piece alone gives it              FULL
    none of these                          the op needs all rows at once

Answers are kept by op, arguments and forms. Ops that draw random numbers are declared in `splits.py`, not
probed.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.cost.signature import TensorSpec, Value
from loadmaster.cost.timed.after_forward import CannotRebuild
from loadmaster.cost.timed.rebuild import build_arguments, input_bytes
from loadmaster.strategies.splitting.forms import Form
from loadmaster.strategies.splitting.rules import FULL, SUM, WEIGHTED, Call, Formed, Unsplittable

MOST_BYTES = 2**28
_TOLERANCE = 1e-4
_SHAPED = (
    "view",
    "reshape",
    "expand",
    "_unsafe_view",
    "unflatten",
    "new_zeros",
)  # told a size with all rows in it


@dataclass(slots=True)
class Probe:
    """Tries ops on the CPU."""

    most_bytes: int = MOST_BYTES
    seen: dict[str, list[Formed] | None] = field(default_factory=dict)

    def __call__(self, call: Call) -> list[Formed] | None:
        """The forms of the outputs; None where the op cannot be tried."""
        key = repr((call.signature, [(a.form, a.outer, a.dim) for a in call.args], call.batch))
        if key not in self.seen:
            self.seen[key] = self._try(call)
        found = self.seen[key]
        if found == []:
            raise Unsplittable("tried on random rows, its pieces do not make up the whole")
        return found

    def _try(self, call: Call) -> list[Formed] | None:
        if (
            call.name in _SHAPED
            or call.batch < 2
            or call.sums
            or not call.parts
            or input_bytes(call.signature) > self.most_bytes
        ):
            return None
        try:
            op, args, kwargs = build_arguments(call.signature, torch.device("cpu"))
        except CannotRebuild:
            return None
        cut = max(call.batch // 3, 1)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                whole, first, second = (
                    _tensors(op(*_cut_all(call, args, rows), **kwargs))
                    for rows in ((0, call.batch), (0, cut), (cut, call.batch))
                )
        except Exception:  # the op refuses such sizes, or such data: nothing was seen
            return None
        if len(whole) != len(call.out_elements):
            return None
        forms = [_compare(w, a, b, cut, call.batch) for w, a, b in zip(whole, first, second, strict=True)]
        return [] if None in forms else [form for form in forms if form is not None]


def _cut_all(call: Call, args: list[Any], rows: tuple[int, int]) -> list[Any]:
    """The arguments with some rows of those that have rows."""
    turn = iter(call.args)

    def cut(value: Any, spec: Value) -> Any:
        if isinstance(spec, list):
            return [cut(v, s) for v, s in zip(value, spec, strict=True)]
        if not isinstance(spec, TensorSpec):
            return value
        arg = next(turn)
        if arg.form != Form.PART:
            return value.clone()
        each = spec.shape[arg.dim] // call.batch
        return value.narrow(arg.dim, rows[0] * each, (rows[1] - rows[0]) * each).clone()

    return [cut(value, spec) for value, spec in zip(args, call.signature.args, strict=True)]


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _compare(whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor, cut: int, batch: int) -> Formed | None:
    for dim in range(whole.dim()):
        if whole.shape[dim] % batch == 0 and a.shape[dim] * batch == whole.shape[dim] * cut:
            joined = torch.cat((a, b), dim) if _fits(a, b, dim) else None
            if joined is not None and _equal(joined, whole):
                return Form.PART, _outer(whole, dim)
    if a.shape != whole.shape or b.shape != whole.shape:
        return None
    if _equal(a, whole) and _equal(b, whole):
        return FULL
    if not whole.is_floating_point():
        return None
    if _equal(a + b, whole):
        return SUM
    return WEIGHTED if _equal((a * cut + b * (batch - cut)) / batch, whole) else None


def _fits(a: torch.Tensor, b: torch.Tensor, dim: int) -> bool:
    return a.dim() == b.dim() and all(a.shape[d] == b.shape[d] for d in range(a.dim()) if d != dim)


def _outer(whole: torch.Tensor, dim: int) -> int:
    """Blocks of memory with all rows each."""
    each = whole.shape[dim] * whole.stride(dim)
    return max(int(whole.numel()) // int(each), 1) if each > 0 else 1


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * max(scale, 1e-6), equal_nan=True))

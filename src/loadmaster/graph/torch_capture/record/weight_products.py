"""Weight products: for every weight, the flops that were recorded for products with it, beside those that
the shapes of the operands imply.

A product is counted for the weights its operands are made of: a weight that was cast, normalised or turned
first is still that weight. A product by groups (routed experts) implies what its rows imply, whatever their
number of groups.
"""

from collections.abc import Iterable
from typing import Any

import torch

_RIGHT = {  # the operands that are multiplied
    "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_grouped_mm": (0, 1),
    "linear": (0, 1), "mkldnn_linear": (0, 1), "_addmm_activation": (1, 2), "mv": (0, 1), "addmv": (1, 2),
}  # fmt: skip
_CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "conv_depthwise3d",
    "_slow_conv2d_forward", "slow_conv3d_forward",
)  # fmt: skip
_TRANSPOSED = 6  # argument of `convolution`


class WeightProducts:
    """Sums over one forward pass; storages are known by their numbers."""

    def __init__(self) -> None:
        self.recorded: dict[str, float] = {}
        self.implied: dict[str, float] = {}
        self._weights: dict[int, frozenset[str]] = {}

    def add_weight(self, number: int, name: str) -> None:
        """A weight of the model."""
        self._weights[number] = self._weights.get(number, frozenset()) | {name}

    def note(
        self,
        func: Any,
        args: Any,
        flops: float,
        given: list[tuple[int, torch.Tensor, bool]],
        made: Iterable[tuple[int, torch.Tensor]],
    ) -> None:
        """An op has run; of what it was given: number of the storage, tensor, whether it is a constant."""
        sources = [self._weights.get(number, frozenset()) for number, _, _ in given]
        names = frozenset().union(*sources)
        if not names:
            return
        outputs = list(made)
        implied = _implied_flops(func, args, outputs[0][1] if outputs else None)
        if implied is not None or flops:
            for name in names:
                self.recorded[name] = self.recorded.get(name, 0.0) + flops
                self.implied[name] = self.implied.get(name, 0.0) + (flops if implied is None else implied)
        plain = [
            source or constant
            for source, (_, tensor, constant) in zip(sources, given, strict=True)
            if tensor.is_floating_point()
        ]
        if all(plain):  # made of weights alone
            for number, _ in outputs:
                self._weights[number] = self._weights.get(number, frozenset()) | names


def _implied_flops(func: Any, args: Any, out: torch.Tensor | None) -> float | None:
    """Twice the elements of the result times what each is summed over; None: it is no product."""
    name = str(getattr(getattr(func, "overloadpacket", func), "__name__", ""))
    if out is None:
        return None
    if name in _RIGHT:
        return 2.0 * out.numel() * int(args[_RIGHT[name][0]].shape[-1])
    if name not in _CONVOLUTIONS:
        return None
    source, weight = args[0], args[1]
    turned = name.endswith("convolution") and len(args) > _TRANSPOSED and args[_TRANSPOSED] is True
    moved, channels = (source, source.shape[1]) if turned else (out, weight.shape[0])
    return 2.0 * moved.numel() / max(1, int(channels)) * weight.numel()

"""Mixed precision as a GPU does it, on CPU tensors.

Autocast runs more ops in float32 on a GPU than on a CPU. A model that is captured or exported on the CPU for
a GPU runs under `Casts`, so that its ops have the dtypes that they will have there.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_SMALL = (torch.float16, torch.bfloat16)
# What autocast runs in float32 on a GPU and leaves as it is on a CPU, from PyTorch's documentation of both.
_IN_FLOAT32 = frozenset({
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_similarity", "cross_entropy",
    "cross_entropy_loss", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm",
    "hinge_embedding_loss", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax",
    "margin_ranking_loss", "native_layer_norm", "nll_loss", "nll_loss2d", "nll_loss_nd", "norm", "pdist",
    "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softplus", "special_expm1", "sum", "tan", "triplet_margin_loss", "__pow__", "__rpow__", "__rdiv__",
    "__rtruediv__",
})  # fmt: skip


class Casts(TorchFunctionMode):
    """Autocast's list of the target, as far as it goes beyond the CPU's."""

    def __init__(self, target: str | None) -> None:
        super().__init__()
        self._wide = _IN_FLOAT32 if target == "cuda" else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op, in float32 where the target does."""
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if name in self._wide and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _widen_to_float32, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _widen_to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _SMALL else tensor

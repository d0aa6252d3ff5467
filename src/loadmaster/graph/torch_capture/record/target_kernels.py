"""Target: the kernels of the device that is meant, where they differ from the CPU's; stated rules.

    cuda  attention   flash: 16-bit, no mask, heads up to 256 wide; efficient: any float, a mask allowed, as
                      many key heads as query heads; else written out (math)
          dropout     one kernel with a mask of one byte per element (the CPU: a mask of the input's dtype)
          lstm, gru   saves GATES values per hidden unit, step and layer for its backward
          optimizer   torch's own update all weights of a device at once (foreach): what it makes on the way
                      stays to the end of the update
          autocast    runs in float32 what a GPU does (softmax, layer norm, losses, sums, powers); the CPU's
                      own list is shorter (`modules.gpu_casts`)
          convolution, batch norm   save the same tensors as the CPU's; cudnn's workspace is not known here

Without a target, or with 'cpu', PyTorch itself chooses as it does on a CPU.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from loadmaster.core.errors import UnknownNameError

TARGETS = ("cpu", "cuda")
GATES = 6  # four gates, the cell and its tanh
_WIDEST_FLASH = 256
_SMALL = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def require_target(target: str | None) -> None:
    """Refuse a kind of device that no rule speaks of."""
    if target is not None and target not in TARGETS:
        raise UnknownNameError("target", str(target), TARGETS)


class Kernels(TorchFunctionMode):
    """Calls the target's kernels instead of those PyTorch would choose."""

    def __init__(self, target: str | None) -> None:
        super().__init__()
        self._rules: dict[str, Any] = {}
        if target == "cuda":
            self._rules = {"scaled_dot_product_attention": _attention, "dropout": _dropout}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op, or what stands for it on the target."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout and self._rules:
            func, args, kwargs = torch.dropout, _dropout_args(*args, **kwargs), {}
        packet = getattr(func, "overloadpacket", func)
        rule = self._rules.get(getattr(packet, "__name__", ""))
        made = rule(*args, **kwargs) if rule is not None and not hasattr(func, "__code__") else None
        return func(*args, **kwargs) if made is None else made


def _dropout_args(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Any, ...]:
    """The op's own arguments; what is done in place needs a mask all the same."""
    return input, p, training


def _dropout(x: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor | None:
    if not train or p == 0 or not x.dtype.is_floating_point:
        return None
    made: torch.Tensor = _aten.native_dropout(x, p, train)[0]
    return made


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    query, key, value = _cast_as_autocast_does(query, key, value)
    kernel = attention_kernel(query, key, attn_mask)
    if kernel == "flash":
        out = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return out[0]
    if kernel == "efficient":
        bias = _mask_to_bias(query, key, attn_mask)
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, grad, dropout_p, is_causal, scale=scale
        )
        return out[0]
    out = _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return out[0]


def _cast_as_autocast_does(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In mixed precision attention is given 16 bits, whatever rotary embeddings made of queries and keys."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [one.to(dtype) if one.dtype == torch.float32 else one for one in tensors]


def attention_kernel(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> str:
    """'flash', 'efficient' or 'math': what a CUDA device runs."""
    four = query.dim() == 4 and key.dim() == 4
    width = query.shape[-1] if query.dim() else 0
    if four and mask is None and query.dtype in _SMALL and width <= _WIDEST_FLASH and width % 8 == 0:
        return "flash"
    floats = query.dtype in (*_SMALL, torch.float32)
    trained_mask = mask is not None and mask.requires_grad
    if four and floats and not trained_mask and query.shape[1] == key.shape[1]:
        return "efficient"
    return "math"


def _mask_to_bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as numbers to add, once for every head."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def recurrent_scratch_bytes(output: torch.Tensor) -> int:
    """What a recurrent layer saves for its backward on a GPU."""
    return GATES * output.numel() * output.itemsize

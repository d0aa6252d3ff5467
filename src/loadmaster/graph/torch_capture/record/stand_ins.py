"""Stand-ins: ops of which fake tensors know too little, and what they are taken to give.

_grouped_mm          fake tensors accept bfloat16 only; the CPU multiplies any float
native_batch_norm    a GPU keeps mean and variance in float32 whatever the input
mkldnn_rnn_layer     the scratch memory it saves for its backward is known to the library alone: the layer
                     is run once on zeros, where it is small enough. Its backward gives two gradients of the
                     bias, which fake tensors sometimes take for one
"""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from loadmaster.graph.torch_capture.record.target_kernels import recurrent_scratch_bytes

_aten = torch.ops.aten
_MOST_PROBED_BYTES = 2**28


def make_stand_in(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op that fake tensors cannot give, or None."""
    if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    return None


def complete_result(func: Any, args: Any, out: Any, target: str | None) -> Any:
    """The result of an op with what fake tensors leave out of it."""
    if func is _aten.mkldnn_rnn_layer.default and out[3].numel() == 0 and torch.is_grad_enabled():
        size = recurrent_scratch_bytes(out[0]) if target == "cuda" else _scratch_bytes(args)
        return (*out[:3], out[0].new_empty((size,), dtype=torch.uint8)) if size else out
    if func is _aten.native_batch_norm.default and target == "cuda":
        return (out[0], *(part.float() for part in out[1:]))
    if func is _aten.mkldnn_rnn_layer_backward.default:
        return (*out[:4], torch.empty_like(out[4]), *out[5:])
    return out


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """[rows, k] x [groups, k, n] by rows, [m, k] x [k, n] by groups of k, or a batch of both."""
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=dtype)
    if a.dim() == 2:
        return a.new_empty((a.shape[0], b.shape[-1]), dtype=dtype)
    if b.dim() == 2:
        return a.new_empty((a.shape[-2], b.shape[-1]), dtype=dtype)
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _scratch_bytes(args: Any) -> int:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if sum(tensor.untyped_storage().nbytes() for tensor in tensors) > _MOST_PROBED_BYTES:
        return 0
    with _disable_current_modes(), torch.enable_grad():
        real = [
            torch.zeros(tuple(value.shape), dtype=value.dtype, requires_grad=value.dtype.is_floating_point)
            if isinstance(value, torch.Tensor)
            else value
            for value in args
        ]
        try:
            scratch = _aten.mkldnn_rnn_layer.default(*real)[3]
        except RuntimeError:
            return 0
    return int(scratch.untyped_storage().nbytes()) if scratch is not None else 0

"""What an op has to do: its flops and the bytes it moves.

Flops are those of `torch.utils.flop_counter`, formula for formula; ops it does not know are bound by
memory traffic and count none. The flash attention of the CPU is counted as the GPU's is, a product by groups
as one product, and a recurrent layer by its products.
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from loadmaster.modules.op_signature import kind_of

_aten = torch.ops.aten
_PICKS = {  # ops that read no more of their first input than they give out
    "embedding",
    "index",
    "index_select",
    "gather",
    "slice_scatter",
    "nll_loss_forward",
}


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor looks at; an expanded axis counts once."""
    elements = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not n)
    return elements * tensor.itemsize


def count_flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Flops by the formulas of torch's own flop counter; 0 for what it does not know."""
    packet = getattr(func, "overloadpacket", func)
    if packet in (_aten.mkldnn_rnn_layer, _aten.mkldnn_rnn_layer_backward):
        return _recurrent_flops(args, backward=packet is _aten.mkldnn_rnn_layer_backward)
    if (
        packet is _aten._grouped_mm or kind_of(func) == "grouped_mm_fallback"
    ):  # every row is multiplied once, whatever its group
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if packet in ATTENTION_FLOPS:
        return float(ATTENTION_FLOPS[packet](*(getattr(value, "shape", value) for value in args)))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def _recurrent_flops(args: Any, *, backward: bool) -> float:
    """Both products of every step: rows x (inputs + hidden) x gates; twice that backward."""
    rows = args[0].numel() // args[0].shape[-1]
    return (4.0 if backward else 2.0) * rows * (args[1].numel() + args[2].numel())


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products; a key that heads share is counted for each of them."""
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[2] * (width + value[3]))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores once more, and two products for the factors of each of the two."""
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[2] * (3 * width + 2 * value[3]))


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
# torch's own formulas, over shapes, but for every kernel; torch 2.11 refuses keys that heads share
ATTENTION_FLOPS = {
    getattr(_aten, f"_scaled_dot_product_{kernel}{way}"): formula
    for kernel in _KERNELS
    for way, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
}


def bytes_moved(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Every distinct input read once, every output written once; ops that pick rows read only those."""
    written = sum(tensor_bytes(tensor) for tensor in outputs)
    sizes = [tensor_bytes(tensor) for tensor in inputs]
    if sizes and kind_of(func) in _PICKS:
        sizes[0] = min(sizes[0], written)
    return sum(sizes) + written

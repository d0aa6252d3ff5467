"""Words for what PyTorch runs: dtype, kind and signature of an op, its flops and its memory traffic.

Flops are those of `torch.utils.flop_counter`, formula for formula; ops it does not know are bound by
memory traffic and count none. The flash attention of the CPU is counted as the GPU's is, a product by groups
as one product, and a recurrent layer by its products.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from loadmaster.core.graph import Dtype

_DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.float16: Dtype.FLOAT16,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float64: Dtype.FLOAT64,
    torch.complex64: Dtype.FLOAT32,
    torch.complex128: Dtype.FLOAT64,
    torch.int64: Dtype.INT64,
    torch.int32: Dtype.INT32,
    torch.bool: Dtype.BOOL,
}
_LONGEST = 2000
_VIEWS = " @views="
_aten = torch.ops.aten
_ASK_CUDNN = {"batch_norm", "instance_norm", "layer_norm", "group_norm", "_convolution"}
_PICKS = {  # ops that read no more of their first input than they give out
    "embedding",
    "index",
    "index_select",
    "gather",
    "slice_scatter",
    "nll_loss_forward",
}


def dtype_of(dtype: torch.dtype) -> Dtype:
    """The nearest of our element types, by size."""
    known = _DTYPES.get(dtype)
    if known is not None:
        return known
    if dtype.is_floating_point:
        return Dtype.FLOAT8
    return Dtype.INT8 if dtype.itemsize == 1 else Dtype.INT32


def compute_dtype(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> Dtype:
    """What an op computes in: its first floating input, else output, else float32."""
    found = [*inputs, *outputs]
    for tensor in found:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return dtype_of(tensor.dtype)
    return dtype_of(found[0].dtype) if found else Dtype.FLOAT32


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor looks at; an expanded axis counts once."""
    elements = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not n)
    return elements * tensor.itemsize


def kind_of(func: Any) -> str:
    """'mm' of aten.mm.default."""
    packet = getattr(func, "overloadpacket", None)
    return str(packet.__name__) if packet is not None else str(getattr(func, "__name__", func))


def signature_of(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """'aten.mm.default float32[8,16] float32[16,4]': the key of measured costs."""
    words = [
        str(func),
        *_format_arguments(func, args),
        *(f"{name}={_format_value(value)}" for name, value in kwargs.items()),
    ]
    return " ".join(words)[:_LONGEST]


def _format_arguments(func: Any, args: Iterable[Any]) -> list[str]:
    """Whether cudnn is on is a setting of the machine that captures, so it is always written as on."""
    words = [_format_value(value) for value in args]
    if kind_of(func) in _ASK_CUDNN:
        for at, argument in enumerate(func._schema.arguments[: len(words)]):
            words[at] = "True" if argument.name in ("cudnn_enabled", "cudnn_enable") else words[at]
    return words


def autocast_word() -> str:
    """' @autocast=bfloat16' where ops run in mixed precision: they cast what they are given."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return f" @autocast={str(torch.get_autocast_dtype('cpu')).removeprefix('torch.')}"


def with_a_view(signature: str) -> str:
    """'... @views=2' of '... @views=1': autograd looks at a tensor another way after it has run the op."""
    op, _, num = signature.partition(_VIEWS)
    return f"{op}{_VIEWS}{int(num or 0) + 1}"


def _format_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        turned = "" if value.is_contiguous() else f"/{','.join(map(str, value.stride()))}"
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]{turned}"
    if isinstance(value, list | tuple):
        return f"({','.join(map(_format_value, value))})"
    if isinstance(value, torch.fx.GraphModule):
        return "graph"
    return str(value)


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


_TRAINING = 5  # the argument of batch norm that says so
_HIDDEN_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4)}  # running mean and variance


def find_written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an op changes in place."""
    hidden = _HIDDEN_WRITES.get(kind_of(func), ())
    found = _tensors_in([args[at] for at in hidden if at < len(args) and args[_TRAINING]])
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += _tensors_in(value)
    return found


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

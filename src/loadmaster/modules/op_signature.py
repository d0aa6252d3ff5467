"""Words for an op of PyTorch: its kind, its dtype, its signature (the key of measured costs)."""

from collections.abc import Iterable
from typing import Any

import torch

from loadmaster.core.graph import Dtype
from loadmaster.modules.tensor_trees import list_tensors

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
_ASK_CUDNN = {"batch_norm", "instance_norm", "layer_norm", "group_norm", "_convolution"}


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


_TRAINING = 5  # the argument of batch norm that says so
_HIDDEN_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4)}  # running mean and variance


def find_written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an op changes in place."""
    hidden = _HIDDEN_WRITES.get(kind_of(func), ())
    found = list_tensors([args[at] for at in hidden if at < len(args) and args[_TRAINING]])
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += list_tensors(value)
    return found

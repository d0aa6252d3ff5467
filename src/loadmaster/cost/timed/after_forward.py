"""After forward: backward ops that read what only their own forward can have made. [torch]

Attention keeps the state of its random numbers and recurrent layers a scratch memory, both read unchecked:
on other data such a backward may end the process. Which kernels attention and batch norm have is the device's
own choice besides. So the forward is run first, here, and the backward that autograd then calls is timed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_UNCHECKED = ("philox_seed", "philox_offset", "rng_state", "reserve", "workspace", "cum_seq_q")
Call = tuple[Any, list[Any], dict[str, Any]]
Given = dict[str, Any]


class CannotRebuild(Exception):  # noqa: N818
    """An op cannot be run on its own; says why."""


def prepare_call(op: Any, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """The op with arguments that are safe to run it on."""
    name = op.overloadpacket.__name__
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    if name in _FORWARDS:
        return _record_backward_call(name, given)
    if name == "mkldnn_rnn_layer_backward":
        return op, _recurrent_backward_args(args), kwargs
    raw = [key for key in _UNCHECKED if isinstance(given.get(key), torch.Tensor)]
    if raw:
        raise CannotRebuild(f"aten.{name} reads {raw[0]}, which only its forward makes")
    return op, args, kwargs


def _record_backward_call(name: str, given: Given) -> Call:
    """What autograd calls here for the forward of a backward op."""
    forward, inputs, what = _FORWARDS[name]
    with torch.enable_grad():
        leaves = [given[key].detach().requires_grad_() for key in inputs]
        out = forward(*leaves, given)
    watch = _CallRecorder(what)
    with watch:
        torch.autograd.grad(out, leaves, given.get("grad_out", given.get("grad_out_")))
    if watch.seen is None:
        raise CannotRebuild(f"this device has no kernel like {name}")
    return watch.seen


def _attention(query: Any, key: Any, value: Any, given: Given) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=given.get("attn_bias"),
        dropout_p=given.get("dropout_p", 0.0),
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
    )


def _batch_norm(x: Any, weight: Any, given: Given) -> torch.Tensor:
    mean, variance = given["running_mean"], given["running_var"]
    return torch.batch_norm(
        x, weight, torch.zeros_like(weight), mean, variance, given["train"], 0.1, given["eps"], True
    )


_ATTENTION = (_attention, ("query", "key", "value"), "attention")
_FORWARDS: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...], str]] = {
    "_scaled_dot_product_flash_attention_backward": _ATTENTION,
    "_scaled_dot_product_cudnn_attention_backward": _ATTENTION,
    "_scaled_dot_product_efficient_attention_backward": _ATTENTION,
    "native_batch_norm_backward": (_batch_norm, ("input", "weight"), "batch_norm"),
}


class _CallRecorder(TorchDispatchMode):
    """Notes how a backward is called."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.seen: Call | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and keep it if it is the one."""
        name = func.overloadpacket.__name__
        if self.what in name and name.endswith("backward"):
            self.seen = func, list(args), dict(kwargs or {})
        return func(*args, **(kwargs or {}))


def _recurrent_backward_args(args: list[Any]) -> list[Any]:
    """The backward of a recurrent layer on what its forward really saves."""
    (x, w1, w2, w3, w4, hx, cx), rest = args[:7], args[13:22]
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first = rest
    with torch.enable_grad():
        x = x.detach().requires_grad_()  # it saves nothing where no gradient is wanted
        out, hy, cy, saved = _aten.mkldnn_rnn_layer.default(
            x, w1, w2, w3, w4, hx, cx, reverse, sizes, mode, hidden, layers, biases, both, batch_first, train
        )
    made = [tensor.detach() for tensor in (out, hy, cy)]
    return [*args[:7], *made, *args[10:22], saved]

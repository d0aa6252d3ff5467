"""What is known of PyTorch's ops by name: their flops, and which give a view of what they are given."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loadmaster.graph.formats import _flops
from loadmaster.graph.formats._inference import Value

PICKS = frozenset({"embedding", "index", "index_select", "gather", "slice_scatter", "nll_loss_forward"})
# fmt: off
_VIEWS = frozenset({
    "alias", "adjoint", "as_strided", "broadcast_to", "chunk", "detach", "diagonal", "dsplit", "expand",
    "expand_as", "hsplit", "imag", "mH", "mT", "matrix_H", "moveaxis", "movedim", "narrow", "numpy_T",
    "permute", "positive", "real", "resolve_conj", "resolve_neg", "select", "slice", "split",
    "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind",
    "unfold", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "view", "view_as",
    "view_as_complex", "view_as_real", "vsplit", "_unsafe_view", "_reshape_alias",
})
_RESHAPES = frozenset({
    "reshape", "reshape_as", "flatten", "ravel", "unflatten", "atleast_1d", "atleast_2d", "atleast_3d",
})
# fmt: on
_DROPOUTS = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
_UNLESS_CHANGED = frozenset({"contiguous", "to", "type_as", "float", "half", "bfloat16"})


class Call(NamedTuple):
    """An op's arguments: tensors in order, and all that is not a tensor by name."""

    tensors: Sequence[Value]
    others: Mapping[str, Any]
    outputs: Sequence[Value]


def is_view(kind: str, call: Call) -> bool:
    """Whether what an op gives shares the memory of its first tensor."""
    if not call.tensors or not call.outputs:
        return False
    given, made = call.tensors[0], call.outputs[0]
    if kind in _VIEWS:
        return True
    if kind in _RESHAPES:
        return _can_view(given, made.shape)
    if kind in _DROPOUTS:
        return call.others.get("train") is False or call.others.get("p") == 0
    if kind in _UNLESS_CHANGED and call.others.get("copy") is not True:
        return given == made
    return False


def writes_first(kind: str) -> bool:
    """Whether an op changes its first tensor in place: 'add_', not '__and__'."""
    return kind.endswith("_") and not kind.endswith("__")


def _can_view(given: Value, shape: tuple[int, ...]) -> bool:
    """Whether a tensor can be looked at in another shape where it lies.

    Axes are taken in runs that lie in order; each new axis must fall within one run.
    """
    if given.in_order or math.prod(given.shape) == 0:
        return True
    runs, run, step_next = [], 1, None
    strides = given.strides or ()
    for length, step in zip(reversed(given.shape), reversed(strides), strict=True):
        if length == 1:
            continue
        if step_next is not None and step != step_next:
            runs.append(run)
            run = 1
        run *= length
        step_next = step * length
    runs.append(run)
    lengths = [length for length in reversed(shape) if length != 1]
    for run in runs:
        while run > 1 and lengths and run % lengths[0] == 0:
            run //= lengths.pop(0)
        if run > 1:
            return False
    return not lengths


def flops(kind: str, call: Call) -> int:
    """Flops by the formulas of torch's own counter; 0 for what it does not know."""
    rule = _RULES.get(kind)
    return 0 if rule is None else rule(call)


def has_flops_rule(kind: str) -> bool:
    """Whether there is a formula for an op's flops."""
    return kind in _RULES


def _shapes(call: Call) -> list[tuple[int, ...]]:
    return [value.shape for value in call.tensors]


def _matmul_flops(call: Call) -> int:
    a, b = _shapes(call)[:2]
    return _flops.product(a, b, call.outputs[0].shape)


def _addmm_flops(call: Call) -> int:
    _, a, b = _shapes(call)[:3]
    return 2 * math.prod(a) * b[-1]


def _linear_flops(call: Call) -> int:
    return _flops.linear(*_shapes(call)[:2])


def _convolution_flops(call: Call) -> int:
    x, weight = _shapes(call)[:2]
    return _flops.convolution(
        *_add_batch_axis(x, weight, call.outputs[0].shape), transposed=call.others.get("transposed") is True
    )


def _transposed_convolution_flops(call: Call) -> int:
    x, weight = _shapes(call)[:2]
    return _flops.convolution(*_add_batch_axis(x, weight, call.outputs[0].shape), transposed=True)


def _add_batch_axis(
    x: _flops.Shape, weight: _flops.Shape, out: _flops.Shape
) -> tuple[_flops.Shape, _flops.Shape, _flops.Shape]:
    """One example alone is a batch of one."""
    return (x, weight, out) if len(x) == len(weight) else ((1, *x), weight, (1, *out))


def _attention_flops(call: Call) -> int:
    query, key, value = _shapes(call)[:3]
    return _flops.attention(query, key, value)


def _recurrent_flops(call: Call) -> int:
    x, *rest = _shapes(call)
    states = 2 if "lstm" in str(call.others.get("kind")) else 1
    return _flops.recurrent(x, [shape for shape in rest[states:] if len(shape) == 2])


def _einsum_flops(call: Call) -> int:
    return _flops.einsum(str(call.others["equation"]), _shapes(call))


def _grouped_matmul_flops(call: Call) -> int:
    a, b = _shapes(call)[:2]
    return 2 * math.prod(a) * b[-1]


_RULES: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "_scaled_mm", "_int_mm"), _matmul_flops),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "_addmm_activation"), _addmm_flops),
    "linear": _linear_flops,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution"), _convolution_flops),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution_flops
    ),
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "_scaled_dot_product_attention_math",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention_flops,
    ),
    **dict.fromkeys(
        ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        _recurrent_flops,
    ),
    "einsum": _einsum_flops,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_matmul_flops),
}

"""Rules: how each kind of op acts on rows. One table, by the name of the ATen op.

A rule sees the op as it was called and, for every tensor argument, its form and the dimension that counts
rows. It answers with the forms of the outputs, or raises `Unsplittable` with the reason. An op without a
rule is left to the probe. Forms: (Form, outer), see `forms.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from loadmaster.cost.signature import Signature, TensorSpec
from loadmaster.strategies.splitting.forms import Form

Formed = tuple[Form, int]
FULL: Formed = (Form.FULL, 0)
SUM: Formed = (Form.SUM, 0)
WEIGHTED: Formed = (Form.WEIGHTED, 0)


class Unsplittable(Exception):  # noqa: N818
    """Why an op needs all rows at once."""


@dataclass(frozen=True, slots=True)
class Arg:
    """A tensor argument."""

    spec: TensorSpec
    form: Form
    outer: int
    dim: int  # which dimension of the argument counts rows; -1 where the form is not PART
    weight: bool  # a parameter or buffer


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments and the number of elements of each output."""

    name: str
    signature: Signature
    args: tuple[Arg, ...]
    out_elements: tuple[int, ...]
    batch: int

    @property
    def parts(self) -> list[Arg]:
        """Arguments of which each replica has its rows."""
        return [arg for arg in self.args if arg.form == Form.PART]

    @property
    def sums(self) -> list[Arg]:
        """Arguments of which each replica has a share of a sum."""
        return [arg for arg in self.args if arg.form in (Form.SUM, Form.WEIGHTED)]

    def number(self, at: int) -> int:
        """The plain argument at a place of the call."""
        value = self.signature.args[at] if at < len(self.signature.args) else 0
        return value if isinstance(value, int) else 0

    def numbers(self, at: int) -> list[int]:
        """The list of whole numbers at a place of the call; empty where there is none."""
        value = self.signature.args[at] if at < len(self.signature.args) else None
        return [v for v in value if isinstance(v, int)] if isinstance(value, list) else []


Rule = Callable[[Call], list[Formed]]


def apply_rule(call: Call) -> list[Formed] | None:
    """The forms of the outputs, None where no rule knows the op."""
    if not call.parts and not call.sums:
        return [FULL] * len(call.out_elements)
    rule = RULES.get(call.name) or RULES.get(call.name.rstrip("_"))
    return None if rule is None else rule(call)


def _rows(call: Call, outer: int | None = None) -> list[Formed]:
    """Every output is rows, but for those too small or too odd to be: scalars, seeds."""
    found = _like(call.parts[0]) if outer is None else outer
    return [
        (Form.PART, found) if n % call.batch == 0 and n >= call.batch else FULL for n in call.out_elements
    ]


def _like(arg: Arg) -> int:
    """How often the rows repeat in a result whose memory is laid out as the argument's."""
    size = math.prod(arg.spec.shape)
    each = arg.spec.shape[arg.dim] * arg.spec.stride[arg.dim]
    dense = arg.spec.num_elements == size and each > 0 and size % each == 0
    return max(size // each, 1) if dense else _outer_of(arg)


def _outer_of(arg: Arg) -> int:
    """How often the rows repeat in a result that is laid out in the order of the argument's dimensions."""
    return max(math.prod(arg.spec.shape[: arg.dim]), 1)


def _only_parts(call: Call) -> None:
    if call.sums:
        raise Unsplittable("it needs a sum over all rows in the middle of the step")


def _from_right(arg: Arg) -> int:
    return arg.dim - len(arg.spec.shape)


def pointwise(call: Call) -> list[Formed]:
    """Rows stay rows where all arguments have them at the same dimension."""
    if call.sums:
        if call.parts or call.name.rstrip("_") not in _LINEAR:
            raise Unsplittable("it needs a sum over all rows in the middle of the step")
        forms = {arg.form for arg in call.sums}
        if len(forms) > 1 or (len(call.sums) != len(call.args) and call.name.rstrip("_") in _ADDITIVE):
            raise Unsplittable("it adds a partial sum to something that every replica has whole")
        if len(call.sums) > 1 and call.name.rstrip("_") not in _ADDITIVE:
            raise Unsplittable("it multiplies partial sums")
        return [(forms.pop(), 0)] * len(call.out_elements)
    places = {_from_right(arg) for arg in call.parts}
    if len(places) > 1:
        raise Unsplittable("its arguments have the rows at different dimensions")
    place = places.pop()
    for arg in call.args:
        wide = arg.form == Form.FULL and len(arg.spec.shape) >= -place and arg.spec.shape[place] > 1
        if wide and arg.weight:
            raise Unsplittable("a weight has one value for each row of the batch")
    return _rows(call)


def rowwise(call: Call) -> list[Formed]:
    """The first argument has rows, at its first dimension; everything else is the same for each row."""
    _only_parts(call)
    if any(arg.dim != 0 for arg in call.parts):
        raise Unsplittable("the rows are not its first dimension")
    return _rows(call)


def along(at: int, default: int | None = None) -> Rule:
    """An op that works along a dimension, named at a place of the call: rows must not lie along it."""

    def rule(call: Call) -> list[Formed]:
        if call.sums:
            return pointwise(call)
        values = call.signature.args
        asked = values[at] if at < len(values) else default
        named = asked if isinstance(asked, list) else [asked]
        for arg in call.parts:
            dims = [d % len(arg.spec.shape) for d in named if isinstance(d, int)]
            if not dims or arg.dim in dims:
                raise Unsplittable("it mixes rows of the batch")
        return _rows(call)

    return rule


def view(call: Call) -> list[Formed]:
    """The same memory looked at differently."""
    if call.sums:
        return [(call.sums[0].form, 0)] * len(call.out_elements)
    return [(Form.PART, call.parts[0].outer)] * len(call.out_elements)


def copy(call: Call) -> list[Formed]:
    """A copy in the order of its dimensions."""
    if call.sums:
        return view(call)
    first = call.parts[0]
    return _rows(call, _outer_of(first))


def put_back(call: Call) -> list[Formed]:
    """The gradient of a selection: zeros of the whole size with one place of a dimension filled."""
    _only_parts(call)
    arg, whole = call.args[0], call.numbers(1)
    selected = len(whole) > len(arg.spec.shape)
    dim = call.number(2) % max(len(whole), 1)
    if not selected and arg.dim == dim:
        raise Unsplittable("it mixes rows of the batch")
    rows = arg.dim + (selected and arg.dim >= dim)
    return _rows(call, max(math.prod(whole[:rows]), 1))


def reduction(mean: bool) -> Rule:
    """A sum or mean over dimensions: over the rows it gives each replica a share."""

    def rule(call: Call) -> list[Formed]:
        if call.sums:
            return pointwise(call)
        arg = call.args[0]
        rank = len(arg.spec.shape)
        dims = [d % rank for d in call.numbers(1)] or list(range(rank))
        if arg.dim in dims:
            return [WEIGHTED if mean else SUM] * len(call.out_elements)
        return _rows(
            call, max(math.prod(n for d, n in enumerate(arg.spec.shape[: arg.dim]) if d not in dims), 1)
        )

    return rule


def _slices(arg: Arg, dim: int, batch: int) -> bool:
    """Whether a replica may take its rows of something it has whole."""
    return not arg.weight and arg.spec.shape[dim] % batch == 0


def product(first: int) -> Rule:
    """A matrix product of the arguments `first` and next: over the last and the last but one dimension."""

    def rule(call: Call) -> list[Formed]:
        a, b = call.args[first : first + 2]
        added = call.args[:first]
        left = len(a.spec.shape) - 1
        right = max(len(b.spec.shape) - 2, 0)
        if call.sums:
            if len(call.sums) == 1 and not call.parts and call.sums[0] in (a, b):
                return [SUM if call.sums[0].form == Form.SUM else WEIGHTED]
            raise Unsplittable("it needs a sum over all rows in the middle of the step")
        if any(arg.form == Form.PART for arg in added):
            raise Unsplittable("what is added has rows")
        over_a, over_b = a.dim == left, b.dim == right
        if over_a or over_b:  # summed over rows
            fits = (over_a or (a.form == Form.FULL and _slices(a, left, call.batch))) and (
                over_b or (b.form == Form.FULL and _slices(b, right, call.batch))
            )
            if not fits or added:
                raise Unsplittable("it multiplies rows of the batch with each other")
            return [SUM]
        batched = len(a.spec.shape) > 2 and len(b.spec.shape) > 2
        if batched and a.form == b.form == Form.PART and a.dim == b.dim < left - 1:
            return _rows(call, _outer_of(a))
        if a.form == Form.PART and b.form == Form.FULL:
            if batched and b.spec.shape[a.dim] > 1 and a.dim < left - 1:
                if b.weight:
                    raise Unsplittable("a weight has one value for each row of the batch")
                return _rows(call, _outer_of(a))
            return _rows(call, _outer_of(a))
        raise Unsplittable("it multiplies rows of the batch with each other")

    return rule


def linear(call: Call) -> list[Formed]:
    """x W^T + b."""
    if call.args[0].form == Form.PART and call.args[0].dim == len(call.args[0].spec.shape) - 1:
        raise Unsplittable("it mixes rows of the batch")
    if any(arg.form != Form.FULL for arg in call.args[1:]):
        raise Unsplittable("its weight depends on the rows")
    if call.sums:
        if len(call.args) > 2:
            raise Unsplittable("it adds a partial sum to something that every replica has whole")
        return [(call.sums[0].form, 0)]
    return _rows(call, _outer_of(call.args[0]))


def embedding(call: Call) -> list[Formed]:
    """Rows of a table."""
    _only_parts(call)
    if call.args[0].form != Form.FULL:
        raise Unsplittable("its table depends on the rows")
    return _rows(call, _outer_of(call.parts[0]))


def summed_gradient(call: Call) -> list[Formed]:
    """A gradient that is summed over everything: of the table of an embedding."""
    if call.sums:
        if call.parts or len(call.sums) > 1:
            raise Unsplittable("it needs a sum over all rows in the middle of the step")
        return [(call.sums[0].form, 0)] * len(call.out_elements)
    return [SUM] * len(call.out_elements)


def with_weights(call: Call) -> list[Formed]:
    """A gradient of rows beside gradients of weights: outputs as large as a weight are sums over the rows."""
    _only_parts(call)
    if any(arg.dim != 0 for arg in call.parts):
        raise Unsplittable("the rows are not its first dimension")
    rows = max(math.prod(arg.spec.shape) for arg in call.parts[1:])
    first = call.out_elements[0] == rows
    return [
        (Form.PART, _like(call.parts[0])) if first and at == 0 else SUM
        for at in range(len(call.out_elements))
    ]


def norm(call: Call) -> list[Formed]:
    """Normalisation over the last dimensions."""
    _only_parts(call)
    arg, lasting = call.args[0], len(call.numbers(1))
    if arg.dim >= len(arg.spec.shape) - max(lasting, 1):
        raise Unsplittable("it normalises over rows of the batch")
    return _rows(call)


def norm_gradient(call: Call) -> list[Formed]:
    """Gradients of a normalisation: of rows, then of weight and bias."""
    _only_parts(call)
    widest = max(call.out_elements)
    seen = False
    out: list[Formed] = []
    for elements in call.out_elements:
        rows = elements == widest and not seen
        seen = seen or rows
        out.append((Form.PART, _like(call.parts[0])) if rows else SUM)
    return out


def batch_norm(call: Call) -> list[Formed]:
    """Rows with statistics: each replica has its own; said as a deviation where it trains."""
    return [rowwise(call)[0], *[FULL] * (len(call.out_elements) - 1)]


def loss(mean_at: int) -> Rule:
    """A loss over rows; `mean_at` is where the call says how it is reduced (2 = sum, else mean)."""

    def rule(call: Call) -> list[Formed]:
        _only_parts(call)
        given = call.signature.args[mean_at] if mean_at < len(call.signature.args) else 1
        if any(arg.dim != 0 for arg in call.parts):
            raise Unsplittable("the rows are not its first dimension")
        out: list[Formed] = []
        for elements in call.out_elements:
            if elements > 1:
                out.append((Form.PART, _like(call.parts[0])))
            else:
                out.append(SUM if given == 2 or any(f == WEIGHTED for f in out) else WEIGHTED)
        return out

    return rule


def loss_gradient(call: Call) -> list[Formed]:
    """The gradient of a loss: its scalars are those of the replica's own rows."""
    rows = call.parts
    if not rows or any(arg.dim != 0 for arg in rows):
        raise Unsplittable("the rows are not its first dimension")
    if any(math.prod(arg.spec.shape) > 1 for arg in call.sums):
        raise Unsplittable("it needs a sum over all rows in the middle of the step")
    return [(Form.PART, _like(rows[0]))] * len(call.out_elements)


def shape_only(call: Call) -> list[Formed]:
    """Reads the shape alone."""
    if call.parts:
        return _rows(call)
    return [FULL] * len(call.out_elements)


def attention(call: Call) -> list[Formed]:
    """Attention within each row."""
    _only_parts(call)
    if any(arg.dim != 0 for arg in call.parts):
        raise Unsplittable("the rows are not its first dimension")
    return _rows(call)


_ADDITIVE = ("add", "sub", "cat", "stack")
_LINEAR = (*_ADDITIVE, "mul", "div", "neg", "sum", "mean", "to", "_to_copy", "copy", "squeeze", "alias")
_NAMES: list[tuple[Rule, str]] = [
    (
        pointwise,
        """
abs add addcmul addcdiv and bitwise_and bitwise_not bitwise_or ceil clamp clamp_min clamp_max copy cos div
elu elu_backward eq erf exp fill floor fmod ge gelu gelu_backward gt hardswish hardswish_backward hardsigmoid
hardtanh hardtanh_backward isnan le leaky_relu leaky_relu_backward lift_fresh_copy log log1p logical_and
logical_not logical_or lt masked_fill maximum minimum mish mul ne neg pow reciprocal relu relu6 remainder
round rsqrt rsub sgn sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt
square sub tanh tanh_backward threshold_backward to type_as where _to_copy zeros_like dropout native_dropout
native_dropout_backward float pad constant_pad_nd
""",
    ),
    (view, "alias detach permute t transpose unsqueeze view _unsafe_view unflatten squeeze view_as movedim"),
    (view, "_reshape_alias detach_copy expand expand_as"),
    (copy, "clone contiguous reshape flatten"),
    (rowwise, "conv1d conv2d conv3d convolution _conv_depthwise2d conv_transpose2d group_norm"),
    (rowwise, "max_pool2d avg_pool2d max_pool2d_with_indices adaptive_avg_pool2d _adaptive_avg_pool2d"),
    (rowwise, "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"),
    (along(1, -1), "softmax _softmax log_softmax _log_softmax sort"),
    (along(2, -1), "_log_softmax_backward_data _softmax_backward_data topk"),
    (along(1), "cumsum cumprod argmax argmin flip any all amax amin max min"),
    (along(2), "split roll unbind chunk split_with_sizes"),
    (put_back, "slice_backward select_backward"),
    (along(1, 0), "slice select narrow cat stack gather index_select"),
    (reduction(mean=False), "sum"),
    (reduction(mean=True), "mean"),
    (product(0), "mm bmm matmul"),
    (product(1), "addmm"),
    (linear, "linear"),
    (embedding, "embedding"),
    (summed_gradient, "embedding_dense_backward"),
    (with_weights, "convolution_backward"),
    (norm, "layer_norm native_layer_norm rms_norm _fused_rms_norm"),
    (norm_gradient, "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward"),
    (norm_gradient, "native_batch_norm_backward"),
    (batch_norm, "batch_norm native_batch_norm _native_batch_norm_legit"),
    (loss(3), "cross_entropy_loss nll_loss_forward"),
    (loss(2), "mse_loss l1_loss"),
    (loss(4), "binary_cross_entropy_with_logits"),
    (loss_gradient, "nll_loss_backward mse_loss_backward"),
    (shape_only, "ones_like full_like new_zeros new_empty_strided"),
    (attention, "scaled_dot_product_attention _scaled_dot_product_efficient_attention_backward"),
    (attention, "_scaled_dot_product_flash_attention_backward"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu_backward"),
    (attention, "_scaled_dot_product_fused_attention_overrideable_backward"),
]
RULES: dict[str, Rule] = {name: rule for rule, names in _NAMES for name in names.split()}

"""Factors: the gradient of a layer's weight made from the rows of all replicas instead of a sum of matrices.

Of a linear layer y = x W^T the gradient over all rows is dY^T X. Every replica sends its rows of X and dY to
the others and makes the product of all: that is less to send than W itself where rows are fewer than
2 H1 H2 / (H1 + H2). (Xie et al., "Distributed Machine Learning via Sufficient Factor Broadcasting", 2015,
section 3.) Convolutions are treated alike, with whole images as rows.

X and dY leave during the backward pass, as soon as dY is there; the products are made at its end.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from loadmaster.core.errors import PlanError
from loadmaster.runtime.distributed.pipeline.deferred_weights import (
    ADDMM,
    CONV2D,
    LINEAR,
    add_to,
)
from loadmaster.runtime.distributed.strategy.layout import RowShare
from loadmaster.runtime.distributed.strategy.wire import Arriving, Wire

_NOW = threading.local()
_TAGS = 1 << 20  # first tag of factors
_MOST_CALLS = 1 << 8  # of one layer in a step


@dataclass(slots=True)
class _Gathering:
    """One call of a layer: rows of all ranks, in order."""

    layer: Any
    args: tuple[Any, ...]
    weight: Any
    bias: Any
    inputs: list[torch.Tensor | Arriving]
    grads: list[torch.Tensor | Arriving]


@dataclass(slots=True)
class Factors:
    """The layers of a rank whose gradients are made from factors."""

    wire: Wire
    share: Mapping[str, RowShare]  # of each weight
    names: Mapping[int, str]  # of weights by identity
    number: Mapping[str, int] = field(default_factory=dict)  # the same on all ranks
    _calls: dict[str, int] = field(default_factory=dict)
    _under_way: list[_Gathering] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Number the weights."""
        self.number = {name: at for at, name in enumerate(sorted(self.share))}

    def name_of(self, weight: Any) -> str | None:
        """The name of a weight whose gradient is made from factors."""
        return self.names.get(id(weight))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Layers that run meanwhile send their factors in the backward pass."""
        before = getattr(_NOW, "factors", None)
        _NOW.factors = self
        self._calls.clear()
        try:
            yield
        finally:
            _NOW.factors = before

    def gather(
        self, layer: Any, args: tuple[Any, ...], weight: Any, bias: Any, x: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """Send this rank's rows to the others, and begin to receive theirs."""
        name = self.names[id(weight)]
        share, wire = self.share[name], self.wire
        call = self._calls[name] = self._calls.get(name, 0) + 1
        if call > _MOST_CALLS:
            raise PlanError(f"layer {name!r} runs more than {_MOST_CALLS} times a step; leave it out of sfb")
        tag = _TAGS + 2 * (self.number[name] * _MOST_CALLS + call)
        begin, end = share.bounds(wire.rank)
        rows = end - begin
        x, grad = layer.as_rows(x), layer.as_rows(grad)
        if len(x) % rows:
            raise PlanError(
                f"layer {name!r} is given {len(x)} rows for {rows} of the batch; leave it out of sfb"
            )
        each, found = len(x) // rows, ([], [])  # type: tuple[int, tuple[list[Any], list[Any]]]
        for rank, count in zip(share.ranks, share.rows, strict=True):
            for at, own in enumerate((x, grad)):
                if rank == wire.rank:
                    found[at].append(own)
                    continue
                what = f"the factors of {name!r}"
                wire.send(own, rank, tag + at, f"rank {rank} to take {what}", "sfb")
                shape = (each * count, *own.shape[1:])
                found[at].append(wire.receive(shape, own.dtype, rank, tag + at, f"{what} from rank {rank}"))
        self._under_way.append(_Gathering(layer, args, weight, bias, *found))

    def finish(self) -> None:
        """Make the gradients of what was gathered."""
        under_way, self._under_way = self._under_way, []
        made = set()
        with torch.no_grad():
            for one in under_way:
                x, grad = _join(one.inputs), _join(one.grads)
                add_to(one.weight, one.layer.to_weight(grad, x, one.weight, one.args))
                if one.bias is not None:
                    add_to(one.bias, one.layer.to_bias(grad))
                made |= {self.names[id(each)] for each in (one.weight, one.bias) if each is not None}
        lost = sorted(set(self.share) - made)
        if lost:
            raise PlanError(
                f"no layer made factors of {lost[0]!r}; only linear, addmm and conv2d that are trained have"
                " them, and a bias with its weight: leave it out of sfb"
            )


def _join(parts: list[torch.Tensor | Arriving]) -> torch.Tensor:
    return torch.cat([one.wait() if isinstance(one, Arriving) else one for one in parts])


class _FactorLayer(torch.autograd.Function):
    """A layer that sends its factors in the backward pass."""

    @staticmethod
    def forward(ctx: Any, layer: Any, args: tuple[Any, ...], x: Any, weight: Any, bias: Any) -> Any:
        ctx.layer, ctx.args, ctx.factors = layer, args, _NOW.factors
        ctx.weights = weight, bias
        ctx.save_for_backward(x, weight)
        return layer.run(x, weight, bias, args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        own, bias = ctx.weights
        layer, args, needs, factors = ctx.layer, ctx.args, ctx.needs_input_grad, ctx.factors
        joint = bias if bias is not None and factors.name_of(bias) is not None and needs[4] else None
        factors.gather(layer, args, own, joint, x.detach().to(grad.dtype), grad.detach())
        to_x = layer.to_input(grad, x, weight, args).to(x.dtype) if needs[2] else None
        to_bias = layer.to_bias(grad).to(bias.dtype) if needs[4] and joint is None else None
        return None, None, to_x, None, to_bias


def factor_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """y = x W^T + b."""
    return _FactorLayer.apply(LINEAR, (), x, weight, bias)


def factor_addmm(bias: Any, x: Any, weight: Any) -> Any:
    """y = x W + b."""
    return _FactorLayer.apply(ADDMM, (), x, weight, bias)


def factor_conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A convolution of images."""
    return _FactorLayer.apply(CONV2D, (stride, padding, dilation, groups), x, weight, bias)


_FUNCTIONS: Mapping[Any, tuple[Callable[..., Any], int]] = {  # and which argument is the weight
    torch.nn.functional.linear: (factor_linear, 1),
    torch.addmm: (factor_addmm, 2),
    torch.nn.functional.conv2d: (factor_conv2d, 1),
    torch.conv2d: (factor_conv2d, 1),
}
FACTOR_OPS: Mapping[Any, tuple[Callable[..., Any], int]] = {  # of an exported graph
    torch.ops.aten.linear.default: (factor_linear, 1),
    torch.ops.aten.addmm.default: (factor_addmm, 2),
    torch.ops.aten.conv2d.default: (factor_conv2d, 1),
}


class FactorMode(TorchFunctionMode):
    """Runs the layers of a user's own forward as layers that send factors; refuses other readers."""

    def __init__(self, factors: Factors) -> None:
        super().__init__()
        self._factors = factors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch that the forward calls."""
        kwargs = kwargs or {}
        instead, at = _FUNCTIONS.get(func, (None, 0))
        if instead is not None:
            weight = args[at] if len(args) > at else kwargs.get("weight", kwargs.get("mat2"))
            if self._factors.name_of(weight) is not None:
                return instead(*args, **kwargs)
        elif getattr(func, "__name__", "") != "__get__":
            for one in (*args, *kwargs.values()):
                name = self._factors.name_of(one) if isinstance(one, torch.nn.Parameter) else None
                if name is not None and not _is_bias(self._factors, name):
                    raise PlanError(
                        f"{getattr(func, '__name__', func)!r} reads weight {name!r}, whose gradient is to be"
                        " made from factors; only linear, addmm and conv2d have them: leave it out of sfb"
                    )
        return func(*args, **kwargs)


def _is_bias(factors: Factors, name: str) -> bool:
    return name.rpartition(".")[2] == "bias"

"""Deferred weights: the backward pass of a stage in two parts, as zero-bubble schedules have it.

The first part computes what the stage before waits for. What it needs of linear layers and convolutions for
the gradients of their weights is put aside, and the second part adds these gradients later. All other
gradients (norms, embeddings) are added in the first part; they are small. (Qi et al., "Zero Bubble Pipeline
Parallelism", ICLR 2024, section 2.)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NOW = threading.local()


class DeferredWeights:
    """The gradients of weights that one micro-batch put aside."""

    def __init__(self) -> None:
        self._held: list[Callable[[], None]] = []
        self.holds = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Layers that run meanwhile know where their gradients may wait."""
        before = getattr(_NOW, "deferred", None)
        _NOW.deferred = self
        try:
            yield
        finally:
            _NOW.deferred = before

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Gradients of weights are put aside meanwhile."""
        self.holds = True
        try:
            yield
        finally:
            self.holds = False

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Nothing is put aside."""
        self.holds = False
        yield

    def hold(self, way: Callable[[], None]) -> None:
        """Put one aside."""
        self._held.append(way)

    def add(self) -> None:
        """Add what was put aside to the gradients."""
        held, self._held = self._held, []
        for way in held:
            way()


def add_to(weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to the gradient of a weight."""
    grad = grad.to(weight.dtype)
    if weight.grad is None:
        weight.grad = grad.detach().clone(memory_format=torch.preserve_format)
    else:
        weight.grad += grad


class _Layer(torch.autograd.Function):
    """A layer whose gradients of weights may wait."""

    @staticmethod
    def forward(ctx: Any, rule: Any, args: tuple[Any, ...], x: Any, weight: Any, bias: Any) -> Any:
        ctx.rule, ctx.args, ctx.has_bias = rule, args, bias is not None
        ctx.deferred = getattr(_NOW, "deferred", None)
        ctx.weights = weight, bias
        ctx.save_for_backward(x, weight)
        return rule.run(x, weight, bias, args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        own, bias = ctx.weights
        rule, args, needs = ctx.rule, ctx.args, ctx.needs_input_grad
        to_x = rule.to_input(grad, x, weight, args).to(x.dtype) if needs[2] else None
        held = ctx.deferred is not None and ctx.deferred.holds

        def add_weights() -> None:
            with torch.no_grad():
                if needs[3]:
                    add_to(own, rule.to_weight(grad, x, weight, args))
                if needs[4]:
                    add_to(bias, rule.to_bias(grad))

        if held:
            ctx.deferred.hold(add_weights)
            return None, None, to_x, None, None
        to_weight = rule.to_weight(grad, x, weight, args).to(weight.dtype) if needs[3] else None
        to_bias = rule.to_bias(grad).to(bias.dtype) if needs[4] else None
        return None, None, to_x, to_weight, to_bias


class _Linear:
    """y = x W^T + b."""

    @staticmethod
    def run(x: Any, weight: Any, bias: Any, args: Any) -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def to_input(grad: Any, x: Any, weight: Any, args: Any) -> Any:
        return grad @ weight.to(grad.dtype)

    @staticmethod
    def to_weight(grad: Any, x: Any, weight: Any, args: Any) -> Any:
        flat = grad.reshape(-1, grad.shape[-1])
        return flat.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype)

    @staticmethod
    def to_bias(grad: Any) -> Any:
        return grad.reshape(-1, grad.shape[-1]).sum(0)

    @staticmethod
    def as_rows(one: Any) -> Any:
        return one.reshape(-1, one.shape[-1])


class _Addmm:
    """y = x W + b."""

    @staticmethod
    def run(x: Any, weight: Any, bias: Any, args: Any) -> Any:
        return torch.addmm(bias, x, weight)

    @staticmethod
    def to_input(grad: Any, x: Any, weight: Any, args: Any) -> Any:
        return grad @ weight.t().to(grad.dtype)

    @staticmethod
    def to_weight(grad: Any, x: Any, weight: Any, args: Any) -> Any:
        return x.t().to(grad.dtype) @ grad

    @staticmethod
    def to_bias(grad: Any) -> Any:
        return grad.sum(0)

    @staticmethod
    def as_rows(one: Any) -> Any:
        return one


class _Conv2d:
    """A convolution of images."""

    @staticmethod
    def run(x: Any, weight: Any, bias: Any, args: Any) -> Any:
        return torch.nn.functional.conv2d(x, weight, bias, *args)

    @staticmethod
    def to_input(grad: Any, x: Any, weight: Any, args: Any) -> Any:
        return torch.nn.grad.conv2d_input(list(x.shape), weight.to(grad.dtype), grad, *args)

    @staticmethod
    def to_weight(grad: Any, x: Any, weight: Any, args: Any) -> Any:
        return torch.nn.grad.conv2d_weight(x.to(grad.dtype), list(weight.shape), grad, *args)

    @staticmethod
    def to_bias(grad: Any) -> Any:
        return grad.sum((0, 2, 3))

    @staticmethod
    def as_rows(one: Any) -> Any:
        return one


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """`aten.linear`, whose gradients of weights may wait."""
    return _Layer.apply(_Linear, (), x, weight, bias)


def addmm(bias: Any, x: Any, weight: Any) -> Any:
    """`aten.addmm` without factors."""
    if bias.dim() != 1 or bias.shape[0] != weight.shape[1]:
        return torch.addmm(bias, x, weight)
    return _Layer.apply(_Addmm, (), x, weight, bias)


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """`aten.conv2d`."""
    return _Layer.apply(_Conv2d, (stride, padding, dilation, groups), x, weight, bias)


DEFERRABLE: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = {  # instead of an op; which are weights
    torch.ops.aten.linear.default: (linear, (1, 2)),
    torch.ops.aten.addmm.default: (addmm, (0, 2)),
    torch.ops.aten.conv2d.default: (conv2d, (1, 2)),
}
LINEAR, ADDMM, CONV2D = _Linear, _Addmm, _Conv2d  # how each layer runs, and its gradients

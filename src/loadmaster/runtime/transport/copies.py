"""Copies: a tensor on another device, and the edges along which its gradient comes home.

            x (cpu#0) ──carried──► c (cpu#1)           one copy per device
            │                      │
            ├────── joined ────────┼──► first reader    one edge per reader: its gradient is copied home and
            └────── joined ────────┴──► second reader   added there, in the order of the unplaced model

A copy has the strides of its original, or at least its axes in the same order in memory and gaps where the
original has gaps: kernels add up in another order, and round otherwise, where an axis joins its neighbour.
"""

import functools
import weakref
from typing import Any

import torch

from loadmaster.runtime.transport.cuda_copies import CopyStreams

NOWHERE = -1
_MOST_GAPS = 2  # a copy that would take more times the bytes of its elements has narrower gaps
_ALIGNED = 16  # narrower strides stay aligned as they were, up to so many elements: kernels ask for that


def copy_to_device(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """The same values in new memory on a device, without a gradient."""
    with torch.no_grad():
        return _copy_with_strides(tensor.detach(), where)


def link_gradient(tensor: torch.Tensor, copy: torch.Tensor, home: int = NOWHERE) -> torch.Tensor:
    """The copy for one reader, its gradient going to the original, which is on device `home`."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        if tensor.is_leaf and tensor.is_cuda and not copy.is_cuda:
            tensor = tensor.view_as(tensor)  # on the stream of its home; what comes from the host has none
        return _CopyEdge.apply(tensor, copy, home)
    return copy


def _send_home(grad: torch.Tensor, where: torch.device, home: int) -> torch.Tensor:
    """A gradient at home; one that two readers hand on as it is (of a sum) is sent there once.

    Whoever takes it reads it only, or autograd sees that it is shared.
    """
    if home == NOWHERE:
        return copy_to_device(grad, where)
    sent: dict[int, tuple[int, Any]] = grad.__dict__.setdefault("_loadmaster_sent", {})
    version, made = sent.get(home, (-1, lambda: None))
    known: torch.Tensor | None = made() if version == grad._version else None
    if known is None:
        known = copy_to_device(grad, where)
        sent[home] = (grad._version, weakref.ref(known))
    return known


def move_to_device(tensor: Any, where: torch.device) -> Any:
    """A tensor on a device, itself if it is there; what is no tensor stays itself."""
    if not isinstance(tensor, torch.Tensor) or tensor.device == where:
        return tensor
    if where.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(where, non_blocking=True)  # torch keeps pinned memory until it is read
    return tensor.to(where)


class _CopyEdge(torch.autograd.Function):
    """Forward: the copy. Backward: the gradient, copied to where the original is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: torch.Tensor, home: int) -> torch.Tensor:
        """The copy's memory under a name of its own."""
        ctx.where, ctx.home = tensor.device, home
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient of one reader, at home; one that has a gradient of its own keeps it."""
        if torch.is_grad_enabled() and grads[0].requires_grad:
            return _DifferentiableCopy.apply(grads[0], ctx.where), None, None
        return _send_home(grads[0], ctx.where, ctx.home), None, None


class _DifferentiableCopy(torch.autograd.Function):
    """A gradient at home, in a backward pass that will itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, where: torch.device) -> torch.Tensor:
        """A copy."""
        ctx.where = grad.device
        return copy_to_device(grad, where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Its gradient goes back."""
        if torch.is_grad_enabled() and grads[0].requires_grad:
            return _DifferentiableCopy.apply(grads[0], ctx.where), None
        return copy_to_device(grads[0], ctx.where), None


def _copy_with_strides(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """New memory with the same strides, or denser ones in the same order; an expanded axis is copied once."""
    if tensor.layout != torch.strided:
        return tensor.to(where, copy=True)
    narrow = tensor
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            narrow = narrow.narrow(axis, 0, 1)
    if narrow.is_cuda or where.type == "cuda":
        made = _get_copy_streams().make_copy(narrow, where, allocate_like)
    else:
        made = allocate_like(narrow, where)
        made.copy_(narrow)
    return made if narrow is tensor else made.expand(tensor.shape)


@functools.cache
def _get_copy_streams() -> CopyStreams:
    """Streams belong to the process, as devices do."""
    return CopyStreams()


def allocate_like(tensor: torch.Tensor, where: torch.device, pinned: bool = False) -> torch.Tensor:
    """Empty memory for a tensor's values, with its strides; with narrower gaps where they are wide.

    The order of the axes stays: some kernels add in another order when they read a matrix the other way.
    A gap stays one: an axis that is not next to its neighbour is read in a loop of its own.
    """
    sizes = tuple(tensor.shape)
    if tensor.is_contiguous():
        return torch.empty(sizes, dtype=tensor.dtype, device=where, pin_memory=pinned)
    strides = tensor.stride() if _keeps_strides(tensor) else _narrow_strides(tensor)
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=where, pin_memory=pinned)


def _narrow_strides(tensor: torch.Tensor) -> list[int]:
    """Strides with the narrowest gaps, the axes in the order they have in memory."""
    found, span, full = [0] * tensor.ndim, 1, 1  # `full`: the span in the original
    for axis in sorted(range(tensor.ndim), key=lambda axis: (tensor.stride(axis), -axis)):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        found[axis] = span
        if size > 1 and stride > full:
            aligned = max(2, min(_ALIGNED, 1 << (span.bit_length() - 1)))  # also pairs: complex numbers
            found[axis] += 1 + (stride - span - 1) % aligned
        span, full = found[axis] * max(1, size), stride * max(1, size)
    return found


def _keeps_strides(tensor: torch.Tensor) -> bool:
    """Whether the strides leave few gaps and no two elements share memory."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += (size - 1) * stride
    return 0 < span <= _MOST_GAPS * tensor.numel()

"""What torch's own TransformerEncoder returns at padded positions if no gradient is taken.

There it packs the batch into nested tensors, and padding comes out as zeros. It does so neither when it is
exported nor under a function mode. So such a call is run by hooks, which put the zeros where torch has them.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import GraphError


@contextmanager
def refuse_packing(model: nn.Module) -> Iterator[None]:
    """No graph is made of a call that may pack: whether it does depends on the values of the mask."""

    def refuse(encoder: Any, args: Any, kwargs: Any) -> None:
        if _find_padding(encoder, args, kwargs) is not None:
            raise GraphError("nn.TransformerEncoder packs padded batches where no gradient is taken")

    with ExitStack() as stack:
        for encoder in _find_packing_encoders(model):
            stack.callback(encoder.register_forward_pre_hook(refuse, with_kwargs=True).remove)
        yield


@contextmanager
def zero_padding(model: nn.Module) -> Iterator[None]:
    """The last layer of each encoder gives zeros where torch would."""
    with ExitStack() as stack:
        for encoder in _find_packing_encoders(model):
            paddings: list[Any] = []

            def begin(encoder: Any, args: Any, kwargs: Any, paddings: list[Any] = paddings) -> None:
                padding = _find_padding(encoder, args, kwargs)
                paddings[:] = [padding] if padding is not None and _is_packed(encoder, padding) else []

            def end(layer: Any, args: Any, out: Any, paddings: list[Any] = paddings) -> Any:
                return out.masked_fill(paddings.pop().unsqueeze(-1), 0.0) if paddings else out

            stack.callback(encoder.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(encoder.layers[-1].register_forward_hook(end).remove)
        yield


def _find_packing_encoders(model: nn.Module) -> list[Any]:
    """Those that torch allows to pack, as they were built."""
    encoders = [one for one in model.modules() if isinstance(one, nn.TransformerEncoder)]
    return [one for one in encoders if getattr(one, "use_nested_tensor", False)]


def _find_padding(encoder: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """True where the batch is padded; None where torch does not pack, whatever the values are."""
    given = inspect.signature(encoder.forward).bind(*args, **kwargs).arguments
    source, padding = given["src"], given.get("src_key_padding_mask")
    first = encoder.layers[0]
    if padding is None or given.get("mask") is not None or first.training or source.dim() != 3:
        return None
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return None
    weights = [source, *first.parameters()]
    if torch.is_grad_enabled() and any(one.requires_grad for one in weights):
        return None
    return padding if padding.dtype == torch.bool else padding != 0


def _is_packed(encoder: Any, padding: torch.Tensor) -> bool:
    """Only where padding comes last, if it is looked at."""
    early = padding[:, :-1] & ~padding[:, 1:]
    return not getattr(encoder, "mask_check", True) or not bool(early.any())

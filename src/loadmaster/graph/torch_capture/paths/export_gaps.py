"""What a training step does that `torch.export` does not record; such a model is traced instead.

    torch.utils.checkpoint    activations are thrown away and computed again; both of its ways
    torch.autograd.Function   a gradient of the user's own: the exported graph would take autograd's
    Tensor.register_hook      a gradient changed on its way; backward hooks of modules are such functions

A library may do something else because it is exported; what is known of that is kept from it
(`hide_export_from_masks`).

Autograd's nodes of the older, reentrant way of checkpointing say nothing of what is computed again, so where
the backward pass is estimated the newer way is taken instead (`replace_reentrant_checkpoints`); both compute
the same.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import nn

from loadmaster.graph.torch_capture.paths.known_positions import PositionTracker, is_full, is_one_sequence
from loadmaster.modules.fake_model import list_parameters
from loadmaster.modules.full_masks import name_arguments


class Unexported(Exception):  # noqa: N818
    """The exported graph would not train as the model does."""


@contextlib.contextmanager
def refuse_unexportable(*, train: bool) -> Iterator[None]:
    """All of the above raise; in inference all but checkpoints are harmless."""
    again = _make_refusal("torch.utils.checkpoint")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_patch_attribute(checkpoints, "_checkpoint_without_reentrant_generator", again))
        stack.enter_context(_patch_attribute(checkpoints, "CheckpointFunction", _make_apply_class(again)))
        if train:
            stack.enter_context(_patch_attribute(torch.autograd.Function, "apply", _make_apply_refusal()))
            stack.enter_context(
                _patch_attribute(torch.Tensor, "register_hook", _make_refusal("Tensor.register_hook"))
            )
        yield


@contextlib.contextmanager
def replace_reentrant_checkpoints() -> Iterator[None]:
    """The reentrant way of checkpointing becomes the other."""

    def newer(function: Any, keeps_rng: bool, *args: Any) -> Any:
        return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keeps_rng)

    with _patch_attribute(checkpoints, "CheckpointFunction", _make_apply_class(newer)):
        yield


@contextlib.contextmanager
def hide_export_from_masks(model: nn.Module, full_masks: frozenset[str]) -> Iterator[None]:
    """Masks of `transformers` are made as in a step that is not exported: where none is given, there is none.

    Exported, it would write causality out as a mask, which takes another kernel and rounds otherwise. A mask
    that is given, and positions that are, are tensors without values here, and masks come of them; but for
    the arguments that are known to mask nothing (`full_masks`).
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not all(hasattr(masks, name) for name in ("is_tracing", "find_packed_sequence_indices")):
        yield
        return
    traces, packed, positions = masks.is_tracing, masks.find_packed_sequence_indices, PositionTracker()
    right = getattr(masks, "fast_all", None)
    if right is None:  # nobody looks by a name that is known here
        full_masks, right = frozenset(), bool

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and positions.value_of(tensor) is None and traces(tensor)

    def all_unless_known(tensor: Any) -> Any:
        value = positions.value_of(tensor)
        return right(tensor) if value is None else is_full(value)

    def packed_unless_counted(position_ids: Any) -> Any:
        value = positions.value_of(position_ids)
        return None if value is not None and is_one_sequence(value) else packed(position_ids)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_patch_attribute(masks, "is_torchdynamo_exporting", lambda: False))
        stack.enter_context(_patch_attribute(masks, "is_tracing", is_tracing))
        stack.enter_context(_patch_attribute(masks, "find_packed_sequence_indices", packed_unless_counted))
        stack.enter_context(_patch_attribute(masks, "fast_all", all_unless_known))
        stack.enter_context(_tell_full_masks(model, full_masks, positions))
        stack.enter_context(positions)
        yield


@contextlib.contextmanager
def _tell_full_masks(
    model: nn.Module, full_masks: frozenset[str], positions: PositionTracker
) -> Iterator[None]:
    """When the model is called, the tracker learns which of the tensors it is given mask nothing."""
    names, before, right = list_parameters(model), model.__dict__.get("forward"), model.forward

    @functools.wraps(right)
    def forward(*args: Any, **kwargs: Any) -> Any:
        named = name_arguments(names, args, kwargs)
        for name in full_masks & set(named):
            positions.learn_ones(named[name])
        return right(*args, **kwargs)

    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if before is not None:
            model.__dict__["forward"] = before


def _make_refusal(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unexported(f"the model uses {what}; capture it with path='traced'")

    return refuse


def _make_apply_refusal() -> Any:
    """Gradients of the user's own are refused; those of an op of `torch.library` come with the op."""
    right, refuse = vars(torch.autograd.Function)["apply"], _make_refusal("a torch.autograd.Function")

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        registered = cls.__module__ == "torch._library.autograd"
        return right.__func__(cls, *args, **kwargs) if registered else refuse()

    return classmethod(apply)


def _make_apply_class(function: Any) -> type:
    return type("CheckpointFunction", (), {"apply": staticmethod(function)})


@contextlib.contextmanager
def _patch_attribute(home: Any, name: str, way: Any) -> Iterator[None]:
    """Another thing of that name, whoever imported it from there, for a while."""
    if not hasattr(home, name):
        yield
        return
    before = vars(home)[name]
    try:
        setattr(home, name, way)
        yield
    finally:
        setattr(home, name, before)

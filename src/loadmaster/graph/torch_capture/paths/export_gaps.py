"""Unexported: what a training step does and `torch.export` keeps no trace of; such a model is traced.

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
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints

from loadmaster.graph.torch_capture.paths.known_positions import PositionTracker, is_one_sequence


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
            own: Any = classmethod(_make_refusal("a torch.autograd.Function"))
            stack.enter_context(_patch_attribute(torch.autograd.Function, "apply", own))
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
def hide_export_from_masks() -> Iterator[None]:
    """Masks of `transformers` are made as in a step that is not exported: where none is given, there is none.

    Exported, it would write causality out as a mask, which takes another kernel and rounds otherwise. A mask
    that is given, and positions that are, are tensors without values here, and masks come of them.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not all(hasattr(masks, name) for name in ("is_tracing", "find_packed_sequence_indices")):
        yield
        return
    traces, packed, positions = masks.is_tracing, masks.find_packed_sequence_indices, PositionTracker()

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and traces(tensor)

    def packed_unless_counted(position_ids: Any) -> Any:
        value = positions.value_of(position_ids)
        return None if value is not None and is_one_sequence(value) else packed(position_ids)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_patch_attribute(masks, "is_torchdynamo_exporting", lambda: False))
        stack.enter_context(_patch_attribute(masks, "is_tracing", is_tracing))
        stack.enter_context(_patch_attribute(masks, "find_packed_sequence_indices", packed_unless_counted))
        stack.enter_context(positions)
        yield


def _make_refusal(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unexported(f"the model uses {what}; capture it with path='traced'")

    return refuse


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

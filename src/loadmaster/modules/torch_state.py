"""Settings of torch that hold for the whole process, changed for a while or put right after a failure."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def leave_transforms() -> None:
    """A failure inside of vmap or grad leaves torch inside of it."""
    functorch = torch._C._functorch
    if hasattr(functorch, "pop_dynamic_layer_stack_and_undo_to_depth"):
        # torch 2.11 takes all off and then finds that there is none
        with contextlib.suppress(RuntimeError):
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)


def force_eager(torch: Any) -> Any:
    """What was compiled runs as it was written."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance is not None else contextlib.nullcontext()


@contextmanager
def silence_torch() -> Iterator[None]:
    """What torch warns and logs on the way to a fall-back is no concern of the user; what the model itself
    prints goes where it does not mix with answers."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_KERNEL_SETTINGS = (  # how torch asks for one, and how it sets it
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
)


def list_kernel_settings() -> tuple[Any, ...]:
    """Which kernels may be taken now, and the dtype of what is made without one."""
    found = [getattr(torch._C, ask)() if hasattr(torch._C, ask) else None for ask, _ in _KERNEL_SETTINGS]
    return (*found, torch.get_default_dtype())


@contextmanager
def use_kernel_settings(wanted: tuple[Any, ...]) -> Iterator[None]:
    """The settings of an earlier moment, for a while."""
    now = list_kernel_settings()
    if now == wanted:
        yield
        return
    _set_kernel_settings(wanted)
    try:
        yield
    finally:
        _set_kernel_settings(now)


def _set_kernel_settings(wanted: tuple[Any, ...]) -> None:
    for (_, name), value in zip(_KERNEL_SETTINGS, wanted, strict=False):
        if value is not None:
            getattr(torch._C, name)(value)
    torch.set_default_dtype(wanted[-1])

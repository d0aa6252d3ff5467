"""The autocast of a GPU, for a graph that is exported on the CPU.

What a model asks while it is exported (`x.dtype`, `torch.is_autocast_enabled(x.device.type)`) it asks of
tensors on the CPU. So the CPU casts meanwhile what the GPU will cast; and a region of the graph that switches
autocast on or off for the CPU does so for the GPU when it runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from loadmaster.modules.gpu_casts import Casts

_GPU, _CPU = "cuda", "cpu"


def is_casting() -> bool:
    """Whether autocast is on, on whatever device."""
    return any(torch.is_autocast_enabled(kind) for kind in (_CPU, _GPU))


@contextmanager
def autocast_for_export(*, for_gpu: bool, casts: bool = True) -> Iterator[None]:
    """Autocast as it is, or without `casts` off; for a GPU the CPU does as that one would."""
    with ExitStack() as stack:
        if not casts:
            stack.enter_context(autocast_region(_CPU, None, False, torch.is_autocast_cache_enabled()))
        elif for_gpu:
            stack.enter_context(_mirror_gpu_autocast())
            stack.enter_context(Casts(_GPU))
        yield


@contextmanager
def _mirror_gpu_autocast() -> Iterator[None]:
    """The CPU's autocast is the GPU's, now and wherever a model enters one for the GPU.

    A model may enter autocast anywhere, so its own way in and out is followed, for as long as this lasts.
    """
    kind: Any = torch.autocast
    into, out_of = kind.__enter__, kind.__exit__
    before: list[tuple[bool, torch.dtype]] = []

    def follow() -> None:
        before.append((torch.is_autocast_enabled(_CPU), torch.get_autocast_dtype(_CPU)))
        _set_autocast(_CPU, torch.is_autocast_enabled(_GPU), torch.get_autocast_dtype(_GPU))

    def enter(self: Any) -> Any:
        found = into(self)
        if self.device == _GPU:
            follow()
        return found

    def leave(self: Any, *problem: Any) -> Any:
        if self.device == _GPU:
            _set_autocast(_CPU, *before.pop())
        return out_of(self, *problem)

    if torch.is_autocast_enabled(_GPU):
        follow()
    kind.__enter__, kind.__exit__ = enter, leave
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = into, out_of
        if before:
            _set_autocast(_CPU, *before[0])


def _set_autocast(kind: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)


@contextmanager
def autocast_region(device: str, dtype: torch.dtype | None, enabled: bool, cached: bool) -> Iterator[None]:
    """Autocast as a region of a graph has it; what a model says of the CPU it says of a GPU, too."""
    before = torch.is_autocast_enabled(_GPU), torch.get_autocast_dtype(_GPU)
    with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached):
        try:
            if device == _CPU:
                _set_autocast(_GPU, enabled, dtype or before[1])
            yield
        finally:
            _set_autocast(_GPU, *before)

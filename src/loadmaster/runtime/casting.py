"""Casting: autocast of a GPU, for a graph that is exported on the CPU.

What a model asks while it is exported (`x.dtype`, `torch.is_autocast_enabled(x.device.type)`) it asks of
tensors on the CPU. So the CPU casts meanwhile what the GPU will cast; and a region of the graph that switches
autocast on or off for the CPU does so for the GPU when it runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from loadmaster.graph.torch_capture.target import Casts

_GPU, _CPU = "cuda", "cpu"


def is_casting() -> bool:
    """Whether autocast is on, on whatever device."""
    return any(torch.is_autocast_enabled(kind) for kind in (_CPU, _GPU))


@contextmanager
def exporting(*, for_gpu: bool, casts: bool = True) -> Iterator[None]:
    """Autocast as it is, or without `casts` off; for a GPU the CPU does as that one would."""
    with ExitStack() as stack:
        if not casts:
            stack.enter_context(region(_CPU, None, False, torch.is_autocast_cache_enabled()))
        elif for_gpu and torch.is_autocast_enabled(_GPU):
            stack.enter_context(torch.autocast(_CPU, dtype=torch.get_autocast_dtype(_GPU)))
            stack.enter_context(Casts(_GPU))
        yield


@contextmanager
def region(device: str, dtype: torch.dtype | None, enabled: bool, cached: bool) -> Iterator[None]:
    """Autocast as a region of a graph has it; what a model says of the CPU it says of a GPU, too."""
    before = torch.is_autocast_enabled(_GPU), torch.get_autocast_dtype(_GPU)
    with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached):
        try:
            if device == _CPU:
                torch.set_autocast_enabled(_GPU, enabled)
                torch.set_autocast_dtype(_GPU, dtype or before[1])
            yield
        finally:
            torch.set_autocast_enabled(_GPU, before[0])
            torch.set_autocast_dtype(_GPU, before[1])

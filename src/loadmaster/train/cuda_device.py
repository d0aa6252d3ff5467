"""The old path of `loadmaster.shards.device.cuda_device`; it still works, and warns."""

import warnings
from typing import Any

_WARNING = "loadmaster.train.cuda_device is an old path; import from loadmaster.shards.device.cuda_device"


def __getattr__(name: str) -> Any:
    """Fetch a name from where it stands now."""
    from loadmaster.shards.device import cuda_device

    found = getattr(cuda_device, name)
    if not name.startswith("__"):
        warnings.warn(_WARNING, DeprecationWarning, stacklevel=2)
    return found

"""The old path of `loadmaster.train.backbone.group`; it still works, and warns."""

import warnings
from typing import Any

_WARNING = "loadmaster.train.group is an old path; import open_group and group_steps from loadmaster.train"


def __getattr__(name: str) -> Any:
    """Fetch a name from where it stands now."""
    from loadmaster.train.backbone import group

    found = getattr(group, name)
    if not name.startswith("__"):
        warnings.warn(_WARNING, DeprecationWarning, stacklevel=2)
    return found

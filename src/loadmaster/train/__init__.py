"""Many models, too few devices: training shard by shard, with weights in host memory (`lt`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadmaster.train.plain_loop import reference as reference
    from loadmaster.train.runner import open_runner as open_runner
    from loadmaster.train.runner import planned as planned
    from loadmaster.train.trial import Trial as Trial

_HOME = {"Trial": "trial", "reference": "plain_loop", "open_runner": "runner", "planned": "runner"}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home."""
    if name not in _HOME:
        raise AttributeError(f"module 'loadmaster.train' has no attribute {name!r}")
    return getattr(import_module(f"loadmaster.train.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Public names, also those not fetched yet."""
    return list(__all__)

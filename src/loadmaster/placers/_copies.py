"""One array into another, compiled: `a[:] = b` takes numba a second to compile wherever it is written."""

from typing import Any

from loadmaster.simulator.jit import kernel


@kernel
def copy_into(target: Any, source: Any) -> None:
    """Write the values of `source` over the first of `target`."""
    for at in range(len(source)):
        target[at] = source[at]

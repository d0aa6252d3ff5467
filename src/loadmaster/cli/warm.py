"""python -m loadmaster.cli.warm: compile all kernels once, so that no user waits for it."""

import time

from loadmaster.cli.console import progress, stdout
from loadmaster.core.units import format_seconds
from loadmaster.placers.warm import warm_up
from loadmaster.simulator.jit import cache_folder


def main() -> None:
    """Compile or load the kernels, with a line that says so."""
    began = time.perf_counter()
    with progress("warming the cache") as say:
        warm_up(say)
    took = format_seconds(time.perf_counter() - began)
    stdout().print(f"compiled kernels are ready in {cache_folder()} ({took})", soft_wrap=True)


if __name__ == "__main__":
    main()

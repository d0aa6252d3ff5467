"""python -m loadmaster.cli.warm: compile the simulator once, so that no user waits for it."""

import time

from loadmaster import api
from loadmaster.cli.console import progress, stdout
from loadmaster.core.units import format_seconds
from loadmaster.simulator import engine
from loadmaster.simulator.jit import cache_folder


def main() -> None:
    """Compile or load the kernels, with a line that says so."""
    began = time.perf_counter()
    with progress("warming the cache") as say:
        engine.prepare(api.problem("gen:chain:10")).warm_up(say)
    took = format_seconds(time.perf_counter() - began)
    stdout().print(f"compiled kernels are ready in {cache_folder()} ({took})", soft_wrap=True)


if __name__ == "__main__":
    main()

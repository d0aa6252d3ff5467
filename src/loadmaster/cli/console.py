"""Where the command line speaks: results on stdout, everything else on stderr, progress while it lasts."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

_SAY_AFTER_S = 1.0


def stdout() -> Console:
    """For results; op names are data, so nothing in them is markup."""
    return Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    """For messages and progress."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_json(document: dict[str, Any]) -> None:
    """One document on stdout; numbers that JSON cannot hold are null."""
    import msgspec

    data = msgspec.json.format(msgspec.json.encode(_finite(document)), indent=2)
    print(data.decode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, float], None]]:
    """A spinner on a terminal; elsewhere a line now and then once it takes over a second."""
    console = stderr()
    began = time.perf_counter()
    if console.is_terminal:
        with console.status(Text(what)) as status:

            def spin(message: str, _share: float) -> None:
                seconds = time.perf_counter() - began
                status.update(Text(f"{what}: {message} ({seconds:.0f} s)"))

            yield spin
        return
    last = began

    def say(message: str, _share: float) -> None:
        nonlocal last
        if time.perf_counter() - last > _SAY_AFTER_S or "compiling" in message:
            last = time.perf_counter()
            console.print(f"{what}: {message} ({last - began:.0f} s)", style="dim")

    yield say

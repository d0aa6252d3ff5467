"""Output of the command line: results on stdout, everything else on stderr, progress while it lasts."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.text import Text

from loadmaster.cli.interrupts import raise_if_lost
from loadmaster.report.plain_text import escape_control_characters

_FIRST_LINE_S = 1.0
_LINES_SLOW_DOWN = 1.5
_LONGEST_SILENCE_S = 20.0  # and the least between two lines while compiling, which is long and dull


class _Console(Console):
    """Rich's console, but a reader that went away is told to `app.main`, which knows the exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """For results; op names are data, so nothing in them is markup."""
    return _Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    """For messages and progress."""
    return _Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_json(document: dict[str, Any]) -> None:
    """One document on stdout, in ASCII for any terminal; numbers that JSON cannot hold are null."""
    print(json.dumps(_replace_nonfinite(document), indent=2, allow_nan=False))


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _replace_nonfinite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _News:
    """What is being done and for how long; a spinner draws it again at every turn."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.message = ""
        self.began = time.perf_counter()
        self.told = -_LONGEST_SILENCE_S  # when a line was last printed

    @property
    def is_due(self) -> bool:
        """Whether a line is worth printing now."""
        return "compiling" not in self.message or time.perf_counter() - self.told >= _LONGEST_SILENCE_S

    def __rich__(self) -> Text:
        seconds = time.perf_counter() - self.began
        message = f": {self.message}" if self.message else ""
        return Text(escape_control_characters(f"{self.what}{message} ({seconds:.0f} s)"))


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, float], None]]:
    """A spinner on a terminal; elsewhere a line once it takes over a second, then ever fewer."""
    console, news = stderr(), _News(what)

    def say(message: str, _share: float) -> None:
        raise_if_lost()
        news.message = message
        if "compiling" in message and not console.is_terminal and news.is_due:
            _print_progress_once(console, news)

    if console.is_terminal:
        with console.status(news, spinner="line"):
            yield say
        return
    done = Event()
    teller = Thread(target=_print_progress, args=(console, news, done), daemon=True)
    teller.start()
    try:
        yield say
    finally:
        done.set()
        teller.join()


def _print_progress(console: Console, news: _News, done: Event) -> None:
    """A line now and then until it is done."""
    wait_s = _FIRST_LINE_S
    while not done.wait(wait_s):
        if news.is_due:
            _print_progress_once(console, news)
        wait_s = min(wait_s * _LINES_SLOW_DOWN, _LONGEST_SILENCE_S)


def _print_progress_once(console: Console, news: _News) -> None:
    news.told = time.perf_counter()
    with suppress(OSError):  # work goes on where nobody listens
        console.print(news, style="dim", soft_wrap=True)

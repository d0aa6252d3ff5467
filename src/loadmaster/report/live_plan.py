"""Live plan: what `lm.plan` shows while it searches: the best plan so far, the bound, the gap, who is at
work.

In a terminal a table that is drawn again, in a notebook a table that is replaced; nothing where nobody looks.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadmaster.core.run import PlanNews
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.plain_text import escape_for_xml
from loadmaster.report.tables import fields

_EVERY_S = 0.5  # between two tables of a notebook


class LivePlan:
    """Hears of everything, and knows what to show of it."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.message = ""
        self.news: PlanNews | None = None
        self.changed = True

    def say(self, message: str, _share: float) -> None:
        """Who is at work."""
        self.message, self.changed = message, True

    def watch(self, news: PlanNews) -> None:
        """A better plan, or a better bound."""
        self.news, self.changed = news, True

    def rows(self) -> dict[str, str]:
        """Names and values, as they stand now."""
        best, bound, gap = "none yet", "none", "-"
        if self.news is not None:
            over = self.news.overflow_bytes
            best = f"{format_seconds(self.news.time_s)}"
            best += f", but {format_bytes(over)} too large" if over else ""
            bound = format_seconds(self.news.bound_s) if self.news.bound_s > 0 else "none"
            if not over and self.news.bound_s > 0:
                gap = f"at most {format_percent(self.news.time_s / self.news.bound_s - 1)}"
        took = format_seconds(round(time.perf_counter() - self.began, 1))
        return {
            "best so far": best,
            "lower bound": bound,
            "gap": gap,
            "at work": self.message or "-",
            "time": took,
        }

    def __repr__(self) -> str:
        """What a notebook without HTML shows."""
        return ", ".join(f"{name}: {text}" for name, text in self.rows().items())

    def __rich__(self) -> Table:
        """The table of a terminal."""
        return fields(dict(self.rows()))

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{escape_for_xml(name)}</td><td>{escape_for_xml(text)}</td></tr>"
            for name, text in self.rows().items()
        )
        return f"<table>{cells}</table>"


def is_notebook() -> bool:
    """Whether a Jupyter kernel runs this; nothing is imported for it."""
    shell = sys.modules.get("IPython")
    found = getattr(shell, "get_ipython", lambda: None)()
    return type(found).__name__ == "ZMQInteractiveShell"


@contextmanager
def show_live(console: Console | None = None) -> Iterator[LivePlan | None]:
    """A live table while the block runs; None where neither a terminal nor a notebook listens."""
    live = LivePlan()
    if is_notebook():
        yield _in_notebook(live)
        return
    console = console or Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, get_renderable=lambda: live.__rich__(), refresh_per_second=4, transient=True):
        yield live


class _Notebook(LivePlan):
    """Replaces its table now and then."""

    def __init__(self, replace: Callable[[Any], None]) -> None:
        super().__init__()
        self._replace, self._shown = replace, 0.0

    def say(self, message: str, share: float) -> None:
        super().say(message, share)
        self._show()

    def watch(self, news: PlanNews) -> None:
        super().watch(news)
        self._show()

    def _show(self) -> None:
        now = time.perf_counter()
        if now - self._shown >= _EVERY_S:
            self._shown = now
            self._replace(self)


def _in_notebook(live: LivePlan) -> LivePlan:
    display = sys.modules["IPython"].display.display
    handle = display(live, display_id=True)
    return _Notebook(handle.update)

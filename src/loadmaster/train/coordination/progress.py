"""What `fit` shows while it runs: a live table on a terminal or in a notebook, lines elsewhere."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from loadmaster.core.errors import UnknownNameError


@contextmanager
def show_progress(
    wanted: bool | str,
    names: Sequence[str],
    *,
    num_steps: Mapping[str, int],
    evaluated: Collection[str] = (),
    note: str = "",
) -> Iterator[list[Any]]:
    """Callbacks that show what goes on; none where nothing is to be shown.

    'auto' shows it where somebody looks: on a terminal and in a notebook. True shows it everywhere.
    """
    if wanted not in (True, False, "auto"):
        raise UnknownNameError("progress", str(wanted), ("auto", "True", "False"))
    if wanted is False or (wanted == "auto" and not _is_watched()):
        yield []
        return
    from rich.console import Console

    from loadmaster.report.study_table import LineReporter, LiveTable

    console = Console(stderr=not _is_notebook())
    if note:
        console.print(note, style="dim", soft_wrap=True)
    if not (console.is_terminal or console.is_jupyter):
        yield [LineReporter(console)]
        return
    table = LiveTable(console, names, evaluated, num_steps=num_steps)
    with table:
        yield [table]
    console.print(table.trials_table())


def _is_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and type(running).__name__ == "ZMQInteractiveShell"


def _is_watched() -> bool:
    return _is_notebook() or bool(getattr(sys.stderr, "isatty", lambda: False)())

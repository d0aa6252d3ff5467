"""Tables without lines: columns that fit, and names from elsewhere that are safe to print."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from loadmaster.report.plain_text import escape_control_characters


def one_line(text: str, limit: int = 48) -> Text:
    """A name from elsewhere, safe to print: control characters shown, markup not obeyed."""
    shown = escape_control_characters(text)
    return Text(shown if len(shown) <= limit else f"{shown[: limit - 1]}…")


def columns(*titles: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """An empty table; numbers stand to the `right`, and `whole` columns are never cut or wrapped."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(
            Text(title),
            justify="right" if title in right else "left",
            no_wrap=title in whole,
            overflow="fold",
            min_width=max((len(word) for word in title.split()[:2]), default=0),  # of its heading
        )
    return table

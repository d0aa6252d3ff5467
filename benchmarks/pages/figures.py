"""Figures: result files by suite and name, and how tables are written from them."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

NOT_RUN = "Not measured in this run."
_WIDTH = 140


class Figures:
    """Result files; a suite that a later file of the same machine has too replaces the earlier."""

    def __init__(self, documents: Sequence[dict[str, Any]]) -> None:
        """Each document is what `benchmarks.run` wrote; the first says what machine the page is about."""
        self.machine = documents[0]["machine"]
        last = {
            (row["suite"], _words(document)): at
            for at, document in enumerate(documents)
            for row in document["figures"]
        }
        self.machines_of: dict[str, list[dict[str, Any]]] = {}
        for (suite, _), at in last.items():
            self.machines_of.setdefault(suite, []).append(documents[at]["machine"])
        self.by_name = {
            (row["suite"], row["name"]): row
            for at, document in enumerate(documents)
            for row in document["figures"]
            if last[row["suite"], _words(document)] == at
        }

    def of(self, suite: str) -> list[dict[str, Any]]:
        """The figures of a suite in the order in which they were taken."""
        return [row for (name, _), row in self.by_name.items() if name == suite]

    def has(self, suite: str, name: str) -> bool:
        """Whether a figure was taken."""
        return (suite, name) in self.by_name

    def value(self, suite: str, name: str) -> float:
        """One figure."""
        return float(self.by_name[(suite, name)]["value"])

    def unit(self, suite: str, name: str) -> str:
        """Its unit."""
        return str(self.by_name[(suite, name)]["unit"])

    def verdict(self, suite: str, name: str) -> str:
        """Its aim and whether it was reached."""
        row = self.by_name.get((suite, name))
        if row is None or not row["aim"]:
            return ""
        return f"{row['aim']} {row['unit']}: {mark(row)}"


def _words(document: dict[str, Any]) -> str:
    """What tells a machine from another."""
    machine = document["machine"]
    return f"{machine['processor']}, {machine['cores']} cores, {machine.get('gpu', '')}"


def mark(row: dict[str, Any]) -> str:
    """Whether a figure's aim was reached, in a word."""
    return "reached" if row["reached"] else "**missed**"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def digits(value: float, count: int) -> str:
    """So many digits that matter, thousands apart."""
    places = max(count - len(str(int(abs(value)))), 0)
    return f"{value:,.{places}f}"


def wrapped(page: str) -> str:
    """Paragraphs filled to one width; tables, lists and headings as they are."""
    blocks = page.split("\n\n")
    return "\n\n".join(
        block if block.lstrip().startswith(("|", "#", "-")) else _fill(block) for block in blocks
    )


def _fill(block: str) -> str:
    end = "\n" if block.endswith("\n") else ""
    return textwrap.fill(block, width=_WIDTH, break_long_words=False, break_on_hyphens=False) + end

"""Notebooks: how a noun shows itself in Jupyter, and pictures of it.

Jupyter asks the noun itself (`_repr_html_`), and drawing stands far above the nouns, so this is the one
place where a noun reaches up: by name, when it is asked, and only to be looked at.
"""

import os
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

from loadmaster.core.files import write_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """An SVG: a notebook shows it, `save` writes it."""

    svg: str

    def __repr__(self) -> str:
        """Not the whole drawing."""
        return f"<Picture: {len(self.svg):,} characters of SVG>"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file."""
        write_bytes(self.svg.encode(), path)


def html_of(noun: Any) -> str:
    """What a notebook shows of a noun."""
    return str(import_module("loadmaster.report.notebook").render_html(noun))


class PrintedAnswer:
    """An answer that prints itself as the command line prints it; a notebook shows the same text."""

    __slots__ = ()

    def __str__(self) -> str:
        """The text, a hundred columns wide."""
        return str(import_module("loadmaster.report.answer_text").render_text(self))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def picture_of(*nouns: Any) -> Picture:
    """The Gantt of a placement, or of a timeline with its graph."""
    return Picture(str(import_module("loadmaster.report.notebook").render_picture(*nouns)))

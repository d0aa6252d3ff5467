"""Page: sections filled into one self-contained HTML file, for plans and for studies.

All strings pass through jinja2's escaping; the script is named by its hash in the page's own security
policy, so that no other script can run; data goes in as JSON in which `<`, `>` and `&` are written as
escapes. Without JavaScript everything but the zoomable timeline works: a picture stands in for it.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from loadmaster.report.gantt import CLASSES, Gantt, pack_columns, render_svg, shown_classes
from loadmaster.report.plain_text import escape_control_characters

_STILL_WIDTH = 960  # of the picture that stands in for the timeline: not too small on paper


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: texts in columns; those of the columns named in `right` are numbers."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    title: str = ""
    note: str = ""
    folded: bool = False  # behind its title


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of the verdict."""

    name: str
    value: str
    more: str = ""
    tone: str = ""  # good, bad


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it; figures are SVG of our own drawing."""

    id: str
    title: str
    lead: str = ""
    tables: Sequence[Rows] = ()
    figures: Sequence[str] = ()
    small_figures: bool = False  # two in a row where there is room
    gantt: Gantt | None = None
    key: Sequence[tuple[str, str]] = ()  # (class, name)
    bars: Sequence[Mapping[str, Any]] = ()
    tree: Mapping[str, Any] | None = None
    more: str = ""
    after: str = ""
    how: str = ""  # to use what works with JavaScript only


@dataclass(frozen=True, slots=True)
class Page:
    """Everything on one page, top to bottom."""

    title: str
    subtitle: str
    cards: Sequence[Card] = ()
    limits: Sequence[str] = ()
    troubles: Sequence[str] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = field(default=())


def render_page(page: Page) -> bytes:
    """The HTML file."""
    from markupsafe import Markup

    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    gantt = next((section.gantt for section in page.sections if section.gantt is not None), None)
    html = _template().render(
        title=_shown(page.title),
        subtitle=_shown(page.subtitle),
        cards=[_shown_all(card, ("name", "value", "more", "tone")) for card in page.cards],
        limits=[_shown(text) for text in page.limits],
        troubles=[_shown(text) for text in page.troubles],
        notes=[_shown(text) for text in page.notes],
        sections=[_fill_section(section) for section in page.sections],
        data=Markup(json_island(pack_columns(gantt))) if gantt is not None else None,
        css=Markup(_asset("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        footer="Made by Loadmaster. This file is complete: it loads nothing from anywhere.",
    )
    return str(html).encode("utf-8", "backslashreplace")


def json_island(document: Any) -> str:
    """JSON that can stand inside of a script element: it holds no character that HTML would look at."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _fill_section(section: Section) -> dict[str, Any]:
    from markupsafe import Markup

    gantt = section.gantt
    return {
        "id": section.id,
        "title": _shown(section.title),
        "lead": _shown(section.lead),
        "how": _shown(section.how),
        "tables": [
            {
                "titles": [_shown(each) for each in table.titles],
                "rows": [[_shown(cell) for cell in row] for row in table.rows],
                "right": list(table.right),
                "title": _shown(table.title),
                "note": _shown(table.note),
                "fold": table.folded,
            }
            for table in section.tables
        ],
        "figures": [Markup(figure) for figure in section.figures],
        "small": section.small_figures,
        "gantt": Markup(render_svg(gantt, width=_STILL_WIDTH)) if gantt is not None else None,
        "legend": _list_classes(gantt) if gantt is not None else [],
        "key": [{"style": style, "name": _shown(name)} for style, name in section.key],
        "bars": section.bars,
        "tree": section.tree,
        "more": _shown(section.more),
        "after": _shown(section.after),
    }


def _list_classes(gantt: Gantt) -> list[dict[str, str]]:
    """The colours that the timeline has."""
    return [{"style": f"c{at}", "name": CLASSES[at]} for at in shown_classes(gantt)]


def _shown_all(noun: Any, names: Sequence[str]) -> dict[str, str]:
    return {name: _shown(getattr(noun, name)) for name in names}


def _shown(text: object) -> str:
    """A text with control characters shown; the template escapes what HTML would look at."""
    return escape_control_characters(str(text))


@cache
def _asset(name: str) -> str:
    return (resources.files("loadmaster.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_asset("page.html"))

"""One self-contained HTML page of a replay: a table with bars, and lines over time for each setting.

Every text from a file is escaped; nothing is loaded from elsewhere.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadmaster.advisor.replay import Row
from loadmaster.core.errors import FileError

_STYLE = (
    "body{font:14px system-ui;margin:2em;max-width:70em}table{border-collapse:collapse}td,th{"
    "padding:.25em .7em;text-align:left;border-bottom:1px solid #ddd}"
    "figure{display:inline-block;margin:1em 2em 1em 0}svg{background:#fafafa}"
    ".bar{background:#3b6ea5;height:.8em;display:inline-block}"
    ".bound{border-left:2px solid #c33;height:1em;display:inline-block;position:absolute}"
    ".cell{position:relative;width:16em}"
)


_COLOURS = (
    "#3b6ea5",
    "#c33",
    "#2a8a4a",
    "#b8860b",
    "#7a4fb5",
    "#d2691e",
    "#008b8b",
    "#888",
    "#e377c2",
    "#444",
)
_WIDTH, _HEIGHT = 420, 150


def write_page(path: str | Path, title: str, what: str, rows: Sequence[Row]) -> None:
    """Write the page whole or not at all."""
    most = max([row.high for row in rows] + [row.bound for row in rows] + [1e-9])
    extra = list(rows[0].details) if rows else []
    head = "".join(
        f"<th>{escape(name)}</th>"
        for name in ("setting", "policy", what, "95 %", "", "difference", "bound", *extra)
    )
    body = "".join(_line(row, most, extra) for row in rows)
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>The red mark is what no policy can beat.</p>"
        f"<table><tr>{head}</tr>{body}</table>{_charts(rows)}</html>\n"
    )
    target = Path(path)
    partial = target.with_name(f".{target.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as trouble:
        raise FileError(f"cannot write {path}: {trouble}") from None


def _line(row: Row, most: float, extra: Sequence[str]) -> str:
    cells = [
        escape(row.setting),
        escape(row.policy),
        f"{row.mean:.3f}",
        f"{row.low:.3f} to {row.high:.3f}",
    ]
    bar = (
        f'<td class="cell"><span class="bound" style="left:{15 * row.bound / most:.2f}em"></span>'
        f'<span class="bar" style="width:{15 * max(0.0, row.mean) / most:.2f}em"></span></td>'
    )
    after = [f"{row.paired:+.3f} ± {row.paired_half:.3f}", f"{row.bound:.3f}"]
    after += [with_half(row, name) for name in extra]
    return (
        "<tr>"
        + "".join(f"<td>{c}</td>" for c in cells)
        + bar
        + "".join(f"<td>{c}</td>" for c in after)
        + "</tr>"
    )


def with_half(row: Row, name: str) -> str:
    """A detail with half of its interval, where it is known and not nothing."""
    half = row.details_half.get(name, math.inf)
    if not math.isfinite(half) or half == 0:
        return f"{row.details[name]:.3g}"
    return f"{row.details[name]:.3g} ± {half:.2g}"


def _charts(rows: Sequence[Row]) -> str:
    """Two charts for each setting: how much is busy, and how often free devices are scattered."""
    parts = []
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        parts.append(f"<h2>{escape(setting)}</h2>")
        for name, told in (
            ("utilisation", "share of devices that are busy"),
            ("fragmented", "share of the time when 4 devices are free, but no 4 together"),
        ):
            parts.append(_chart(chosen, name, told))
        legend = "".join(
            f'<span style="color:{_COLOURS[i % len(_COLOURS)]}">&#9644; {escape(row.policy)}</span> '
            for i, row in enumerate(chosen)
        )
        parts.append(f"<p>{legend}</p>")
    return "".join(parts)


def _chart(rows: Sequence[Row], name: str, told: str) -> str:
    most = max([v for row in rows for v in row.history.get(name, []) if math.isfinite(v)] + [1e-9])
    top = min(1.0, 1.1 * most)
    lines = []
    for i, row in enumerate(rows):
        values = row.history.get(name, [])
        step = _WIDTH / max(1, len(values) - 1)
        points = " ".join(
            f"{x * step:.1f},{_HEIGHT * (1 - v / top):.1f}" for x, v in enumerate(values) if math.isfinite(v)
        )
        colour = _COLOURS[i % len(_COLOURS)]
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
    return (
        f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(told)}">'
        f"{''.join(lines)}</svg><figcaption>{escape(told)}, over the time of the stream;"
        f" the top is {top:.2g}</figcaption></figure>"
    )

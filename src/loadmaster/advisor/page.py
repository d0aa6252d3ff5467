"""One self-contained HTML page of a replay: a table with bars; every text from a file is escaped."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadmaster.advisor.replay import Row
from loadmaster.core.errors import FileError

_STYLE = (
    "body{font:14px system-ui;margin:2em;max-width:70em}table{border-collapse:collapse}td,th{"
    "padding:.25em .7em;text-align:left;border-bottom:1px solid #ddd}"
    ".bar{background:#3b6ea5;height:.8em;display:inline-block}"
    ".bound{border-left:2px solid #c33;height:1em;display:inline-block;position:absolute}"
    ".cell{position:relative;width:16em}"
)


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
        f"<table><tr>{head}</tr>{body}</table></html>\n"
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
    after += [f"{row.details[name]:.3g}" for name in extra]
    return (
        "<tr>"
        + "".join(f"<td>{c}</td>" for c in cells)
        + bar
        + "".join(f"<td>{c}</td>" for c in after)
        + "</tr>"
    )

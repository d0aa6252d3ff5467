"""A replay for people: the texts of its tables, and one self-contained HTML page with charts.

Every text from a file is escaped by the page; nothing is loaded from elsewhere.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadmaster.advisor.replay import Row
from loadmaster.core.errors import FileError
from loadmaster.report.curves import interval_chart, line_chart
from loadmaster.report.page import Page, Rows, Section, render_page

_OVER_TIME = {
    "utilisation": "Share of the devices that are busy",
    "fragmented": "Share of the time when 4 devices are free, but no 4 together",
}
_IN_UNITS = {"device_hours": "device hours", "mean_wait_s": "mean wait s"}  # the other details are shares
_SHORT = {"broken_promises": "late", "utilisation": "busy"}  # a table has 80 columns
_NUM_COLOURS = 8


def write_page(path: str | Path, title: str, what: str, rows: Sequence[Row], against: str = "") -> None:
    """Write the page whole or not at all; `against` is the policy that differences are told to."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    page = Page(
        title=title,
        subtitle=f"{len(settings)} setting{'s' * (len(settings) != 1)}; intervals are 95 % over streams",
        sections=[
            _section(at, setting, [row for row in rows if row.setting == setting], what, against)
            for at, setting in enumerate(settings)
        ],
    )
    target = Path(path)
    partial = target.with_name(f".{target.name}.part")
    try:
        partial.write_bytes(render_page(page))
        partial.replace(target)
    except OSError as trouble:
        raise FileError(f"cannot write {path}: {trouble}") from None


def _section(at: int, setting: str, rows: Sequence[Row], what: str, against: str) -> Section:
    main, more = main_rows(rows, what), detail_rows(rows)
    figures = [
        interval_chart(
            [(row.policy, row.mean, row.low, row.high) for row in rows],
            rows[0].bound,
            title=f"{what}, with 95 % intervals; the dashed line is the bound",
        )
    ]
    for name, told in _OVER_TIME.items():
        lines = [(row.policy, _points(row.history, name)) for row in rows]
        figures.append(line_chart(lines, title=told, across=f"{told}, over the time of a stream (%)"))
    key = [
        (f"d{i % _NUM_COLOURS}", row.policy + (", dashed" if i >= _NUM_COLOURS else ""))
        for i, row in enumerate(rows)
    ]
    return Section(
        f"setting-{at}",
        setting,
        bound_text(rows[0], what) + (f" Differences are to {against}." if against else ""),
        [Rows(main[0], main[1:], main[0][1:]), Rows(more[0], more[1:], more[0][1:])],
        [figure for figure in figures if figure],
        key=key,
    )


def _points(history: Mapping[str, Sequence[float]], name: str) -> list[tuple[float, float]]:
    values = history.get(name, ())
    return [(100 * i / max(1, len(values) - 1), value) for i, value in enumerate(values)]


def bound_text(row: Row, what: str) -> str:
    """What no policy can beat, in words."""
    than = "less than" if what == "blocking" else "more than"
    return f"No policy has {than} {row.bound:.3f}."


def main_rows(rows: Sequence[Row], what: str) -> list[list[str]]:
    """Titles, then one row for each policy: mean, interval, difference."""
    found = [["policy", what, "95 %", "difference"]]
    for row in rows:
        known = math.isfinite(row.low) and math.isfinite(row.high)
        between = f"{row.low:.3f} to {row.high:.3f}" if known else "-"
        paired = f"{row.paired:+.3f}" + (f" ± {row.paired_half:.3f}" if known else "")
        found.append([row.policy, f"{row.mean:.3f}", between, paired])
    return found


def detail_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Titles, then one row for each policy: the other figures, shares in percent, each with its interval."""
    names = list(rows[0].details) if rows else []
    found = [["policy", *[_IN_UNITS.get(n) or f"{_SHORT.get(n, n.replace('_', ' '))} %" for n in names]]]
    for row in rows:
        scale = {n: 1.0 if n in _IN_UNITS else 100.0 for n in names}
        cells = [
            plus_minus(scale[n] * row.details[n], scale[n] * row.details_half.get(n, math.inf), most_digits=1)
            for n in names
        ]
        found.append([row.policy, *cells])
    return found


def plus_minus(value: float, half: float, *, most_digits: int = 3) -> str:
    """A mean and half of its interval, with no more digits than the interval gives sense to."""
    if not math.isfinite(half) or half <= 0:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    digits = min(most_digits, max(0, 1 - math.floor(math.log10(half)))) if half < 10 else 0
    return f"{value:.{digits}f}±{half:.{digits}f}"


__all__ = ["bound_text", "detail_rows", "main_rows", "plus_minus", "write_page"]

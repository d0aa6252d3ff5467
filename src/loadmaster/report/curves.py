"""Curves of the page as SVG: time against plan time, sweeps, losses, and bars over time.

Colours come from classes of the page's style sheet, so that a chart follows light and dark. All text is escaped.
"""

import math
from collections.abc import Iterable, Sequence

from loadmaster.core.units import format_seconds
from loadmaster.report.charts import shorten
from loadmaster.report.gantt import axis_ticks, time_ticks
from loadmaster.report.plain_text import escape_for_xml

_WIDTH = 960
_NUM_COLOURS = 8
_LETTER_PX = 6.3  # the width of a letter of a label, on average and rounded up
_NEAR_PX = 12
_FEW_POWERS = 3  # of ten: an axis of fewer has ticks between them


def comparison_chart(
    rows: Sequence[tuple[str, float, float]], bound_s: float, *, upright: str = "step time"
) -> str:
    """(name, plan seconds, step seconds) as points on logarithmic axes, the bound as a line."""
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return ""
    width, height, left, top, bottom = _WIDTH, 320, 96, 22, 40
    times = [max(took, 1e-4) for _, took, _ in rows]
    steps = [step for _, _, step in rows] + ([bound_s] if bound_s > 0 else [])
    low_x, high_x = math.log10(min(times) / 1.6), math.log10(max(times) * 1.6)
    low_y, high_y = math.log10(min(steps) / 1.15), math.log10(max(steps) * 1.15)

    def x(took: float) -> float:
        return left + (math.log10(max(took, 1e-4)) - low_x) / (high_x - low_x) * (width - left - 20)

    def y(step: float) -> float:
        return top + (high_y - math.log10(step)) / (high_y - low_y) * (height - top - bottom)

    parts = []
    digits = (1, 2, 5) if high_x - low_x < _FEW_POWERS else (1,)
    for at in _log_ticks(10**low_x, 10**high_x, digits):
        parts.append(
            f'<path class="grid" d="M{x(at):.0f} {top}V{height - bottom}"/><text class="t" x="{x(at):.0f}"'
            f' y="{height - 22}" text-anchor="middle">{format_seconds(at)}</text>'
        )
    for at in _upright_ticks(10**low_y, 10**high_y):
        parts.append(
            f'<path class="grid" d="M{left} {y(at):.0f}H{width - 20}"/><text class="t" x="{left - 6}"'
            f' y="{y(at) + 4:.0f}" text-anchor="end">{format_seconds(at)}</text>'
        )
    points = [(name, took, step, x(took), y(step)) for name, took, step in sorted(rows, key=lambda r: r[2])]
    taken = [(px - 5, py - 5, px + 5, py + 5) for *_, px, py in points]
    if bound_s > 0:
        said = f"no plan is faster than {format_seconds(bound_s)}"
        parts.append(
            f'<path class="limit" d="M{left} {y(bound_s):.1f}H{width - 20}"/><text class="t limit-text"'
            f' x="{width - 24}" y="{y(bound_s) + 13:.1f}" text-anchor="end">{said}</text>'
        )
        taken.append((width - 24 - _LETTER_PX * len(said), y(bound_s) - 1, width - 20, y(bound_s) + 16))
        taken.append((left, y(bound_s) - 1, width - 20, y(bound_s) + 1))
    room = (left, 0, width - 20, height - bottom + 2)
    for name, took, step, px, py in points:
        label = shorten(name, 28)
        box, anchor = _label_spot(px, py, _LETTER_PX * len(label), room, taken)
        taken.append(box)
        text = escape_for_xml(f"{name}: {format_seconds(step)}, planned in {format_seconds(took)}")
        lx = {"start": box[0], "middle": (box[0] + box[2]) / 2, "end": box[2]}[anchor]
        far = box[3] < py - _NEAR_PX or box[1] > py + _NEAR_PX  # too far to be seen to belong together
        ly = box[3] if box[3] < py else box[1]
        lead = f'<path class="lead" d="M{px:.1f} {py:.1f}V{ly:.1f}"/>' if far else ""
        parts.append(
            f'<g><title>{text}</title>{lead}<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>'
            f'<text class="t halo" x="{lx:.1f}" y="{box[3] - 2:.1f}" text-anchor="{anchor}">{escape_for_xml(label)}</text></g>'
        )
    parts.append(f'<text class="t" x="8" y="13">{escape_for_xml(upright)}</text>')
    parts.append(
        f'<text class="t" x="{(left + width) / 2:.0f}" y="{height - 5}" text-anchor="middle">time to plan</text>'
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>Step time against time to plan'
        f"</title>{''.join(parts)}</svg>"
    )


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _label_spot(px: float, py: float, wide: float, room: _Box, taken: Iterable[_Box]) -> tuple[_Box, str]:
    """Where the label of a point covers nothing: right of it, left, above or below, else farther away.

    Where all is covered it still stands within the room.
    """
    spots: list[tuple[_Box, str]] = [
        ((px + 9, py - 8, px + 9 + wide, py + 6), "start"),
        ((px - 9 - wide, py - 8, px - 9, py + 6), "end"),
    ]
    for away in (14, -14, 29, -29, 44, -44, 59, 74, 89):
        up, down = py - away - 8, py - away + 6
        spots.append(((px - wide / 2, up, px + wide / 2, down), "middle"))
        spots.append(((px - 4, up, px - 4 + wide, down), "start"))
        spots.append(((px + 4 - wide, up, px + 4, down), "end"))
    within = [spot for spot in spots if _within(spot[0], room)] or spots[:1]
    free = [spot for spot in within if not any(_overlap(spot[0], other) for other in taken)]
    return (free or within)[0]


def _within(box: _Box, room: _Box) -> bool:
    return box[0] > room[0] and box[1] > room[1] and box[2] < room[2] and box[3] < room[3]


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _log_ticks(low: float, high: float, digits: Sequence[int] = (1, 2, 5)) -> list[float]:
    found = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digit in digits
    ]
    return [at for at in found if low <= at <= high] or [low]


def _upright_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis; of one too short for them, round values at equal distances."""
    found = _log_ticks(low, high)
    if len(found) > 1:
        return found
    step = axis_ticks(high - low, 4)[1]
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def curve_chart(points: Sequence[tuple[str, float | None, str]], *, title: str, across: str) -> str:
    """(label, seconds or None, note) as a line; a gap and a mark where there is no plan."""
    width, height, left, top, bottom = _WIDTH, 280, 90, 16, 44
    known = [value for _, value, _ in points if value is not None]
    high = max(known, default=1.0) * 1.1 or 1.0
    step = (width - left - 40) / max(len(points) - 1, 1)

    def y(value: float) -> float:
        return top + (1 - value / high) * (height - top - bottom)

    parts, line, pen = [], [], "M"
    for at, text in time_ticks(high, 5):
        parts.append(
            f'<path class="grid" d="M{left} {y(at):.0f}H{width - 20}"/><text class="t" x="{left - 6}"'
            f' y="{y(at) + 4:.0f}" text-anchor="end">{text}</text>'
        )
    for at, (label, value, note) in enumerate(points):
        px = left + 10 + at * step
        text = escape_for_xml(f"{label}: {note}")
        if len(points) <= 20 or at % (len(points) // 12) == 0:
            parts.append(
                f'<text class="t" x="{px:.0f}" y="{height - 26}" text-anchor="middle">'
                f"{escape_for_xml(shorten(label, 14))}</text>"
            )
        if value is None:
            pen = "M"
            parts.append(
                f'<g><title>{text}</title><path class="miss" d="M{px - 5:.0f} {height - bottom - 10}l10 10m0 -10l-10 10"/></g>'
            )
            continue
        line.append(f"{pen}{px:.1f} {y(value):.1f}")
        pen = "L"
        parts.append(
            f'<g><title>{text}</title><circle class="dot" cx="{px:.1f}" cy="{y(value):.1f}" r="4.5"/></g>'
        )
    parts.append(
        f'<text class="t" x="{(left + width) / 2:.0f}" y="{height - 6}" text-anchor="middle">'
        f"{escape_for_xml(across)}{' (a cross: no plan fits)' if len(known) < len(points) else ''}</text>"
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>{escape_for_xml(title)}</title>'
        f'<path class="line" d="{"".join(line)}"/>{"".join(parts)}</svg>'
    )


def line_chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, title: str, across: str) -> str:
    """One line for each name, in the colours of devices (dashed from the ninth on), on linear axes."""
    width, height, left, top, bottom = _WIDTH, 320, 70, 12, 40
    points = [point for _, line in lines for point in line if math.isfinite(point[1])]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    spacing = axis_ticks(high - low, 5)[1]
    low, high = math.floor(low / spacing) * spacing, math.ceil(high / spacing) * spacing
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def x(value: float) -> float:
        return left + (value - first) / ((last - first) or 1.0) * (width - left - 20)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - top - bottom)

    parts = []
    for value in (low + spacing * at for at in range(round((high - low) / spacing) + 1)):
        parts.append(
            f'<path class="grid" d="M{left} {y(value):.1f}H{width - 20}"/><text class="t" x="{left - 6}"'
            f' y="{y(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    step = axis_ticks(last - first, 8)[1] if last > first else 1.0
    for at in range(math.ceil(first / step), math.floor(last / step) + 1):
        parts.append(
            f'<text class="t" x="{x(step * at):.0f}" y="{height - 22}" text-anchor="middle">{step * at:g}</text>'
        )
    for number, (name, line) in enumerate(lines):
        known = [f"{x(px):.1f} {y(py):.1f}" for px, py in line if math.isfinite(py)]
        if known:
            dashed = ' stroke-dasharray="7 4"' if number >= _NUM_COLOURS else ""
            parts.append(
                f"<g><title>{escape_for_xml(name)}</title>"
                f'<path class="stroke s{number % _NUM_COLOURS}"{dashed} d="M{"L".join(known)}"/></g>'
            )
    parts.append(
        f'<text class="t" x="{(left + width) / 2:.0f}" y="{height - 5}" text-anchor="middle">{escape_for_xml(across)}</text>'
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>{escape_for_xml(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def interval_chart(rows: Sequence[tuple[str, float, float, float]], bound: float, *, title: str) -> str:
    """(name, value, low, high) as points with their intervals, one below the other; the bound as a line."""
    known = [value for _, *row in rows for value in row if math.isfinite(value)]
    if not known:
        return ""
    width, left, right, tall, top = _WIDTH, 190, 24, 22, 10
    height = top + tall * len(rows) + 26
    low, high = min(*known, bound, 0.0), max(*known, bound)
    high = high if high > low else low + 1.0

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - right)

    parts = []
    for at in axis_ticks(high - low, 8):
        parts.append(
            f'<path class="grid" d="M{x(low + at):.1f} {top}V{height - 22}"/><text class="t" x="{x(low + at):.1f}"'
            f' y="{height - 7}" text-anchor="middle">{low + at:.4g}</text>'
        )
    for at, (name, value, first, last) in enumerate(rows):
        y = top + tall * (at + 0.5)
        bar = f'<path class="stroke s{at % _NUM_COLOURS}" d="M{x(first):.1f} {y:.1f}H{x(last):.1f}"/>'
        parts.append(
            f"<g><title>{escape_for_xml(f'{name}: {value:.4g}')}</title>"
            f'<text class="t" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape_for_xml(shorten(name, 28))}</text>'
            f"{bar if math.isfinite(first) and math.isfinite(last) else ''}"
            f'<circle class="d{at % _NUM_COLOURS}" cx="{x(value):.1f}" cy="{y:.1f}" r="5"/></g>'
        )
    parts.append(f'<path class="limit" d="M{x(bound):.1f} {top}V{height - 22}"/>')
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>{escape_for_xml(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def bar_lanes(bars: Sequence[tuple[str, float, float, int, str]], *, title: str) -> str:
    """(lane, start, end, colour, label) as bars, a lane for each name."""
    lanes = list(dict.fromkeys(lane for lane, *_ in bars))
    width, left, tall = _WIDTH, 150, 24
    height = 30 + len(lanes) * (tall + 4)
    end = max((stop for _, _, stop, *_ in bars), default=0.0) or 1.0

    def x(seconds: float) -> float:
        return left + seconds / end * (width - left - 20)

    parts = []
    for at, text in time_ticks(end, 8):
        place = min(x(at), width - 2 - _LETTER_PX * len(text) / 2)  # the last one is not cut off
        parts.append(
            f'<path class="grid" d="M{x(at):.1f} 20V{height}"/><text class="t" x="{place:.1f}" y="14"'
            f' text-anchor="middle">{text}</text>'
        )
    for at, lane in enumerate(lanes):
        parts.append(
            f'<text class="t" x="{left - 8}" y="{42 + at * (tall + 4):.0f}" text-anchor="end">{escape_for_xml(shorten(lane, 22))}</text>'
        )
    for lane, start, stop, colour, label in bars:
        top = 26 + lanes.index(lane) * (tall + 4)
        text = escape_for_xml(f"{label} on {lane}: {format_seconds(start)} to {format_seconds(stop)}")
        parts.append(
            f'<g><title>{text}</title><rect class="d{colour % 8}" x="{x(start):.1f}" y="{top}"'
            f' width="{max(x(stop) - x(start) - 0.5, 0.8):.1f}" height="{tall}"/></g>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>{escape_for_xml(title)}</title>'
        f"{''.join(parts)}</svg>"
    )

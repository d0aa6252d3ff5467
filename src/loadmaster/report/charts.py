"""Charts of the page as SVG: memory over time, the cluster with what crosses it, time against plan time, curves.

Colours come from classes of the page's style sheet, so that a chart follows light and dark. All text is escaped.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from loadmaster.core.answers.review import MEMORY_KINDS, MemoryCurve, Review
from loadmaster.core.cluster import UNLIMITED_BYTES, Cluster
from loadmaster.core.timeline import SpanKind
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.gantt import axis_ticks
from loadmaster.report.plain_text import escape_for_xml

_WIDTH = 960
_MOST_LABELS = 12
_MOST_ROOM = 12  # a limit so many times the peak would leave nothing to see of what is held
_Scale = Callable[[float], float]


def memory_chart(name: str, curve: MemoryCurve, limit_bytes: int, end_s: float, *, width: int = 480) -> str:
    """What stands on a device over time, stacked by kind, with its limit and its highest moment."""
    height, left, top, bottom = 190, 62, 22, 26
    inner, tall = width - left - 12, height - top - bottom
    limited = limit_bytes < UNLIMITED_BYTES // 2
    peak = max(curve.peak_bytes, 1)
    shown = limited and limit_bytes <= _MOST_ROOM * peak
    ceiling = max(peak, limit_bytes if shown else 0) * 1.08
    end = end_s or 1.0

    def x(seconds: float) -> float:
        return left + min(seconds / end, 1.0) * inner

    def y(size: float) -> float:
        return top + tall * (1 - size / ceiling)

    parts = [_size_axis(ceiling, left, width - 12, y)]
    for at in axis_ticks(end, 4):
        parts.append(
            f'<text class="t" x="{x(at):.1f}" y="{height - 8}" text-anchor="middle">{format_seconds(at)}</text>'
        )
    stacked = np.cumsum(curve.held_bytes, axis=1)
    edges = [*curve.time_s.tolist(), end]
    for kind in range(len(MEMORY_KINDS)):
        if not curve.held_bytes[:, kind].any():
            continue
        upper = stacked[:, kind].tolist()
        lower = (stacked[:, kind] - curve.held_bytes[:, kind]).tolist()
        parts.append(f'<path class="m{kind}" d="{_steps(edges, upper, lower, x, y)}"/>')
    if shown:
        parts.append(
            f'<path class="limit" d="M{left} {y(limit_bytes):.1f}H{width - 12}"/><text class="t halo limit-text"'
            f' x="{width - 14}" y="{y(limit_bytes) - 3:.1f}" text-anchor="end">limit {format_bytes(limit_bytes)}</text>'
        )
    at, high = x(curve.peak_s), y(curve.peak_bytes)
    anchor = "end" if at > left + inner / 2 else "start"
    parts.append(
        f'<path class="peak" d="M{at:.1f} {high:.1f}V{top + tall}"/><circle class="peak-dot" cx="{at:.1f}"'
        f' cy="{high:.1f}" r="4"/>'
    )
    over = limited and curve.peak_bytes > limit_bytes
    said = f"peak {format_bytes(curve.peak_bytes)} at {format_seconds(curve.peak_s)}"
    if limited:
        far = "" if shown else ", far above"
        said += f" of {format_bytes(limit_bytes)}{': does not fit' if over else far}"
    title = escape_for_xml(f"{name}: {said}")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart{" over" if over else ""}"'
        f' data-anchor="{anchor}"><title>{title}</title>'
        f'<text class="t b" x="{left}" y="14">{escape_for_xml(_shorten(name))}</text>'
        f'<text class="t" x="{width - 12}" y="14" text-anchor="end">{said}</text>{"".join(parts)}</svg>'
    )


def _steps(edges: list[float], upper: list[float], lower: list[float], x: _Scale, y: _Scale) -> str:
    """A band between two staircases."""
    there = [f"M{x(edges[0]):.1f} {y(upper[0]):.1f}"]
    for at in range(len(upper)):
        there.append(f"V{y(upper[at]):.1f}H{x(edges[at + 1]):.1f}")
    for at in reversed(range(len(lower))):
        there.append(f"V{y(lower[at]):.1f}H{x(edges[at]):.1f}")
    return "".join(there) + "z"


def _size_axis(ceiling: float, left: int, right: int, y: _Scale) -> str:
    unit = 1024.0 ** max(0, min(4, int(math.log(max(ceiling, 1.0), 1024))))
    lines = []
    for at in axis_ticks(ceiling / unit, 4):
        size = at * unit
        lines.append(
            f'<path class="grid" d="M{left} {y(size):.1f}H{right}"/><text class="t" x="{left - 6}"'
            f' y="{y(size) + 4:.1f}" text-anchor="end">{format_bytes(size)}</text>'
        )
    return "".join(lines)


def cluster_picture(cluster: Cluster, review: Review, peaks: Sequence[int]) -> str:
    """Devices as boxes and what they send each other as arrows, wider where more time goes by."""
    num = cluster.num_devices
    small = num > 10
    width, height = _WIDTH, 420 if num > 2 else 220
    box_w, box_h = (70, 34) if small else (150, 74)
    spot = _spots(num, width, height, box_w, box_h)
    timeline = review.timeline
    step = timeline.step_s or 1.0
    moved = np.flatnonzero(timeline.kind == SpanKind.TRANSFER)
    busy: dict[int, list[float]] = {}
    for pair, span in zip(timeline.resource[moved].tolist(), moved.tolist(), strict=True):
        row = busy.setdefault(pair, [0.0, 0])
        row[0] += float(timeline.end_s[span] - timeline.start_s[span])
        row[1] += 1
    arrows = []
    most = max((seconds for seconds, _ in busy.values()), default=0.0)
    labelled = set() if small else set(sorted(busy, key=lambda pair: -busy[pair][0])[:_MOST_LABELS])
    for pair, (seconds, count) in sorted(busy.items(), key=lambda each: each[1][0]):
        source, target = divmod(pair, num)
        if source == target:
            continue
        wide = 1 + 7 * (seconds / most if most else 0)
        text = (
            f"{cluster.device_name[source]} to {cluster.device_name[target]}: {int(count)} transfers,"
            f" {format_seconds(seconds)}, {format_percent(seconds / step)} of the step"
        )
        label = format_seconds(seconds) if pair in labelled else ""
        arrows.append(_arrow(spot[source], spot[target], (box_w, box_h), wide, text, label=label))
    boxes = []
    for device, (cx, cy) in enumerate(spot):
        share = float(timeline.busy_s[device]) / step
        usable = int(cluster.usable_bytes[device])
        full = min(1.0, peaks[device] / usable)
        name, kind = cluster.device_name[device], cluster.kind_name[int(cluster.kind[device])]
        left, top = cx - box_w / 2, cy - box_h / 2
        title = escape_for_xml(
            f"{name} ({kind}): busy {format_percent(share)}, peak {format_bytes(peaks[device])}"
        )
        where = f", host {int(cluster.host[device])}" if len(set(cluster.host.tolist())) > 1 else ""
        lines = "".join(
            f'<text class="t" x="{cx:.0f}" y="{cy + down:.0f}" text-anchor="middle">{escape_for_xml(text)}</text>'
            for down, text in ((3, f"{_shorten(kind, 16)}{where}"), (17, f"busy {format_percent(share)}"))
        )
        boxes.append(
            f"<g><title>{title}</title>"
            f'<rect class="box-under" x="{left:.0f}" y="{top:.0f}" width="{box_w}" height="{box_h}" rx="6"/>'
            f'<rect class="box d{device % 8}" x="{left:.0f}" y="{top:.0f}" width="{box_w}" height="{box_h}" rx="6"/>'
            f'<rect class="box-full" x="{left + 6:.0f}" y="{top + box_h - 11:.0f}" width="{box_w - 12}" height="5"/>'
            f'<rect class="box-used" x="{left + 6:.0f}" y="{top + box_h - 11:.0f}"'
            f' width="{(box_w - 12) * full:.0f}" height="5"/>'
            f'<text class="t b" x="{cx:.0f}" y="{cy - (2 if small else 14):.0f}" text-anchor="middle">'
            f"{escape_for_xml(_shorten(name, 9 if small else 18))}</text>{'' if small else lines}</g>"
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>Devices and what they send each'
        f' other</title><defs><marker id="tip" viewBox="0 0 10 10" refX="2" refY="5" markerWidth="12"'
        f' markerHeight="12" markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0 0L10 5L0 10z"/>'
        f"</marker></defs>{''.join(arrows)}{''.join(boxes)}</svg>"
    )


def _spots(num: int, width: int, height: int, box_w: int, box_h: int) -> list[tuple[float, float]]:
    if num == 1:
        return [(width / 2, height / 2)]
    across, up = width / 2 - box_w / 2 - 20, height / 2 - box_h / 2 - 12
    if num == 2:
        return [(width / 2 - across * 0.6, height / 2), (width / 2 + across * 0.6, height / 2)]
    turn = -math.pi / 2 - (math.pi / num if num % 2 == 0 else 0)
    angles = [turn + 2 * math.pi * at / num for at in range(num)]
    return [(width / 2 + across * math.cos(a), height / 2 + up * math.sin(a)) for a in angles]


def _arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    box: tuple[float, float],
    wide: float,
    text: str,
    *,
    label: str,
) -> str:
    """From the edge of one box to the edge of another, bent to its right, so that both ways stand apart."""
    (x0, y0), (x1, y1) = start, end
    far = math.hypot(x1 - x0, y1 - y0) or 1.0
    nx, ny = -(y1 - y0) / far, (x1 - x0) / far
    bend = min(44.0, far / 5)
    mx, my = (x0 + x1) / 2 + nx * bend, (y0 + y1) / 2 + ny * bend
    (x0, y0), (x1, y1) = _on_edge(start, (mx, my), box, 2), _on_edge(end, (mx, my), box, 12)
    lx, ly = _on_curve(x0, y0, mx, my, x1, y1, 0.5)
    lx, ly = lx + nx * (wide / 2 + 5), ly + ny * (wide / 2 + 9) + 4
    anchor = "start" if nx > 0.4 else "end" if nx < -0.4 else "middle"
    shown = (
        f'<text class="t halo" x="{lx:.0f}" y="{ly:.0f}" text-anchor="{anchor}">{label}</text>'
        if label
        else ""
    )
    return (
        f"<g><title>{escape_for_xml(text)}</title>"
        f'<path class="wire" d="M{x0:.0f} {y0:.0f}Q{mx:.0f} {my:.0f} {x1:.0f} {y1:.0f}" stroke-width="{wide:.1f}"'
        f' marker-end="url(#tip)"/>{shown}</g>'
    )


def _on_edge(
    centre: tuple[float, float], towards: tuple[float, float], box: tuple[float, float], gap: float
) -> tuple[float, float]:
    """Where the way from the centre of a box leaves it, and a little farther."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    far = math.hypot(dx, dy) or 1.0
    inside = min(box[0] / 2 / abs(dx) if dx else math.inf, box[1] / 2 / abs(dy) if dy else math.inf)
    part = min(inside + gap / far, 0.9)
    return centre[0] + dx * part, centre[1] + dy * part


def _on_curve(
    x0: float, y0: float, mx: float, my: float, x1: float, y1: float, t: float
) -> tuple[float, float]:
    a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t * t
    return a * x0 + b * mx + c * x1, a * y0 + b * my + c * y1


def comparison_chart(rows: Sequence[tuple[str, float, float]], bound_s: float) -> str:
    """(name, plan seconds, step seconds) as points on logarithmic axes, the bound as a line."""
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return ""
    width, height, left, top, bottom = _WIDTH, 320, 80, 16, 40
    times = [max(took, 1e-4) for _, took, _ in rows]
    steps = [step for _, _, step in rows] + ([bound_s] if bound_s > 0 else [])
    low_x, high_x = math.log10(min(times) / 1.6), math.log10(max(times) * 1.6)
    low_y, high_y = math.log10(min(steps) / 1.15), math.log10(max(steps) * 1.15)

    def x(took: float) -> float:
        return left + (math.log10(max(took, 1e-4)) - low_x) / (high_x - low_x) * (width - left - 20)

    def y(step: float) -> float:
        return top + (high_y - math.log10(step)) / (high_y - low_y) * (height - top - bottom)

    parts = []
    for power in range(math.floor(low_x), math.ceil(high_x) + 1):
        at = 10.0**power
        if low_x <= power <= high_x:
            parts.append(
                f'<path class="grid" d="M{x(at):.0f} {top}V{height - bottom}"/><text class="t" x="{x(at):.0f}"'
                f' y="{height - 22}" text-anchor="middle">{format_seconds(at)}</text>'
            )
    for at in _log_ticks(10**low_y, 10**high_y):
        parts.append(
            f'<path class="grid" d="M{left} {y(at):.0f}H{width - 20}"/><text class="t" x="{left - 6}"'
            f' y="{y(at) + 4:.0f}" text-anchor="end">{format_seconds(at)}</text>'
        )
    if bound_s > 0:
        parts.append(
            f'<path class="limit" d="M{left} {y(bound_s):.1f}H{width - 20}"/><text class="t limit-text"'
            f' x="{width - 24}" y="{y(bound_s) + 13:.1f}" text-anchor="end">no plan is faster than'
            f" {format_seconds(bound_s)}</text>"
        )
    taken: list[tuple[float, float]] = []
    for name, took, step in sorted(rows, key=lambda row: row[2]):
        px, py = x(took), y(step)
        ly = py + 4
        while any(abs(ly - oy) < 12 and abs(px - ox) < 150 for ox, oy in taken):
            ly -= 12
        taken.append((px, ly))
        text = escape_for_xml(f"{name}: {format_seconds(step)} a step, planned in {format_seconds(took)}")
        right = px < width - 180
        parts.append(
            f'<g><title>{text}</title><circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>'
            f'<text class="t" x="{px + (9 if right else -9):.1f}" y="{ly:.1f}"'
            f' text-anchor="{"start" if right else "end"}">{escape_for_xml(_shorten(name, 28))}</text></g>'
        )
    parts.append(
        f'<text class="t" x="{(left + width) / 2:.0f}" y="{height - 5}" text-anchor="middle">time to plan</text>'
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>Step time against time to plan'
        f"</title>{''.join(parts)}</svg>"
    )


def _log_ticks(low: float, high: float) -> list[float]:
    found = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digit in (1, 2, 5)
    ]
    return [at for at in found if low <= at <= high] or [low]


def curve_chart(points: Sequence[tuple[str, float | None, str]], *, title: str, across: str) -> str:
    """(label, seconds or None, note) as a line; a gap and a mark where there is no plan."""
    width, height, left, top, bottom = _WIDTH, 280, 90, 16, 44
    known = [value for _, value, _ in points if value is not None]
    high = max(known, default=1.0) * 1.1 or 1.0
    step = (width - left - 40) / max(len(points) - 1, 1)

    def y(value: float) -> float:
        return top + (1 - value / high) * (height - top - bottom)

    parts, line, pen = [], [], "M"
    for at in axis_ticks(high, 5):
        parts.append(
            f'<path class="grid" d="M{left} {y(at):.0f}H{width - 20}"/><text class="t" x="{left - 6}"'
            f' y="{y(at) + 4:.0f}" text-anchor="end">{format_seconds(at)}</text>'
        )
    for at, (label, value, note) in enumerate(points):
        px = left + 10 + at * step
        text = escape_for_xml(f"{label}: {note}")
        if len(points) <= 20 or at % (len(points) // 12) == 0:
            parts.append(
                f'<text class="t" x="{px:.0f}" y="{height - 26}" text-anchor="middle">'
                f"{escape_for_xml(_shorten(label, 14))}</text>"
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
        f"{escape_for_xml(across)} (a cross: no plan fits)</text>"
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>{escape_for_xml(title)}</title>'
        f'<path class="line" d="{"".join(line)}"/>{"".join(parts)}</svg>'
    )


def _shorten(text: str, most: int = 32) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def line_chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, title: str, across: str) -> str:
    """One line for each name, in the colours of devices, on linear axes."""
    width, height, left, top, bottom = _WIDTH, 320, 70, 12, 40
    points = [point for _, line in lines for point in line if math.isfinite(point[1])]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def x(value: float) -> float:
        return left + (value - first) / ((last - first) or 1.0) * (width - left - 20)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - top - bottom)

    parts = []
    for part in range(5):
        value = low + (high - low) * part / 4
        parts.append(
            f'<path class="grid" d="M{left} {y(value):.1f}H{width - 20}"/><text class="t" x="{left - 6}"'
            f' y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    for at in axis_ticks(last - first, 8):
        parts.append(
            f'<text class="t" x="{x(first + at):.0f}" y="{height - 22}" text-anchor="middle">{first + at:g}</text>'
        )
    for number, (name, line) in enumerate(lines):
        known = [f"{x(px):.1f} {y(py):.1f}" for px, py in line if math.isfinite(py)]
        if known:
            parts.append(
                f'<g><title>{escape_for_xml(name)}</title><path class="stroke s{number % 8}" d="M{"L".join(known)}"/></g>'
            )
    parts.append(
        f'<text class="t" x="{(left + width) / 2:.0f}" y="{height - 5}" text-anchor="middle">{escape_for_xml(across)}</text>'
    )
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
    for at in axis_ticks(end, 8):
        parts.append(
            f'<path class="grid" d="M{x(at):.1f} 20V{height}"/><text class="t" x="{x(at):.1f}" y="14"'
            f' text-anchor="middle">{format_seconds(at)}</text>'
        )
    for at, lane in enumerate(lanes):
        parts.append(
            f'<text class="t" x="{left - 8}" y="{42 + at * (tall + 4):.0f}" text-anchor="end">{escape_for_xml(_shorten(lane, 22))}</text>'
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

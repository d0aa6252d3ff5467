"""Charts of a plan as SVG: memory over time, and the cluster with what crosses it.

Colours come from classes of the page's style sheet, so that a chart follows light and dark. All text is escaped.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from loadmaster.core.answers.review import MEMORY_KINDS, MemoryCurve, Review
from loadmaster.core.cluster import UNLIMITED_BYTES, Cluster
from loadmaster.core.timeline import SpanKind
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.gantt import axis_ticks, time_ticks
from loadmaster.report.plain_text import escape_for_xml

_WIDTH = 960
_LETTER_PX = 6.3  # the width of a letter of a label, on average and rounded up
_MOST_LABELS = 12
_MOST_ROOM = 12  # a limit so many times the peak would leave nothing to see of what is held
_Scale = Callable[[float], float]
_Point = tuple[float, float]
_Box = tuple[float, float, float, float]  # left, top, right, bottom


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
    for at, text in time_ticks(end, 6):
        place = min(x(at), width - 2 - _LETTER_PX * len(text) / 2)  # the last one is not cut off
        parts.append(f'<text class="t" x="{place:.1f}" y="{height - 8}" text-anchor="middle">{text}</text>')
    stacked = np.cumsum(curve.held_bytes, axis=1)
    edges = [*curve.time_s.tolist(), end]
    for kind in range(len(MEMORY_KINDS)):
        if not curve.held_bytes[:, kind].any():
            continue
        upper = stacked[:, kind].tolist()
        lower = (stacked[:, kind] - curve.held_bytes[:, kind]).tolist()
        parts.append(f'<path class="m{kind}" d="{_steps(edges, upper, lower, x, y)}"/>')
    at, high = x(curve.peak_s), y(curve.peak_bytes)
    if shown:  # its name stands where the peak does not
        place, anchor = (left + 2, "start") if at > left + inner / 2 else (width - 14, "end")
        parts.append(
            f'<path class="limit" d="M{left} {y(limit_bytes):.1f}H{width - 12}"/><text class="t halo limit-text"'
            f' x="{place}" y="{y(limit_bytes) - 3:.1f}" text-anchor="{anchor}">limit {format_bytes(limit_bytes)}</text>'
        )
    parts.append(
        f'<path class="peak" d="M{at:.1f} {high:.1f}V{top + tall}"/><circle class="peak-dot" cx="{at:.1f}"'
        f' cy="{high:.1f}" r="4"/>'
    )
    over = limited and curve.peak_bytes > limit_bytes
    said = f"peak {format_bytes(curve.peak_bytes)}"
    if limited:
        said += f" of {format_bytes(limit_bytes)}"
    said += f" at {format_seconds(curve.peak_s)}{': does not fit' if over else ''}"
    room = int((width - left - 12 - _LETTER_PX * len(said)) / (_LETTER_PX + 1.5))  # the name is bold
    title = escape_for_xml(f"{name}: {said}")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart small{" over" if over else ""}">'
        f"<title>{title}</title>"
        f'<text class="t b" x="{left}" y="14">{escape_for_xml(shorten(name, max(room, 4)))}</text>'
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
    power = max(0, min(4, int(math.log(max(ceiling, 1.0), 1024))))
    unit, word = 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    lines = []
    for at in axis_ticks(ceiling / unit, 4):
        size = at * unit
        lines.append(
            f'<path class="grid" d="M{left} {y(size):.1f}H{right}"/><text class="t" x="{left - 6}"'
            f' y="{y(size) + 4:.1f}" text-anchor="end">{at:.6g} {word}</text>'
        )
    return "".join(lines)


def cluster_picture(
    cluster: Cluster, review: Review, peaks: Sequence[int], period_s: float | None = None
) -> str:
    """Devices as boxes and what they send each other as arrows, wider where more time goes by.

    `period_s` is what shares of time are of, where it is not the step.
    """
    num = cluster.num_devices
    channels = cluster.is_channel
    shown = np.flatnonzero(~channels).tolist()
    small = len(shown) > 10
    width, height = _WIDTH, 420 if len(shown) > 2 else 220
    box_w, box_h = (70, 34) if small else (150, 74)
    spot = dict(zip(shown, _spots(len(shown), width, height, box_w, box_h), strict=True))
    timeline = review.timeline
    step = period_s or timeline.step_s or 1.0
    of = "the step" if period_s in (None, timeline.step_s) else "the time"
    moved = np.flatnonzero(timeline.kind == SpanKind.TRANSFER)
    busy: dict[int, list[float]] = {}
    for pair, span in zip(timeline.resource[moved].tolist(), moved.tolist(), strict=True):
        source, target = cluster.find_ends(*divmod(pair, num)) if channels.any() else divmod(pair, num)
        row = busy.setdefault(source * num + target, [0.0, 0])
        row[0] += float(timeline.end_s[span] - timeline.start_s[span])
        row[1] += 1
    arrows, labels = [], []
    taken = [(x - box_w / 2, y - box_h / 2, x + box_w / 2, y + box_h / 2) for x, y in spot.values()]
    most = max((seconds for seconds, _ in busy.values()), default=0.0)
    labelled = set() if small else set(sorted(busy, key=lambda pair: -busy[pair][0])[:_MOST_LABELS])
    for pair, (seconds, count) in sorted(busy.items(), key=lambda each: each[1][0]):
        source, target = divmod(pair, num)
        if source == target or not seconds or channels[source] or channels[target]:
            continue
        wide = 1 + 7 * (seconds / most if most else 0)
        text = (
            f"{cluster.device_name[source]} to {cluster.device_name[target]}: {int(count)} transfers,"
            f" {format_seconds(seconds)}, {format_percent(seconds / step)} of {of}"
        )
        arrow = _bend(spot[source], spot[target], (box_w, box_h))
        arrows.append(_draw_arrow(arrow, wide, text))
        if pair in labelled:
            label, box = _label_arrow(arrow, wide, format_seconds(seconds), taken)
            labels.append(label)
            taken.append(box)
    boxes = []
    for device, (cx, cy) in spot.items():
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
            for down, text in ((3, f"{shorten(kind, 16)}{where}"), (17, f"busy {format_percent(share)}"))
        )
        boxes.append(
            f"<g><title>{title}</title>"
            f'<rect class="box-under" x="{left:.0f}" y="{top:.0f}" width="{box_w}" height="{box_h}" rx="6"/>'
            f'<rect class="box d{device % 8}" x="{left:.0f}" y="{top:.0f}" width="{box_w}" height="{box_h}" rx="6"/>'
            f'<rect class="box-full" x="{left + 6:.0f}" y="{top + box_h - 11:.0f}" width="{box_w - 12}" height="5"/>'
            f'<rect class="box-used" x="{left + 6:.0f}" y="{top + box_h - 11:.0f}"'
            f' width="{(box_w - 12) * full:.0f}" height="5"/>'
            f'<text class="t b" x="{cx:.0f}" y="{cy - (2 if small else 14):.0f}" text-anchor="middle">'
            f"{escape_for_xml(shorten(name, 9 if small else 18))}</text>{'' if small else lines}</g>"
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" class="chart"><title>Devices and what they send each'
        f' other</title><defs><marker id="tip" viewBox="0 0 10 10" refX="2" refY="5" markerWidth="12"'
        f' markerHeight="12" markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0 0L10 5L0 10z"/>'
        f"</marker></defs>{''.join(arrows)}{''.join(boxes)}{''.join(labels)}</svg>"
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


def _bend(start: _Point, end: _Point, box: _Point) -> tuple[_Point, _Point, _Point]:
    """From the edge of one box to the edge of another, bent to its right, so that both ways stand apart."""
    (x0, y0), (x1, y1) = start, end
    far = math.hypot(x1 - x0, y1 - y0) or 1.0
    bend = min(44.0, far / 5)
    middle = (x0 + x1) / 2 - (y1 - y0) / far * bend, (y0 + y1) / 2 + (x1 - x0) / far * bend
    return _on_edge(start, middle, box, 2), middle, _on_edge(end, middle, box, 12)


def _draw_arrow(arrow: tuple[_Point, _Point, _Point], wide: float, text: str) -> str:
    (x0, y0), (mx, my), (x1, y1) = arrow
    return (
        f"<g><title>{escape_for_xml(text)}</title>"
        f'<path class="wire" d="M{x0:.0f} {y0:.0f}Q{mx:.0f} {my:.0f} {x1:.0f} {y1:.0f}" stroke-width="{wide:.1f}"'
        f' marker-end="url(#tip)"/></g>'
    )


def _label_arrow(
    arrow: tuple[_Point, _Point, _Point], wide: float, label: str, taken: Sequence[_Box]
) -> tuple[str, _Box]:
    """Beside the middle of an arrow, or nearer to an end where something else stands there."""
    (x0, y0), _, (x1, y1) = arrow
    far = math.hypot(x1 - x0, y1 - y0) or 1.0
    nx, ny = -(y1 - y0) / far, (x1 - x0) / far
    anchor = "start" if nx > 0.4 else "end" if nx < -0.4 else "middle"
    letters = _LETTER_PX * len(label)
    before = {"start": 0.0, "middle": letters / 2, "end": letters}[anchor]
    found: list[tuple[float, float, _Box]] = []
    for part in (0.5, 0.38, 0.62, 0.28, 0.72, 0.2, 0.8):
        x, y = _on_curve(*arrow[0], *arrow[1], *arrow[2], part)
        x, y = x + nx * (wide / 2 + 5), y + ny * (wide / 2 + 9) + 4
        found.append((x, y, (x - before, y - 11, x - before + letters, y + 3)))
    x, y, box = next((spot for spot in found if not any(_meet(spot[2], other) for other in taken)), found[0])
    return f'<text class="t halo" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{label}</text>', box


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


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


def shorten(text: str, most: int = 32) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"

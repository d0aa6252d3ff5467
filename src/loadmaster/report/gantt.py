"""Gantt: timelines of one graph on one axis, as rows of spans. The one drawing of page, notebook and README.

`draw_gantt` lays spans out in rows; `render_svg` draws rows as a picture of fixed size, `pack_columns` hands
them to the page, whose canvas draws the same rows at any zoom. What a pixel cannot show apart is merged.
"""

import base64
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.core.units import format_bytes
from loadmaster.report.plain_text import escape_for_xml
from loadmaster.report.trace import assign_lanes

CLASSES = ("forward", "backward", "update", "weights", "transfer")
_TRANSFER = CLASSES.index("transfer")
_CLASS_OF_PHASE = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.UPDATE: 2, Phase.PARAM: 3}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#8a8a8a", "#cc79a7")  # of Okabe and Ito: told apart by all eyes
_MOST_PAIRS = 24
_MANY_DEVICES = 8
_MOST_SUBROWS = 3
_SLACK_S = 5e-10  # spans that overlap by less touch: traces count whole nanoseconds
_LETTER_PX = 6.6  # the width of a letter of a name, on average and rounded up
_LANE_PX, _LINK_PX, _GAP_PX, _AXIS_PX = 22, 14, 4, 26
_LEAST_TITLE_PX, _MOST_TITLE_PX = 150, 210  # left of the lanes, for their names
_BAR_PX, _MEMORY_PX = 70, 215
_UNITS = (  # of an axis, and from how many of them on
    (86400.0, "days", 5),
    (3600.0, "h", 5),
    (60.0, "min", 10),
    (1.0, "s", 1),
    (1e-3, "ms", 1),
    (1e-6, "us", 1),
    (1e-9, "ns", 0),
)


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of the drawing: a device or a pair of devices, in one of the timelines."""

    title: str
    series: str  # e.g. 'predicted'
    is_link: bool
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Gantt:
    """Spans in rows: within a row they stand in order and do not overlap."""

    lanes: tuple[Lane, ...]
    row_lane: Ints  # [R]
    row_ptr: Longs  # [R + 1] spans of each row
    end_s: float
    span_start_s: Floats  # [S]
    span_end_s: Floats  # [S]
    span_class: Ints  # [S] CLASSES
    span_op: Ints  # [S] the op, or the producer of what is sent
    span_bytes: Floats  # [S] sent, or made
    span_critical: Ints  # [S] 1 = on the critical path of its timeline
    op_name: Sequence[str]
    op_kind: Sequence[str]
    op_module: Sequence[str]
    of_passes: bool = False  # spans are passes of stages: short ones have room for 'F3'


def draw_gantt(
    graph: Graph,
    timelines: Mapping[str, Timeline],
    critical: Mapping[str, Sequence[int]] | None = None,
    *,
    channels: Container[int] = (),
) -> Gantt:
    """The rows of one or more timelines of the same devices; under each device one lane a timeline.

    `channels` are devices that only carry: they stand among the links.
    """
    lanes: list[Lane] = []
    rows: list[tuple[int, Longs, Timeline, str]] = []
    first = next(iter(timelines.values()))
    idle = idle_devices(timelines.values(), channels)
    for device, name in enumerate(first.device_name):
        if device in idle or device in channels:
            continue
        for series, timeline in timelines.items():
            spans = np.flatnonzero((timeline.kind == SpanKind.COMPUTE) & (timeline.resource == device))
            _add_lane(lanes, rows, timeline, spans, series=series, title=name, is_link=False)
    for device, name in enumerate(first.device_name):
        for series, timeline in timelines.items() if device in channels else ():
            mine = (timeline.kind == SpanKind.COMPUTE) & (timeline.resource == device)
            spans = np.flatnonzero(mine & (timeline.end_s > timeline.start_s))
            if len(spans):
                _add_lane(lanes, rows, timeline, spans, series=series, title=name, is_link=True)
    for title, pairs in _choose_pairs(timelines):
        for series, timeline in timelines.items():
            moved = (timeline.kind != SpanKind.COMPUTE) & np.isin(timeline.resource, pairs)
            _add_lane(lanes, rows, timeline, np.flatnonzero(moved), series=series, title=title, is_link=True)
    return _collect(graph, timelines, lanes, rows, critical or {})


def idle_devices(timelines: Iterable[Timeline], channels: Container[int] = ()) -> set[int]:
    """Devices on which nothing runs, where there are so many that they would hide the others."""
    timelines = list(timelines)
    every = {device for device in range(len(timelines[0].device_name)) if device not in channels}
    if len(every) <= _MANY_DEVICES:
        return set()
    busy = {int(d) for t in timelines for d in np.unique(t.resource[t.kind == SpanKind.COMPUTE])}
    return every - busy if busy else set()


def _choose_pairs(timelines: Mapping[str, Timeline]) -> list[tuple[str, list[int]]]:
    """The busiest pairs of devices, in order; all others in one lane."""
    busy: dict[int, float] = {}
    names = next(iter(timelines.values())).device_name
    for timeline in timelines.values():
        moved = timeline.kind != SpanKind.COMPUTE
        pairs, inverse = np.unique(timeline.resource[moved], return_inverse=True)
        seconds = np.bincount(inverse, (timeline.end_s - timeline.start_s)[moved], minlength=len(pairs))
        for pair, each in zip(pairs.tolist(), seconds.tolist(), strict=True):
            busy[pair] = max(busy.get(pair, 0.0), each)
    busy = {pair: seconds for pair, seconds in busy.items() if seconds > 0}
    chosen = sorted(sorted(busy, key=lambda pair: -busy[pair])[:_MOST_PAIRS])
    num = len(names)

    def title(pair: int) -> str:
        source, target = divmod(pair, num)
        if names[target].startswith(f"{names[source]}: "):  # an edge of a channel has both ends in its name
            return names[target]
        return f"{names[source]} → {names[target] if source != target else 'host memory'}"

    found = [(title(pair), [pair]) for pair in chosen]
    rest = sorted(set(busy) - set(chosen))
    return [*found, *([(f"{len(rest)} more pairs", rest)] if rest else [])]


def _add_lane(
    lanes: list[Lane],
    rows: list[tuple[int, Longs, Timeline, str]],
    timeline: Timeline,
    spans: Longs,
    *,
    series: str,
    title: str,
    is_link: bool,
) -> None:
    start, end = timeline.start_s[spans], timeline.end_s[spans] - _SLACK_S
    order = np.lexsort((end, start))
    spans, start, end = spans[order], start[order], end[order]
    if len(spans) > 1 and (start[1:] < end[:-1]).any():
        row = np.minimum(assign_lanes(start, end), _MOST_SUBROWS - 1)
    else:
        row = np.zeros(len(spans), dtype=np.int32)
    num = int(row.max()) + 1 if len(row) else 1
    for at in range(num):
        rows.append((len(lanes), spans[row == at], timeline, series))
    lanes.append(Lane(title, series, is_link, num))


def _collect(
    graph: Graph,
    timelines: Mapping[str, Timeline],
    lanes: list[Lane],
    rows: list[tuple[int, Longs, Timeline, str]],
    critical: Mapping[str, Sequence[int]],
) -> Gantt:
    made = np.bincount(graph.tensor_op, graph.tensor_bytes.astype(np.float64), minlength=graph.num_ops)
    class_of = np.array([_CLASS_OF_PHASE[Phase(each)] for each in range(len(Phase))], dtype=np.int32)
    flags = {}
    for series, timeline in timelines.items():
        flags[series] = np.zeros(len(timeline.kind), dtype=np.int32)
        flags[series][list(critical.get(series, ()))] = 1
    start, end, kind, op, size, flag = (list[Any]([np.zeros(0)]) for _ in range(6))
    for _, spans, timeline, series in rows:
        compute = timeline.kind[spans] == SpanKind.COMPUTE
        item = timeline.item[spans]
        of = (
            np.where(
                compute, np.minimum(item, graph.num_ops - 1), graph.tensor_op[np.where(compute, 0, item)]
            )
            if graph.num_tensors
            else item
        )
        start.append(timeline.start_s[spans])
        end.append(timeline.end_s[spans])
        op.append(of)
        kind.append(np.where(compute, class_of[graph.phase[of]], _TRANSFER))
        sent = graph.tensor_bytes[np.where(compute, 0, item)] if graph.num_tensors else np.zeros(len(spans))
        size.append(np.where(compute, made[of], sent))
        flag.append(flags[series][spans])
    return Gantt(
        lanes=tuple(lanes),
        row_lane=np.array([lane for lane, *_ in rows], dtype=np.int32),
        row_ptr=np.concatenate([[0], np.cumsum([len(spans) for _, spans, *_ in rows])]),
        end_s=max(timeline.step_s for timeline in timelines.values()),
        span_start_s=np.concatenate(start),
        span_end_s=np.concatenate(end),
        span_class=np.concatenate(kind).astype(np.int32),
        span_op=np.concatenate(op).astype(np.int32),
        span_bytes=np.concatenate(size),
        span_critical=np.concatenate(flag).astype(np.int32),
        op_name=graph.op_name,
        op_kind=graph.op_kind,
        op_module=graph.module,
        of_passes=graph.capture == "pipeline",
    )


# ---- the page


def pack_columns(gantt: Gantt) -> dict[str, Any]:
    """What the page's script draws: names, and columns of numbers in base64.

    A time is a share of the whole in 32 bits: a quarter of a nanosecond in a second.
    """
    unit = (2**32 - 1) / gantt.end_s if gantt.end_s > 0 else 0.0
    modules, module_at = np.unique(np.array(gantt.op_module, dtype=object).astype(str), return_inverse=True)
    kinds, kind_at = np.unique(np.array(gantt.op_kind, dtype=object).astype(str), return_inverse=True)
    begin = np.round(gantt.span_start_s * unit)
    return {
        "end_s": gantt.end_s,
        "short": int(gantt.of_passes),
        "classes": CLASSES,
        "lanes": [[lane.title, lane.series, int(lane.is_link), lane.num_rows] for lane in gantt.lanes],
        "row_lane": gantt.row_lane.tolist(),
        "row_ptr": gantt.row_ptr.tolist(),
        "start": _encode(begin, "<u4"),
        "length": _encode(np.maximum(np.round(gantt.span_end_s * unit) - begin, 0), "<u4"),
        "op": _encode(gantt.span_op, "<u4"),
        "style": _encode(gantt.span_class + 8 * gantt.span_critical, "<u1"),
        "bytes": _encode(gantt.span_bytes, "<f4"),
        "names": list(gantt.op_name),
        "modules": modules.tolist(),
        "module_of": _encode(module_at, "<u4"),
        "kinds": kinds.tolist(),
        "kind_of": _encode(kind_at, "<u2" if len(kinds) < 2**16 else "<u4"),
        "kind_bits": 16 if len(kinds) < 2**16 else 32,
    }


def _encode(column: Any, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(column, dtype=np.dtype(kind)).tobytes()).decode()


# ---- a picture


def render_svg(
    gantt: Gantt,
    *,
    width: int = 960,
    title: str = "",
    standalone: bool = False,
    memory: Mapping[str, tuple[int, int]] | None = None,
    words: Sequence[str] = CLASSES,
) -> str:
    """A picture of the whole; `standalone` brings its own colours, for light and for dark.

    `words` are what the legend calls the classes of spans. `memory` is the peak and the limit of each device
    in bytes, drawn as a bar beside its lane.
    """
    many = len({lane.series for lane in gantt.lanes}) > 1
    names = [_name_lane(lane, many) for lane in gantt.lanes]
    left = _choose_title_px(names)
    inner = width - left - 10 - (_MEMORY_PX if memory else 0)
    body: list[str] = []
    top = _AXIS_PX
    row = 0
    for lane, name in zip(gantt.lanes, names, strict=True):
        height = _LINK_PX if lane.is_link else _LANE_PX
        body.append(
            f'<text class="g-title" x="{left - 8}" y="{top + height / 2 + 4:g}" text-anchor="end">'
            f"{escape_for_xml(name)}</text>"
            f'<rect class="g-lane" x="{left}" y="{top}" width="{inner}" height="{height}"/>'
        )
        if memory and not lane.is_link and lane.title in memory:
            body.append(_memory_bar(*memory[lane.title], left + inner + 10, top))
        for at in range(lane.num_rows):
            share = height / lane.num_rows
            body += _row_paths(gantt, row, top + at * share, share, left, inner)
            if gantt.of_passes and not lane.is_link:
                body += _pass_labels(gantt, row, top + at * share + share / 2 + 4, left, inner)
            row += 1
        top += height + _GAP_PX
    title = escape_for_xml(title or "Timeline of devices and links")
    axis = _axis(gantt.end_s, left, inner, top)
    if memory:
        axis += f'<text class="g-title" x="{left + inner + 10}" y="{_AXIS_PX - 9}">peak of memory</text>'
    style = f"<style>{_STYLE}</style>" if standalone else ""
    legend = _legend(gantt, left, top + 14, words) if standalone else ""
    height = top + (34 if standalone else 6)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gantt" viewBox="0 0 {width} {height}" role="img"'
        f' width="{width}" height="{height}" font-family="system-ui, sans-serif" font-size="11">'
        f"<title>{title}</title>{style}{axis}{''.join(body)}{legend}</svg>"
    )


def _memory_bar(peak_bytes: int, limit_bytes: int, left: float, top: float) -> str:
    """How much of a device is full at its worst moment, and both numbers."""
    share = min(peak_bytes / limit_bytes, 1.0) if limit_bytes > 0 else 0.0
    text = f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}"
    return (
        f'<rect class="g-lane" x="{left:g}" y="{top}" width="{_BAR_PX}" height="{_LANE_PX}"/>'
        f'<rect class="{"g-full" if peak_bytes > limit_bytes else "g-memory"}" x="{left:g}" y="{top}"'
        f' width="{_BAR_PX * share:.1f}" height="{_LANE_PX}"/>'
        f'<text class="g-title" x="{left + _BAR_PX + 6:g}" y="{top + _LANE_PX / 2 + 4:g}">{text}</text>'
    )


def _row_paths(gantt: Gantt, row: int, top: float, height: float, left_px: int, inner: int) -> list[str]:
    """One path for each class of spans in a row; neighbours of a class closer than half a pixel are one."""
    lo, hi = int(gantt.row_ptr[row]), int(gantt.row_ptr[row + 1])
    scale = inner / gantt.end_s if gantt.end_s > 0 else 0.0
    found = []
    for kind in range(len(CLASSES)):
        here = lo + np.flatnonzero(gantt.span_class[lo:hi] == kind)
        here = here[gantt.span_end_s[here] > gantt.span_start_s[here]]
        if not len(here):
            continue
        left, right = gantt.span_start_s[here] * scale, gantt.span_end_s[here] * scale
        new = np.concatenate([[True], left[1:] - right[:-1] > 0.5])
        if gantt.of_passes:  # each on its own, with a line between
            right, new = np.maximum(right - 0.8, left), np.ones(len(left), dtype=np.bool_)
        begin, last = left[new], np.maximum.reduceat(right, np.flatnonzero(new))
        pieces = [
            f"M{left_px + x:.1f} {top:g}h{max(end - x, 0.4):.1f}v{height:g}H{left_px + x:.1f}z"
            for x, end in zip(begin.tolist(), last.tolist(), strict=True)
        ]
        found.append(f'<path class="g{kind}" d="{"".join(pieces)}"/>')
    return found


def _pass_labels(gantt: Gantt, row: int, baseline: float, left_px: int, inner: int) -> list[str]:
    """'F3' on each pass that has room for it."""
    lo, hi = int(gantt.row_ptr[row]), int(gantt.row_ptr[row + 1])
    scale = inner / gantt.end_s if gantt.end_s > 0 else 0.0
    found = []
    for span in range(lo, hi):
        text = gantt.op_name[int(gantt.span_op[span])].partition(" of ")[0].rpartition(": ")[2]
        left, right = gantt.span_start_s[span] * scale, gantt.span_end_s[span] * scale
        if right - left > 7 * len(text) + 4:
            middle = left_px + (left + right) / 2
            found.append(
                f'<text class="g-pass p{gantt.span_class[span]}" x="{middle:.1f}" y="{baseline:g}"'
                f' text-anchor="middle">{escape_for_xml(text)}</text>'
            )
    return found


def _axis(end_s: float, left: int, inner: int, bottom: int) -> str:
    if end_s <= 0:
        return ""
    ticks = []
    for at, text in time_ticks(end_s, 8):
        x = left + at / end_s * inner
        anchor = "end" if x > left + inner - 20 else "middle"
        ticks.append(
            f'<path class="g-tick" d="M{x:.1f} {_AXIS_PX - 4}V{bottom}"/>'
            f'<text class="g-title" x="{x:.1f}" y="{_AXIS_PX - 9}" text-anchor="{anchor}">{text}</text>'
        )
    return "".join(ticks)


def axis_ticks(end: float, most: int) -> list[float]:
    """Round values from 0 to the end, at most so many."""
    if not end > 0:
        return [0.0]
    raw = end / most
    power = 10.0 ** np.floor(np.log10(raw))
    step = float(power * next(each for each in (1, 2, 5, 10) if power * each >= raw * (1 - 1e-9)))
    return [step * at for at in range(int(end / step + 1e-9) + 1)]


def time_ticks(end_s: float, most: int) -> list[tuple[float, str]]:
    """Round times from 0 to the end and what they are called, all in one unit."""
    scale, unit = next((each for each in _UNITS if end_s >= each[0] * each[2]), _UNITS[-1])[:2]
    ticks = axis_ticks(end_s / scale, most)
    return [(at * scale, f"{at:.6g} {unit}" if at else "0 s") for at in ticks]


def shown_classes(gantt: Gantt) -> list[int]:
    """The classes of spans that take time: others cannot be seen."""
    return [int(at) for at in np.unique(gantt.span_class[gantt.span_end_s > gantt.span_start_s])]


def _legend(gantt: Gantt, left: int, y: int, words: Sequence[str]) -> str:
    """The colours that the picture has."""
    return "".join(
        f'<rect class="g{kind}" x="{left + 100 * at}" y="{y - 9}" width="10" height="10"/>'
        f'<text class="g-title" x="{left + 100 * at + 15}" y="{y}">{words[kind]}</text>'
        for at, kind in enumerate(shown_classes(gantt))
    )


def _name_lane(lane: Lane, many: bool) -> str:
    """The name of a lane: both ends of a link and the word of its timeline stay readable."""
    end = f" ({lane.series})" if many else ""
    most = int((_MOST_TITLE_PX - 8) / _LETTER_PX)
    if len(lane.title) + len(end) <= most:
        return lane.title + end
    room = most - len(end)
    source, arrow, target = lane.title.partition(" → ")
    if not arrow:  # the end tells names of channels apart
        return f"{lane.title[: room // 3]}…{lane.title[room // 3 + 1 - room :]}{end}"
    half = (room - len(arrow)) // 2
    source = _shorten(source, max(half, 2 * half - len(target)))
    return f"{source}{arrow}{_shorten(target, 2 * half - len(source))}{end}"


def _choose_title_px(names: Sequence[str]) -> int:
    longest = max((len(name) for name in names), default=0)
    return int(min(max(8 + _LETTER_PX * longest, _LEAST_TITLE_PX), _MOST_TITLE_PX))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


_STYLE = (  # of this picture alone: in a notebook it stands in the document of others
    "svg.gantt{background:#fff}svg.gantt .g-pass{fill:#14181d}svg.gantt .g-pass.p0{fill:#fff}"
    "svg.gantt .g-title{fill:#333}svg.gantt .g-lane{fill:#8882}svg.gantt .g-tick{stroke:#8884;fill:none}"
    "svg.gantt .g-memory{fill:#56b4e9}svg.gantt .g-full{fill:#d55e00}"
    + "".join(f"svg.gantt .g{at}{{fill:{colour}}}" for at, colour in enumerate(COLOURS))
    # the page around may be light while the system is dark, so the picture brings its background
    + "@media (prefers-color-scheme:dark){svg.gantt{background:#14181d}svg.gantt .g-title{fill:#ddd}}"
)

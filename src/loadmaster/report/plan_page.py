"""Plan page: the sections that are shown of a placement and its review."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadmaster.core.answers.outcomes import Outcomes
from loadmaster.core.answers.review import MEMORY_KINDS, ModuleUse, Review, Wait
from loadmaster.core.cluster import Cluster
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective
from loadmaster.core.reasons import why_none_fits
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.cost.error_bar import format_error
from loadmaster.report import charts, curves, pipelines, tables
from loadmaster.report.documents import predicted_error, samples_per_s
from loadmaster.report.gantt import draw_gantt, idle_devices
from loadmaster.report.page import Card, Page, Rows, Section, render_page
from loadmaster.report.plain_text import escape_control_characters
from loadmaster.report.question_tables import change_text, outcome_text

_MOST_WAITS, _MOST_PARTS, _MOST_LINKS, _MOST_MODULES = 6, 40, 24, 2500
_OPEN_MODULES = 30
_LEAST_SHARE = 1e-3  # of the step
_LEAST_ERROR = 5e-4  # of a prediction; less is shown as 0.0 %
_LEAST_HELD = 1e-3  # of a device, against the fullest one: less has no chart
_WORDS = {
    "transfer": "a transfer from {source}",
    "queue": "a link to be free, for a transfer from {source}",
    "op": "{source} to compute",
    "engine": "another part of the same chip",
    "launch": "its turn, or the host to launch it",
    "end": "nothing: no op is left in this {what}",
    "empty": "nothing: no op is placed here",
}


@dataclass(frozen=True, slots=True, eq=False)
class PlanPage:
    """What a page is made of: the answer, its review, and what is set beside it."""

    placement: Placement
    review: Review
    measured: Review | None = None
    others: Sequence[tuple[str, Placement]] = ()  # of --compare
    outcomes: Sequence[Outcomes] = field(default=())  # sweeps and changes that were tried


def render_plan_page(parts: PlanPage) -> bytes:
    """The HTML file."""
    placement, review = parts.placement, parts.review
    graph, cluster = placement.problem.graph, placement.problem.cluster
    sections = [
        _timeline_section(parts),
        *_memory_section(placement, review),
        *_stage_section(placement),
        _device_section(parts),
        _waiting_section(parts),
        _path_section(parts),
        _cluster_section(placement, review),
        *_module_section(placement, review),
        *_comparison_section(parts),
        *[_outcome_section(outcomes, at) for at, outcomes in enumerate(parts.outcomes)],
        _about_section(placement),
    ]
    found = tables.findings(graph)
    page = Page(
        title=f"{graph.name} on {cluster.name}",
        subtitle=f"{graph.num_ops:,} ops, {_count_devices(cluster)};"
        f" planned by {tables.winner_text(placement)}",
        cards=_cards(parts),
        limits=[review.limit] if review.limit and placement.fits else [],
        troubles=[] if placement.fits else why_none_fits(placement),
        notes=[*review.notes, *found],
        sections=sections,
    )
    return render_page(page)


# ---- the verdict


def _count_devices(cluster: Cluster) -> str:
    channels = int(cluster.is_channel.sum())
    num = cluster.num_devices - channels
    more = " and what carries sums of gradients between them" if channels else ""
    return f"{num} device{'s' * (num > 1)}{more}"


def _list_channels(cluster: Cluster) -> set[int]:
    return set(np.flatnonzero(cluster.is_channel).tolist())


def _cards(parts: PlanPage) -> list[Card]:
    placement, review = parts.placement, parts.review
    fits = placement.fits
    word = tables.time_word(placement.problem)
    found = [
        Card(
            "memory",
            "fits" if fits else "does not fit",
            _describe_fullest(placement),
            "good" if fits else "bad",
        )
    ]
    if placement.score_s is not None:
        found.append(Card(word, format_error(placement.score_s, predicted_error(placement)), "predicted"))
    else:
        found.append(Card(word, format_seconds(review.timeline.step_s), "of the nearest plan"))
    if parts.measured is not None:
        seconds = parts.measured.timeline.step_s
        error = review.timeline.step_s / seconds - 1 if seconds else 0.0
        way = "too long" if error > 0 else "too short"
        off = f"{format_percent(abs(error))} {way}" if abs(error) >= _LEAST_ERROR else "the same"
        found.append(Card("measured", format_seconds(seconds), f"the prediction is {off}"))
    if placement.status == Status.OPTIMAL:
        found.append(Card("gap", "0 %: optimal", "proven", "good"))
    elif placement.gap is not None:
        found.append(
            Card(
                "gap",
                f"≤ {format_percent(placement.gap)}",
                f"above the bound of {tables.bound_text(placement)}",
            )
        )
    else:
        found.append(Card("gap", "unknown", f"lower bound: {tables.bound_text(placement)}"))
    found.append(_rate_card(placement, review))
    if pipelines.stepped_plan(placement) is not None:
        found.append(Card("pipeline", *pipelines.verdict_of(placement, review.timeline)))
    return found


def _rate_card(placement: Placement, review: Review) -> Card:
    if not placement.fits:
        return Card("throughput", "-", "no plan that fits")
    seconds = placement.score_s or review.timeline.step_s
    if _is_throughput(placement):
        rate = samples_per_s(placement)
        return Card("throughput", f"{_number(rate)} samples/s" if rate else "-", "while the pipeline runs")
    if review.samples is not None and seconds:
        return Card(
            "throughput", f"{_number(review.samples / seconds)} samples/s", f"{review.samples} samples a step"
        )
    return Card(
        "steps", f"{_number(1 / seconds)} a second" if seconds else "-", "the graph does not say its batch"
    )


def _is_throughput(placement: Placement) -> bool:
    return placement.problem.objective == Objective.THROUGHPUT


def _pass_word(placement: Placement) -> str:
    """What the timeline shows one of."""
    return "pass" if _is_throughput(placement) else "step"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _describe_fullest(placement: Placement) -> str:
    usable = placement.problem.cluster.usable_bytes
    device = int((placement.peak_bytes / usable).argmax())
    name = placement.problem.cluster.device_name[device]
    peak = format_bytes(placement.peak_bytes[device])
    return f"fullest: {name}, {peak} of {tables.memory_text(int(usable[device]))}"


# ---- sections


def _timeline_section(parts: PlanPage) -> Section:
    timelines = {"predicted": parts.review.timeline}
    critical = {"predicted": parts.review.critical_ops}
    what = _pass_word(parts.placement)
    lead = f"What runs where and when in one {what}."
    how = (
        "Drag to move, double-click or Ctrl and the wheel to zoom, click for one op; with the keyboard:"
        f" arrows, + and -, 0 for the whole {what}, comma and full stop from op to op."
    )
    if parts.measured is not None:
        timelines["measured"] = parts.measured.timeline
        critical["measured"] = parts.measured.critical_ops
        lead = f"{lead} Predicted above measured, on one axis; timing each op makes a measured {what} longer."
    channels = _list_channels(parts.placement.problem.cluster)
    graph = parts.review.graph or parts.placement.problem.graph
    gantt = draw_gantt(graph, timelines, critical, channels=channels)
    idle = idle_devices(timelines.values(), channels)
    names = [parts.review.timeline.device_name[device] for device in sorted(idle)]
    after = f"Nothing runs on {_list_few(names)}." if idle else ""
    return Section("timeline", "Timeline", lead, how=how, gantt=gantt, after=after)


def _list_few(names: Sequence[str], most: int = 8) -> str:
    """All names, or the first ones and how many more."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more devices"


def _memory_section(placement: Placement, review: Review) -> list[Section]:
    if not review.memory:
        return []
    cluster, end_s = placement.problem.cluster, review.timeline.step_s
    usable = cluster.usable_bytes
    most = [curve.peak_bytes / int(usable[device]) for device, curve in enumerate(review.memory)]
    used = [at for at, share in enumerate(most) if share > 0 and share >= _LEAST_HELD * max(most)]
    charts_ = [
        charts.memory_chart(
            cluster.device_name[device], review.memory[device], int(cluster.usable_bytes[device]), end_s
        )
        for device in used
    ]
    channels = _list_channels(cluster)
    idle = [cluster.device_name[d] for d, share in enumerate(most) if not share and d not in channels]
    little = [
        f"{cluster.device_name[device]} (at most {format_bytes(review.memory[device].peak_bytes)})"
        for device, share in enumerate(most)
        if share and device not in used and device not in channels
    ]
    shown = {int(at) for curve in review.memory for at in np.flatnonzero(curve.held_bytes.any(axis=0))}
    key = [(f"k{at}", name) for at, name in enumerate(MEMORY_KINDS) if at in shown]
    after = f"Nothing is held on {_list_few(idle)}. " if idle else ""
    after += f"Almost nothing is held on {_list_few(little)}." if little else ""
    lead = (
        f"What stands on each device during the {_pass_word(placement)}, its limit (dashed), and the moment"
        " at which it holds most."
    )
    return [
        Section("memory", "Memory over time", lead, figures=charts_, small_figures=True, key=key, after=after)
    ]


def _stage_section(placement: Placement) -> list[Section]:
    if pipelines.stepped_plan(placement) is None:
        return []
    columns, rows = pipelines.stage_cells(placement)
    table = Rows(columns, rows, columns[2:-1])
    lead = "What each stage of the pipeline runs and holds; times are of one micro-batch."
    reasons = " ".join(f"{each[:1].upper()}{each[1:]}." for each in pipelines.why(placement))
    return [Section("stages", "Stages", lead, [table], after=reasons)]


def _device_section(parts: PlanPage) -> Section:
    placement, cluster, timeline = parts.placement, parts.placement.problem.cluster, parts.review.timeline
    plan = placement.plan or placement.least_overflow_plan
    assert plan is not None
    bars = []
    channels = _list_channels(cluster)
    idle = idle_devices([timeline], channels)
    period = tables.period_s(placement, timeline)
    counts = plan.count_ops(cluster.num_devices)
    for device, name in enumerate(cluster.device_name):
        if device in channels or (device in idle and not placement.peak_bytes[device]):
            continue
        usable, peak = int(cluster.usable_bytes[device]), int(placement.peak_bytes[device])
        busy = float(timeline.busy_s[device]) / period if period else 0.0
        bars.append(
            {
                "name": escape_control_characters(name),
                "kind": escape_control_characters(cluster.kind_name[int(cluster.kind[device])]),
                "colour": device % 8,
                "ops": f"{int(counts[device]):,}",
                "busy": format_percent(busy),
                "busy_percent": round(100 * min(busy, 1.0), 1),
                "peak": format_bytes(peak),
                "memory": tables.memory_text(usable),
                "full_percent": round(100 * min(peak / usable, 1.0), 1),
                "over": peak > usable,
            }
        )
    rows = []
    if parts.measured is not None:
        seen = parts.measured.timeline
        rows.append(
            Rows(
                ("device", "busy predicted", "busy measured", "peak predicted", "peak measured"),
                [
                    (
                        name,
                        format_seconds(float(timeline.busy_s[d])),
                        format_seconds(float(seen.busy_s[d])),
                        format_bytes(float(timeline.peak_bytes[d])),
                        format_bytes(float(seen.peak_bytes[d])) if seen.peak_bytes[d] else "-",
                    )
                    for d, name in enumerate(cluster.device_name)
                    if d not in channels
                ],
                right=("busy predicted", "busy measured", "peak predicted", "peak measured"),
                title="Predicted and measured",
            )
        )
    when = "while the pipeline runs" if _is_throughput(placement) else "during the step"
    return Section("devices", "Devices", f"How busy each device is {when}, and how full.", rows, bars=bars)


def _waiting_section(parts: PlanPage) -> Section:
    found = [_wait_table(parts.placement, parts.review, "")]
    if parts.measured is not None:
        found[0] = _wait_table(parts.placement, parts.review, "predicted")
        found.append(_wait_table(parts.placement, parts.measured, "measured"))
    lead = (
        "Why devices are idle: what an op that could not start yet was waiting for. The shares of"
        " a device add up to all its idle time."
    )
    if _is_throughput(parts.placement):
        lead += " This is one pass alone; while the pipeline runs, other passes fill most of this time."
    return Section("waiting", "Idle time", lead, found)


def _wait_table(placement: Placement, review: Review, title: str) -> Rows:
    step = review.timeline.step_s or 1.0
    names = placement.problem.cluster.device_name
    of, rows = f"of the {_pass_word(placement)}", list[tuple[str, ...]]()
    channels = _list_channels(placement.problem.cluster)
    idle = idle_devices([review.timeline], channels)
    for device, name in enumerate(names):
        if device in idle or device in channels:
            continue
        reasons = _add_up([wait for wait in review.waits if wait.device == device])
        shown = [each for each in reasons[:_MOST_WAITS] if _sum_up(each) >= _LEAST_SHARE * step]
        rows += [_wait_row(name, each, names, step, _pass_word(placement)) for each in shown]
        rest = [wait for each in reasons[len(shown) :] for wait in each]
        if rest:
            seconds = _sum_up(rest)
            text = f"{len(rest)} shorter wait{'s' * (len(rest) > 1)}"
            rows.append((name, text, "", format_seconds(seconds), format_percent(seconds / step)))
    if not rows:
        none = "no device that computes is ever idle" if idle else "no device is ever idle"
        rows.append(("-", none, "", "", ""))
    return Rows(("device", "waits for", "most of it for", "time", of), rows, ("time", of), title)


def _add_up(waits: Sequence[Wait]) -> list[list[Wait]]:
    """Waits of a device by reason and by the device waited for, the longest first in each and of all."""
    found: dict[tuple[str, int], list[Wait]] = {}
    for wait in waits:
        found.setdefault((wait.kind, wait.source), []).append(wait)
    return sorted(found.values(), key=lambda each: -_sum_up(each))


def _sum_up(waits: Sequence[Wait]) -> float:
    return sum(wait.seconds for wait in waits)


def _wait_row(
    name: str, waits: Sequence[Wait], names: Sequence[str], step: float, what: str
) -> tuple[str, ...]:
    """A reason, what made most of it, and how long it took in all."""
    first = waits[0]
    source = names[first.source] if first.source >= 0 else ""
    cause = f"output of {first.cause}" if first.cause else ""
    count = sum(wait.count for wait in waits)
    if count > 1:
        more = f"of {count} waits" if cause else f"{count} times"
        cause += f"{' ' if cause else ''}({more})"
    seconds = _sum_up(waits)
    text = _WORDS[first.kind].format(source=source, what=what)
    return name, text, cause, format_seconds(seconds), format_percent(seconds / step)


def _path_section(parts: PlanPage) -> Section:
    review, step = parts.review, parts.review.timeline.step_s or 1.0
    of = f"of the {_pass_word(parts.placement)}"
    longest = sorted(review.critical, key=lambda part: part.start_s - part.end_s)[:_MOST_PARTS]
    rows = [
        (
            format_seconds(part.start_s),
            {"compute": "computes on", "transfer": "sent", "wait": "waits on"}[part.kind]
            + f" {part.resource}",
            part.module or "-",
            part.first if part.num == 1 else f"{part.first} ... {part.last} ({part.num})",
            format_seconds(part.end_s - part.start_s),
            format_percent((part.end_s - part.start_s) / step),
        )
        for part in sorted(longest, key=lambda part: part.start_s)
    ]
    hidden = len(review.critical) - len(longest)
    title = f"The path, stretch by stretch ({len(longest)})"
    note = (
        f"The {len(longest)} longest of {len(review.critical)} stretches, in order of time." if hidden else ""
    )
    table = Rows(
        ("from", "what", "module", "ops", "time", of),
        rows,
        ("from", "time", of),
        title,
        note,
        folded=True,
    )
    shares: dict[tuple[str, str], float] = {}
    for part in review.critical:
        key = (part.kind, part.resource)
        shares[key] = shares.get(key, 0.0) + part.end_s - part.start_s
    words = {"compute": "computing on {}", "transfer": "sending {}", "wait": "waiting on {}"}
    total = Rows(
        ("what", "time", of),
        [
            (words[kind].format(where), format_seconds(seconds), format_percent(seconds / step))
            for (kind, where), seconds in sorted(shares.items(), key=lambda pair: -pair[1])
            if seconds > 0
        ],
        ("time", of),
    )
    lead = (
        "The chain of ops and transfers that the step time is made of: to be faster, something here"
        " must change."
    )
    if _is_throughput(parts.placement):
        lead = (
            "The chain of ops and transfers that one pass is made of. How fast passes follow each other is up"
            " to the busiest device or link."
        )
    return Section("critical-path", "Critical path", lead, [total, table])


def _cluster_section(placement: Placement, review: Review) -> Section:
    cluster = placement.problem.cluster
    period = tables.period_s(placement, review.timeline) or 1.0
    picture = charts.cluster_picture(cluster, review, placement.peak_bytes.tolist(), period)
    rows = [
        (
            link.name,
            format_bytes(link.num_bytes),
            f"{link.num_transfers:,}",
            f"{format_bytes(link.bytes_per_s)}/s",
            format_seconds(link.busy_s),
            format_percent(link.busy_s / period),
        )
        for link in review.links[:_MOST_LINKS]
    ]
    more = len(review.links) - len(rows)
    share = "of the time" if _is_throughput(placement) else "of the step"
    numbers = ("bytes", "transfers", "rate", "busy", share)
    table = Rows(
        ("link", *numbers),
        rows or [("-", "nothing is sent", "", "", "", "")],
        numbers if rows else (),
        title="Links",
        note=f"and {more} links with less to do" if more > 0 else "",
    )
    lead = (
        "Devices with the share of time they compute and (bar) of memory they fill; arrows: what they send."
    )
    return Section("cluster", "Cluster", lead, [table], [picture])


def _module_section(placement: Placement, review: Review) -> list[Section]:
    if len(review.modules) < 2:
        return []
    cluster = placement.problem.cluster
    names = cluster.device_name
    rows = list(review.modules)
    depth = 99
    while len(rows) > _MOST_MODULES:
        depth = max(module.depth for module in rows) - 1
        rows = [module for module in rows if module.depth <= depth]
    tree = _nest(rows, cluster, review.timeline.step_s, _depth_to_open(rows))
    used = _devices_of(rows[0], _list_channels(cluster))
    hidden = len(review.modules) - len(rows)
    return [
        Section(
            "modules",
            "Modules",
            "Where each module runs, with its time and what it holds all step long (weights and their"
            " optimizer).",
            key=[(f"d{device % 8}", names[device]) for device in used],
            tree=tree,
            more=f"{hidden:,} modules below depth {depth} are not listed." if hidden else "",
        )
    ]


def _depth_to_open(rows: Sequence[ModuleUse]) -> int:
    """How deep the tree is open at first: as deep as about a screen has room for."""
    depth = 0
    while depth < 8 and sum(module.depth <= depth + 1 for module in rows) <= _OPEN_MODULES:
        depth += 1
    return max(depth, 1)


def _nest(rows: Sequence[ModuleUse], cluster: Cluster, step_s: float, depth: int) -> Mapping[str, Any]:
    """The tree of rows that stand in the order of a walk."""
    stack: list[dict[str, Any]] = []
    root: dict[str, Any] = {}
    for module in rows:
        node = _module_line(module, cluster, step_s)
        node["open"] = module.depth < depth
        node["below"] = []
        del stack[module.depth :]
        if stack:
            stack[-1]["below"].append(node)
        else:
            root = node
        stack.append(node)
    return root


def _module_line(module: ModuleUse, cluster: Cluster, step_s: float) -> dict[str, Any]:
    total = sum(module.seconds)
    weights = module.seconds if total > 0 else module.ops_on
    whole = sum(weights) or 1
    names, at = cluster.device_name, _devices_of(module, _list_channels(cluster))
    shares = [f"{names[device]} {format_percent(weights[device] / whole)}" for device in at]
    last = module.path.rpartition(".")[2] or "the whole model"
    return {
        "name": escape_control_characters(last),
        "parts": [
            {"colour": device % 8, "percent": f"{100 * weights[device] / whole:.1f}"}
            for device in at
            if weights[device]
        ],
        "split": escape_control_characters(", ".join(shares)),
        "time": format_seconds(total) if total else "-",
        "memory": format_bytes(module.resident_bytes) if module.resident_bytes else "-",
        "on": escape_control_characters(
            ", ".join(names[device] for device in at) if len(at) <= 4 else f"{len(at)} devices"
        ),
    }


def _devices_of(module: ModuleUse, channels: Container[int]) -> list[int]:
    """Where a module has ops, or copies of them that run."""
    there = [at for at, num in enumerate(module.ops_on) if num or module.seconds[at]]
    return [at for at in there if at not in channels]


def _comparison_section(parts: PlanPage) -> list[Section]:
    placement = parts.placement
    rows: list[tuple[str, float | None, float, str]] = []
    for member in placement.members:
        if member.status is not None:
            rows.append((member.name, member.score_s, member.seconds, member.reason))
    if not placement.members:
        rows.append((placement.algorithm, placement.score_s, placement.wall_s, "this plan"))
    for name, other in parts.others:
        why = other.status.value.replace("_", " ")
        rows.append((name, other.score_s, other.wall_s, why))
    if len(rows) < 2:
        return []
    rows.sort(key=lambda row: (row[1] is None, row[1] or 0.0))
    chart = curves.comparison_chart(
        [(name, took, seconds) for name, seconds, took, _ in rows if seconds is not None],
        placement.bound_s,
        upright=tables.time_word(placement.problem),
    )
    bound = placement.bound_s
    table = Rows(
        ("algorithm", "time", "gap", "time to plan", "why"),
        [
            (
                name,
                "does not fit" if seconds is None else format_seconds(seconds),
                format_percent(seconds / bound - 1) if seconds is not None and bound > 0 else "-",
                format_seconds(took),
                why,
            )
            for name, seconds, took, why in rows
        ],
        ("time", "gap", "time to plan"),
    )
    lead = "Every algorithm that was asked: how fast its plan is, and how long it took. Lower left is better."
    return [Section("algorithms", "Algorithms", lead, [table], [chart] if chart else [])]


def _outcome_section(outcomes: Outcomes, at: int) -> Section:
    rows: list[tuple[str, ...]] = [
        (
            row.name,
            outcome_text(row),
            change_text(row.time_s, outcomes.before_s),
            "-" if row.per_sample_s is None else format_seconds(row.per_sample_s),
            row.note,
        )
        for row in outcomes.rows
    ]
    figures = []
    if outcomes.sweep:
        points = [(row.value or row.name, row.time_s, f"{row.name}: {row.note}") for row in outcomes.rows]
        figures.append(curves.curve_chart(points, title=f"Time over {outcomes.sweep}", across=outcomes.sweep))
    numbers = ["time", "against now", "a sample"]
    if all(row.per_sample_s is None for row in outcomes.rows):
        numbers, rows = numbers[:2], [(*row[:3], row[4]) for row in rows]
    table = Rows(("change", *numbers, "why"), rows, numbers)
    title = f"Sweep of {outcomes.sweep}" if outcomes.sweep else "What if"
    return Section(f"outcomes-{at}", title, outcomes.lead, [table], figures)


def _about_section(placement: Placement) -> Section:
    problem = placement.problem
    rows = [
        ("graph", problem.graph.name),
        ("made", problem.graph.capture or "-"),
        ("cluster", problem.cluster.name),
        ("objective", problem.objective.value),
        ("links", problem.links.value),
        ("status", tables.status_text(placement)),
        ("proof", placement.proof or "-"),
        ("lower bound", tables.bound_text(placement)),
        ("guarantee", placement.guarantee or "-"),
        ("time to plan", format_seconds(placement.wall_s)),
        ("digest", placement.digest[:16]),
    ]
    told = [row for row in rows if row[1] != "-"]
    return Section("about", "About this plan", tables=[Rows(("", " "), told)])

"""Tables for people: plans, devices, algorithms side by side."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.findings import FOR_THIS_BRANCH, describe_findings
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Pipeline
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.reasons import kind_of_plan, why_none_fits
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.cost.error_bar import format_error
from loadmaster.graph.origin import samples_in_a_pass
from loadmaster.report import pipelines
from loadmaster.report.documents import measured_part, predicted_error, recomputed_stages
from loadmaster.report.plain_text import escape_control_characters
from loadmaster.report.text_columns import columns, one_line

_MOST_PEAKS = 6
_LONG_REASON = 240
_STATUS = {
    Status.OPTIMAL: "optimal (proven)",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "infeasible (no {kind} fits, proven)",
    Status.NOT_FOUND: "no plan that fits was found",
}


def fields(rows: dict[str, object]) -> Table:
    """Names and values, one pair a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(
            escape_control_characters(name),
            value if isinstance(value, Text) else escape_control_characters(str(value)),
        )
    return table


def time_word(problem: Problem) -> str:
    """What the objective's seconds are called; a captured graph may take many samples at a time."""
    if problem.objective == Objective.STEP:
        return "step time"
    samples = samples_in_a_pass(problem.graph) or 1
    return "time per sample" if samples == 1 else f"time per {samples} samples"


def memory_text(num_bytes: int) -> str:
    """A device's memory, 'unlimited' where there is no limit."""
    return "unlimited" if num_bytes >= UNLIMITED_BYTES // 2 else format_bytes(num_bytes)


def gap_text(gap: float | None) -> str:
    """A gap in percent, or a dash."""
    return "-" if gap is None else format_percent(gap)


def bound_text(placement: Placement) -> str:
    """The lower bound and the argument behind it."""
    if placement.bound_s <= 0:
        return "none"
    return f"{format_seconds(placement.bound_s)} ({placement.bound_name})"


def summary(placement: Placement, timeline: Timeline | None = None) -> Table:
    """What was found, how good it is, and what proves it; `timeline` says how long devices wait."""
    rows: dict[str, object] = {
        "algorithm": winner_text(placement),
        "status": Text(status_text(placement), style="green" if placement.fits else "red"),
    }
    if placement.score_s is not None:
        rows[time_word(placement.problem)] = format_error(placement.score_s, predicted_error(placement))
    if placement.plan is not None and placement.plan.pipeline is not None:
        rows["pipeline"] = _pipeline_text(placement, placement.plan.pipeline, timeline)
    rows["lower bound"] = bound_text(placement)
    if placement.gap is not None:
        kind = kind_of_plan(placement.problem)
        best = "the best possible" if kind == "plan" else f"the best of any {kind}"
        branch = " for this branch" if placement.problem.graph.assumptions else ""
        rows["gap"] = f"at most {gap_text(placement.gap)} above {best}{branch}"
    elif placement.fits:
        rows["gap"] = "unknown: no lower bound above 0 s is proven"
    measured = measured_part(placement)
    if measured is not None:
        rows["measured"] = f"{format_percent(measured)} of the predicted compute time"
    if placement.problem.graph.assumptions:
        num = sum(one.count for one in placement.problem.graph.assumptions)
        rows["assumed"] = Text(
            f"{num} value{'s' * (num > 1)} that the model reads, see below", style="yellow"
        )
    rows["plan time"] = format_seconds(placement.wall_s)
    rows["digest"] = placement.digest[:16]
    return fields(rows)


def findings(graph: Graph) -> list[str]:
    """What was assumed of a captured model, and what looks wrong in it."""
    return describe_findings(graph.assumptions, graph.warnings, graph.notes)


def status_text(placement: Placement) -> str:
    """What is known about the answer; proofs speak of chains or pipelines where those are asked for."""
    text = _STATUS[placement.status].format(kind=kind_of_plan(placement.problem))
    return f"{text} ({FOR_THIS_BRANCH})" if placement.proof.startswith(FOR_THIS_BRANCH) else text


def _pipeline_text(placement: Placement, pipeline: Pipeline, timeline: Timeline | None) -> str:
    """Schedule, micro-batches in flight of each stage, and which stages are recomputed."""
    if placement.problem.is_stepped:
        return pipelines.summary_text(placement, timeline)
    flying = " ".join(map(str, pipeline.in_flight.tolist()))
    again = ", ".join(map(str, recomputed_stages(placement))) or "none"
    asked = f"{pipeline.schedule}, {pipeline.num_microbatches} micro-batches"
    return f"{asked}; in flight {flying}; stages recomputed: {again}"


def winner_text(placement: Placement) -> str:
    """The algorithm, with the member of its portfolio whose plan it is."""
    best = [m.name for m in placement.members if m.reason.split(";")[0] == "best"]
    return f"{placement.algorithm} ({best[0]})" if best else placement.algorithm


def devices(placement: Placement, timeline: Timeline | None) -> Table:
    """Every device: what it holds, how busy it is (if a timeline says so), and how full."""
    cluster = placement.problem.cluster
    plan = placement.plan or placement.least_overflow_plan
    busy = _busy_texts(placement, timeline)
    titles = ["device", "kind", "ops", *(["busy"] if busy else []), "peak", "memory", ""]
    table = columns(*titles, right=("ops", "busy", "peak", "memory"), whole=("ops", "busy", "peak", "memory"))
    num = cluster.num_devices
    counts = plan.count_ops(num) if plan else np.zeros(num, dtype=np.int64)
    for d, name in enumerate(cluster.device_name):
        usable, peak = int(cluster.usable_bytes[d]), int(placement.peak_bytes[d])
        table.add_row(
            one_line(name),
            one_line(cluster.kind_name[cluster.kind[d]]),
            str(int(counts[d])),
            *(busy[d : d + 1]),
            format_bytes(peak),
            memory_text(usable),
            Bar(peak / usable),
        )
    return table


def _busy_texts(placement: Placement, timeline: Timeline | None) -> list[str]:
    """Share of the time each device computes: of the step, or of a pipeline's time per sample."""
    if timeline is None:
        return []
    period = period_s(placement, timeline)
    return [format_percent(busy_s / period) if period else "-" for busy_s in timeline.busy_s.tolist()]


def period_s(placement: Placement, timeline: Timeline) -> float:
    """What shares of time are of: the step, or the time from one pass of a full pipeline to the next."""
    throughput = placement.problem.objective == Objective.THROUGHPUT
    return (throughput and placement.score_s) or timeline.step_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A filled bar as wide as there is room for; red where it overflows."""

    share: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Four to twenty characters."""
        return Measurement(4, 20)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar, in this terminal's width."""
        width = min(options.max_width, 20)
        full = min(width, round(min(self.share, 1.0) * width))
        colour = "red" if self.share > 1 else "yellow" if self.share > 0.9 else "green"
        yield Text.assemble(("█" * full, colour), ("░" * (width - full), "dim"))


def modules(placement: Placement, depth: int = 2, most: int = 24) -> Table:
    """Where the modules go, neighbours on the same devices in one row."""
    problem, plan = placement.problem, placement.plan
    assert plan is not None
    names, seen = problem.cluster.device_name, dict[str, set[int]]()
    for path, d in zip(problem.graph.module, plan.device.tolist(), strict=True):
        seen.setdefault(".".join(path.split(".")[:depth]) or "(no module)", set()).add(d)
    rows: list[tuple[str, str, str]] = []
    for path, devices_of in seen.items():
        where = " + ".join(names[d] for d in sorted(devices_of))
        if rows and rows[-1][2] == where:
            rows[-1] = (rows[-1][0], path, where)
        else:
            rows.append((path, path, where))
    table = columns("module", "on")
    for first, last, where in rows[:most]:
        table.add_row(one_line(first if first == last else f"{first} ... {last}"), one_line(where))
    if len(rows) > most:
        table.add_row(f"and {len(rows) - most} more")
    return table


def members(placement: Placement) -> Table:
    """How the members of a portfolio did."""
    table = columns("member", "status", "time", "took", "why", whole=("member", "status", "time", "took"))
    passed_over: dict[str, list[Member]] = {}
    for m in placement.members:
        if m.status is None:
            passed_over.setdefault(_kind_of_reason(m), []).append(m)
            continue
        seconds = "-" if m.score_s is None else format_seconds(m.score_s)
        took, status = format_seconds(m.seconds), m.status.replace("_", " ")
        table.add_row(one_line(m.name), status, seconds, took, one_line(m.reason, _LONG_REASON))
    for alike in passed_over.values():
        names = ", ".join(m.name for m in alike)
        why = one_line(f"{names}: not tried: {_own_reason(alike[-1])}", _LONG_REASON)
        table.add_row(f"{len(alike)} more", "-", "-", "-", why)
    return table


def _own_reason(member: Member) -> str:
    """Why a member was not tried, without its name."""
    return re.sub(r"^not tried: ", "", member.reason).removeprefix(f"{member.name.split('(')[0]} ")


def _kind_of_reason(member: Member) -> str:
    """The same for members that were passed over alike, though the numbers may have changed meanwhile."""
    return re.sub(r"[0-9][0-9.,e-]*", "#", _own_reason(member))


def comparison(rows: Sequence[tuple[str, Placement | str]]) -> Table:
    """Algorithms side by side: best first, those that do not fit or do not apply last."""
    placements = [p for _, p in rows if isinstance(p, Placement)]
    names = placements[0].problem.cluster.device_name if placements else ()
    word = time_word(placements[0].problem) if placements else "time"
    few = len(names) <= _MOST_PEAKS
    shown = " / ".join(one_line(name, 24).plain for name in names) if few else "fullest device"
    unit = "GiB" if max((int(p.peak_bytes.max()) for p in placements), default=0) >= 2**29 else "MiB"
    titles = ("algorithm", word, "gap", f"peak {unit} {shown}", "plan time")
    table = columns(*titles, right=titles[1:], whole=("algorithm", "gap"))
    fastest = min((p.score_s for p in placements if p.score_s is not None), default=None)
    for name, result in rows:
        if isinstance(result, str):
            table.add_row(one_line(name), "-", "-", "-", "-", style="dim")
            continue
        table.add_row(
            one_line(name),
            "does not fit"
            if result.score_s is None
            else format_error(result.score_s, predicted_error(result)),
            gap_text(result.gap),
            peaks(result, 2**30 if unit == "GiB" else 2**20),
            format_seconds(result.wall_s),
            style="bold green" if result.fits and result.score_s == fastest else "" if result.fits else "red",
        )
    return table


def peaks(placement: Placement, scale: int) -> str:
    """Peak bytes of every device in one unit, or of the fullest where there are many."""
    values = placement.peak_bytes.tolist()
    chosen = values if len(values) <= _MOST_PEAKS else [max(values)]
    return " / ".join(f"{value / scale:.1f}" if value else "0" for value in chosen)


def notes(rows: Sequence[tuple[str, Placement | str]]) -> list[str]:
    """What the gap is measured from, why some algorithms have no plan, and which plans are proven."""
    placements = [p for _, p in rows if isinstance(p, Placement)]
    said: dict[str, list[str]] = {}
    for name, result in rows:
        text = result if isinstance(result, str) else explain_placement(result)
        said.setdefault(text.removeprefix(f"{name} "), []).append(name)
    lines = [f"{', '.join(names)}: {text}" for text, names in said.items() if text]
    if any(p.gap is not None for p in placements):
        lines.insert(0, f"gap: above the lower bound of {bound_text(placements[0])}, which no plan can beat")
    return [escape_control_characters(line) for line in lines]


def explain_placement(placement: Placement) -> str:
    """Why a placement is what it is, in a few words."""
    if placement.status == Status.OPTIMAL:
        return f"optimal: {placement.proof}"
    return "" if placement.fits else why_none_fits(placement)[0]

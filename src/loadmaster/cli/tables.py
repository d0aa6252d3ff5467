"""Tables for people: plans, devices, algorithms side by side."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes, format_percent, format_seconds

_MOST_PEAKS = 6


def one_line(text: str, limit: int = 48) -> Text:
    """A name from elsewhere, safe to print: control characters shown, markup not obeyed."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return Text(shown if len(shown) <= limit else f"{shown[: limit - 1]}…")


def time_word(objective: Objective) -> str:
    """What the objective's seconds are called."""
    return "step time" if objective == Objective.STEP else "time per sample"


def memory_text(num_bytes: int) -> str:
    """A device's memory, 'unlimited' where there is no limit."""
    return "unlimited" if num_bytes >= UNLIMITED_BYTES // 2 else format_bytes(num_bytes)


def gap_text(gap: float | None) -> str:
    """A gap in percent, or a dash."""
    return "-" if gap is None else format_percent(gap)


def summary(placement: Placement) -> Table:
    """What was found, how good it is, and what proves it."""
    table = Table.grid(padding=(0, 2))
    table.add_row("algorithm", _winner(placement))
    style = "green" if placement.fits else "red"
    table.add_row("status", Text(placement.status.replace("_", " "), style=style))
    if placement.score_s is not None:
        table.add_row(time_word(placement.problem.objective), format_seconds(placement.score_s))
    table.add_row("lower bound", f"{format_seconds(placement.bound_s)} ({placement.bound_name})")
    table.add_row("gap", f"{gap_text(placement.gap)} at most" if placement.gap else gap_text(placement.gap))
    table.add_row("plan time", format_seconds(placement.wall_s))
    table.add_row("digest", placement.digest[:16])
    return table


def _winner(placement: Placement) -> str:
    best = [m.name for m in placement.members if m.reason == "best"]
    return f"{placement.algorithm} ({best[0]})" if best else placement.algorithm


def devices(placement: Placement, timeline: Timeline | None) -> Table:
    """Every device: what it holds, how busy it is, and how full."""
    cluster = placement.problem.cluster
    plan = placement.plan or placement.least_overflow_plan
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("device", "kind", "ops", "busy", "peak", "memory", ""):
        table.add_column(name, justify="left" if name in ("device", "kind", "") else "right")
    counts = (
        np.bincount(plan.device, minlength=cluster.num_devices) if plan else np.zeros(cluster.num_devices)
    )
    for d, name in enumerate(cluster.device_name):
        busy = "-"
        if timeline is not None and timeline.step_s > 0:
            busy = format_percent(timeline.busy_s[d] / timeline.step_s)
        usable, peak = int(cluster.usable_bytes[d]), int(placement.peak_bytes[d])
        table.add_row(
            one_line(name),
            one_line(cluster.kind_name[cluster.kind[d]]),
            str(int(counts[d])),
            busy,
            format_bytes(peak),
            memory_text(usable),
            bar(peak / usable),
        )
    return table


def bar(share: float, width: int = 20) -> Text:
    """A filled bar; red where it overflows."""
    full = min(width, round(share * width))
    colour = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    text = Text("█" * full, style=colour)
    text.append("░" * (width - full), style="dim")
    return text


def members(placement: Placement) -> Table:
    """How the members of a portfolio did."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("member", "status", "time", "took", "why"):
        table.add_column(name)
    for m in placement.members:
        status = m.status.replace("_", " ") if m.status else "-"
        seconds = "-" if m.score_s is None else format_seconds(m.score_s)
        table.add_row(m.name, status, seconds, format_seconds(m.seconds), one_line(m.reason, 70))
    return table


def comparison(rows: Sequence[tuple[str, Placement | str]]) -> Table:
    """Algorithms side by side: best first, those that do not fit or do not apply last."""
    placements = [p for _, p in rows if isinstance(p, Placement)]
    names = placements[0].problem.cluster.device_name if placements else ()
    word = time_word(placements[0].problem.objective) if placements else "time"
    shown = "/".join(names) if len(names) <= _MOST_PEAKS else "fullest device"
    unit = "GiB" if max((int(p.peak_bytes.max()) for p in placements), default=0) >= 2**29 else "MiB"
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("algorithm", word, "gap", f"peak {unit} {shown}", "plan time"):
        table.add_column(Text(title), justify="left" if title == "algorithm" else "right")
    fastest = min((p.score_s for p in placements if p.score_s is not None), default=None)
    for name, result in rows:
        if isinstance(result, str):
            table.add_row(name, "-", "-", "-", "-", style="dim")
            continue
        table.add_row(
            name,
            format_seconds(result.score_s) if result.score_s is not None else "does not fit",
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
    """Why some algorithms have no plan, and which plans are proven."""
    said = [(name, result if isinstance(result, str) else note(result)) for name, result in rows]
    return [f"{name}: {text}" for name, text in said if text]


def note(placement: Placement) -> str:
    """Why a placement is what it is, in a few words."""
    if placement.status == Status.OPTIMAL:
        return f"optimal: {placement.proof}"
    return "" if placement.fits else why_not_fit(placement)[0]


def why_not_fit(placement: Placement) -> list[str]:
    """One line per reason: the proof, or which device lacks how many bytes and what to do."""
    cluster = placement.problem.cluster
    lines = []
    if placement.status == Status.INFEASIBLE:
        lines.append(f"proven: {placement.proof}")
    for d in np.flatnonzero(placement.shortfall_bytes > 0):
        need, have = int(placement.peak_bytes[d]), int(cluster.usable_bytes[d])
        lines.append(
            f"{cluster.device_name[d]} needs {format_bytes(need)} of {format_bytes(have)}; free"
            f" {format_bytes(need - have)} more: a smaller batch, a device more, or another --algorithm"
        )
    return lines or [placement.proof or "no plan was found"]

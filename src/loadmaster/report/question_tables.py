"""Tables of `explain`, `diff` and `whatif`."""

from rich.table import Table

from loadmaster.core.answers.outcomes import Changed, Difference, Explanation, Outcomes
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.tables import fields
from loadmaster.report.text_columns import columns, one_line

_MOST_MODULES = 24
_LONG = 160


def elsewhere(found: Explanation) -> Table:
    """The target on every device: time, bytes sent, memory over."""
    numbers = ("step", "change", "sent", "planned again")
    binding = any(row.binds for row in found.elsewhere)
    last = ("memory", "what binds") if binding else ("memory",)
    table = columns("device", *numbers, *last, right=numbers, whole=("device", *numbers))
    for row in found.elsewhere:
        if row.time_s is None:
            rest = ("",) if binding else ()
            table.add_row(one_line(row.device), "-", "-", "-", "-", one_line(row.note), *rest)
            continue
        over = f"{format_bytes(row.over_bytes)} over on {row.over_device}" if row.over_bytes else "fits"
        table.add_row(
            one_line(f"{row.device} (now)" if row.is_here else row.device),
            format_seconds(row.time_s),
            "" if row.is_here else change_text(row.time_s, found.time_s),
            format_bytes(row.moved_bytes),
            "-" if row.replanned_s is None else format_seconds(row.replanned_s),
            one_line(f"{over}; {row.note}" if row.note else over),
            *((one_line(row.binds),) if binding else ()),
            style="bold" if row.is_here else "red" if row.over_bytes else "",
        )
    return table


def outcome_text(row: Changed) -> str:
    """The time of a change, or in a word why it has none."""
    if row.time_s is not None:
        return format_seconds(row.time_s)
    return "not asked" if row.note.startswith("cannot be asked") else "does not fit"


def outcomes(rows: tuple[Changed, ...], before_s: float | None) -> Table:
    """Changes side by side."""
    per_sample = any(row.per_sample_s is not None for row in rows)
    numbers = ("time", "against now", *(("a sample",) if per_sample else ()))
    table = columns("change", *numbers, "why", right=numbers, whole=numbers)
    for row in rows:
        sample = ["-" if row.per_sample_s is None else format_seconds(row.per_sample_s)] if per_sample else []
        table.add_row(
            one_line(row.name, _LONG),
            outcome_text(row),
            change_text(row.time_s, before_s),
            *sample,
            one_line(row.note, _LONG),
            style="" if row.time_s is not None else "red",
        )
    return table


def outcomes_of(found: Outcomes) -> Table:
    """The table of `whatif`."""
    return outcomes(found.rows, found.before_s)


def difference_summary(found: Difference) -> Table:
    """Both plans in a few lines."""
    before, after = found.names
    time = f"{_time(found, 0)} -> {_time(found, 1)}"
    if found.time_s[0]:
        time += f" ({change_text(found.time_s[1], found.time_s[0])})"
    how = ", ".join(f"{num} {word}" for word, num in found.how_matched)
    rows: dict[str, object] = {
        "plans": f"{before} -> {after}",
        "time": time,
        "sent": f"{format_bytes(found.sent_bytes[0])} -> {format_bytes(found.sent_bytes[1])}",
        "ops": f"{found.num_ops[0]} -> {found.num_ops[1]}; {found.num_matched} in both"
        + (f" ({how})" if how else ""),
        "moved": f"{found.num_moved} ops in {len(found.modules)} modules",
    }
    return fields(rows)


def _time(found: Difference, side: int) -> str:
    return format_seconds(found.time_s[side]) + ("" if found.fits[side] else " (does not fit)")


def difference_devices(found: Difference) -> Table:
    """Every device before and after."""
    numbers = ("ops", "busy", "peak")
    table = columns("device", *numbers, right=numbers, whole=("device",))
    for row in found.devices:
        table.add_row(
            one_line(row.name),
            " -> ".join("-" if n is None else str(n) for n in row.num_ops),
            " -> ".join("-" if s is None else format_seconds(s) for s in row.busy_s),
            " -> ".join("-" if b is None else format_bytes(b) for b in row.peak_bytes),
        )
    return table


def difference_modules(found: Difference) -> Table:
    """Modules that moved, those with most time first."""
    numbers = ("ops", "time", "resident")
    table = columns("module", "from", "to", *numbers, right=numbers, whole=numbers)
    for row in found.modules[:_MOST_MODULES]:
        table.add_row(
            one_line(row.module),
            one_line(" + ".join(row.before)),
            one_line(" + ".join(row.after)),
            str(row.num_ops),
            format_seconds(row.seconds),
            format_bytes(row.resident_bytes) if row.resident_bytes else "-",
        )
    if len(found.modules) > _MOST_MODULES:
        table.add_row(f"and {len(found.modules) - _MOST_MODULES} more")
    return table


def change_text(after: float | None, before: float | None) -> str:
    """A change in percent, 'same', or a dash where there is nothing to compare."""
    if after is None or not before:
        return "-"
    share = after / before - 1
    return "same" if abs(share) < 5e-4 else f"{'+' if share > 0 else ''}{format_percent(share)}"

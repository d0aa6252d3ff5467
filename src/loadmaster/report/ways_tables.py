"""Tables of `loadmaster ways`: the possible ways with their commands, and the impossible ones."""

from rich.table import Table

from loadmaster.core.answers.ways_answer import Way, Ways
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.tables import fields
from loadmaster.report.text_columns import columns, one_line


def summary(answer: Ways) -> Table:
    """What was asked, and the answer in a word."""
    rows: dict[str, object] = {"model": answer.source}
    if answer.batch is not None:
        rows["batch"] = answer.batch
    rows["best"] = answer.best or "none fits and keeps the numbers"
    return fields(rows)


def taken(answer: Ways) -> Table:
    """Ways that can be taken, the fastest first."""
    right = ("step", "samples/s", "gap", "fullest device")
    table = columns("way", *right, "numbers", "", right=right, whole=("way", "step", "gap", "numbers"))
    for way in answer.ways:
        if way.step_s is None:
            continue
        table.add_row(
            one_line(way.name),
            format_seconds(way.step_s),
            "-" if way.samples_per_s is None else f"{way.samples_per_s:.4g}",
            "-" if way.gap is None else format_percent(way.gap),
            _fullest(answer, way),
            one_line(way.exactness + ("*" if way.deviations else "")),
            one_line(way.note, 60),
        )
    return table


def _fullest(answer: Ways, way: Way) -> str:
    """The peak of the device that is nearest to its limit."""
    shares = [peak / room for peak, room in zip(way.peak_bytes, answer.memory_bytes, strict=True)]
    at = shares.index(max(shares))
    return f"{answer.devices[at]} {format_bytes(way.peak_bytes[at])}"


def refused(answer: Ways) -> list[str]:
    """Ways that cannot be taken, with the reason."""
    return [f"{way.name}: {way.reason}" for way in answer.ways if way.step_s is None]


def commands(answer: Ways) -> list[str]:
    """What runs each way."""
    return [f"{way.name}: {way.command}" for way in answer.ways if way.command]


def deviations(answer: Ways) -> list[str]:
    """How numbers differ, once for each way."""
    return [f"* {way.name}: {text}" for way in answer.ways for text in way.deviations]

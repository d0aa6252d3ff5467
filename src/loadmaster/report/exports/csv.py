"""CSV: a row for each op. A cell that a spreadsheet would take for a formula is quoted with an apostrophe."""

import csv
import io

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported
from loadmaster.report.exports.rows import COLUMNS, lost_of, op_rows
from loadmaster.report.plain_text import escape_control_characters

_FORMULAS = ("=", "+", "-", "@")


def export(placement: Placement, timeline: Timeline) -> Exported:
    """UTF-8 with a heading."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in op_rows(placement, timeline):
        writer.writerow([_cell(row[name]) for name in COLUMNS])
    lost = (*lost_of(placement), "what flows between ops is not part of the table")
    return Exported(text.getvalue().encode("utf-8", "backslashreplace"), lost)


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = escape_control_characters(value)
    return f"'{shown}" if shown.startswith(_FORMULAS) else shown

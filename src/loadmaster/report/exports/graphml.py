"""GraphML: ops as nodes and what flows between them as edges, with devices, times and bytes."""

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported
from loadmaster.report.exports.rows import COLUMNS, edge_rows, lost_of, op_rows
from loadmaster.report.plain_text import escape_for_xml

_TYPES = {str: "string", int: "long", float: "double", bool: "boolean"}


def export(placement: Placement, timeline: Timeline) -> Exported:
    """The document; node ids are positions, names are data."""
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
    ]
    for name, kind in COLUMNS.items():
        lines.append(f'<key id="{name}" for="node" attr.name="{name}" attr.type="{_TYPES[kind]}"/>')
    lines.append('<key id="bytes" for="edge" attr.name="bytes" attr.type="long"/>')
    lines.append('<graph edgedefault="directed">')
    for at, row in enumerate(op_rows(placement, timeline)):
        values = "".join(f'<data key="{name}">{_text(value)}</data>' for name, value in row.items())
        lines.append(f'<node id="{at}">{values}</node>')
    for source, target, size in edge_rows(placement.problem.graph):
        lines.append(f'<edge source="{source}" target="{target}"><data key="bytes">{size}</data></edge>')
    lines.append("</graph></graphml>\n")
    return Exported("\n".join(lines).encode(), lost_of(placement))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return escape_for_xml(value) if isinstance(value, str) else repr(value)

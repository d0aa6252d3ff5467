"""Imports: a file of another program read beside a plan: a device_map, or a Chrome trace."""

import os
from typing import Any

import msgspec

from loadmaster.core import files
from loadmaster.core.errors import FormatError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.timeline import Timeline
from loadmaster.review.profiler_trace import read_trace


def read_import(
    path: str | os.PathLike[str], placement: Placement, *, max_bytes: int
) -> dict[str, Any] | tuple[Timeline, tuple[str, ...]]:
    """The device_map in a file, or the timeline of a trace with notes."""
    data = files.read_bytes(path, max_bytes=max_bytes)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{path} is not JSON: {problem}") from None
    if isinstance(document, list) or (isinstance(document, dict) and "traceEvents" in document):
        timeline, notes = read_trace(data, placement, where=str(path))
        return timeline, tuple(notes)
    if not isinstance(document, dict) or not document:
        raise FormatError(f"{path} is neither a device_map nor a Chrome trace")
    if "loadmaster" in document:
        raise FormatError(f"{path} is a file of Loadmaster already; give it to report, show or simulate")
    found = document.get("device_map", document)
    if not isinstance(found, dict) or not all(isinstance(at, int | str) for at in found.values()):
        raise FormatError(f"{path} is not a device_map: its values are not devices")
    return found


def read_device_map(found: dict[str, Any], placement: Placement) -> tuple[Plan, tuple[str, ...]]:
    """The plan that a device_map means, and what it leaves open."""
    plan = Plan.from_device_map(found, placement.problem)
    return plan, ("the ops run in the order of the graph: a device_map says nothing of it",)

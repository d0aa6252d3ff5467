"""Exchange: measured costs as a JSON document, to carry them from one machine to another."""

import math
import os
from dataclasses import replace

import msgspec

from loadmaster.core.errors import CostError, FormatError, SchemaError
from loadmaster.core.files import MAX_BYTES, read_bytes, write_bytes
from loadmaster.cost.busy_machine import BUSY, CALM, UNKNOWN
from loadmaster.cost.database import SCHEMA_VERSION, CostDatabase, CostRow

_LONGEST = 4096
_WATCHED_SINCE = 2  # version from which rows tell their moment


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    loadmaster: str
    schema: int
    rows: list[CostRow]


def export_costs(database: CostDatabase, path: str | os.PathLike[str], *, device: str | None = None) -> int:
    """Write the rows of a database, or of one of its devices; gives how many."""
    rows = database.rows(device=device)
    document = _Document("measured costs", SCHEMA_VERSION, rows)
    write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n", path)
    return len(rows)


def import_costs(
    database: CostDatabase, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES
) -> tuple[int, int]:
    """Add the rows of a document as `CostDatabase.put` does; gives rows read and rows changed."""
    data = read_bytes(path, max_bytes=max_bytes)
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{path} holds no measured costs: {problem}") from None
    if document.loadmaster != "measured costs":
        raise SchemaError(f"{path} holds {document.loadmaster!r}; measured costs are needed")
    if document.schema > SCHEMA_VERSION or document.schema < 1:
        raise SchemaError(
            f"{path} has version {document.schema}, this Loadmaster knows up to {SCHEMA_VERSION}; renew it"
        )
    for number, row in enumerate(document.rows):
        _check_row(row, f"{path}: row {number}")
    rows = document.rows
    if document.schema < _WATCHED_SINCE:  # nobody knows how busy that machine was
        rows = [replace(row, moment=UNKNOWN) for row in rows]
    return len(rows), database.put(rows)


def _check_row(row: CostRow, where: str) -> None:
    numbers = {"seconds": row.seconds or 0.0, "spread": row.spread, "issue_s": row.issue_s}
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise CostError(f"{where}: {name} is {value}; it is a finite number >= 0")
    if not 0 <= row.count < 2**62:
        raise CostError(f"{where}: count is {row.count}; it is a whole number >= 0")
    for name in ("signature", "device", "torch", "date", "reason"):
        text = getattr(row, name)
        if len(text) > _LONGEST or "\0" in text:
            raise CostError(f"{where}: {name} has {len(text)} characters or a NUL; at most {_LONGEST}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CostError(f"{where}: {name} is not valid text") from None
    if row.moment not in (CALM, BUSY, UNKNOWN):
        raise CostError(f"{where}: moment is {row.moment!r}; it is {CALM!r}, {BUSY!r} or empty")
    if not row.signature or not row.device:
        raise CostError(f"{where}: signature and device are needed")

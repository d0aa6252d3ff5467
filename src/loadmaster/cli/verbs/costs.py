"""loadmaster costs: list measured costs, and carry them from one machine to another."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.cost.database import CostDatabase

SUMMARY = "List, export and import measured costs."
app = typer.Typer(help=SUMMARY, rich_markup_mode=None, pretty_exceptions_enable=False)
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="Only rows of this device, e.g. 'NVIDIA H200'.")
]


@app.command(name="ls", short_help="List measured costs.")
def ls(
    device: Device = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Rows to list; 0 lists none.")] = 20,
    database: o.Database = None,
    json: o.Json = False,
) -> None:
    """List measured costs: the devices, and the rows of each."""
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.core.errors import InputError, UnknownNameError
    from loadmaster.core.units import format_percent, format_seconds
    from loadmaster.report.tables import fields
    from loadmaster.report.text_columns import columns, one_line

    if limit < 0:
        raise InputError(f"--limit is {limit}; give 0 or more")
    with _open_database(database) as known:
        counts = {name: known.count(device=name) for name in known.devices()}
        if device is not None and device not in counts:
            raise UnknownNameError("device", device, counts)
        rows, path = known.rows(device=device, limit=limit), str(known.path)
    if json:
        print_json({"database": path, "devices": counts, "rows": [_row_document(row) for row in rows]})
        return
    console = stdout()
    about: dict[str, object] = {"database": path}
    console.print(fields(about | {name: f"{count} rows" for name, count in counts.items()}))
    if not rows:
        return
    titles = ("time", "spread", "launch", "torch", "op")
    table = columns(*titles, right=titles[:3], whole=titles[:4])
    for row in rows:
        time = "-" if row.seconds is None else format_seconds(row.seconds)
        launch = format_seconds(row.issue_s) if row.issue_s else "-"
        op = f"{row.signature}{f' ({row.device})' if len(counts) > 1 else ''}"
        table.add_row(time, format_percent(row.spread), launch, one_line(row.torch, 12), one_line(op, 160))
    console.print()
    console.print(table)


@app.command(name="export", short_help="Write measured costs to a JSON file.")
def export(
    out: Annotated[str, typer.Argument(metavar="FILE", help="File to write (.json, .json.gz).")],
    device: Device = None,
    database: o.Database = None,
    json: o.Json = False,
) -> None:
    """Write measured costs to a JSON file."""
    from loadmaster.cli.question import check_outputs
    from loadmaster.core.errors import UnknownNameError
    from loadmaster.cost.exchange import export_costs

    check_outputs({"FILE": out}, inputs=[database])
    with _open_database(database) as known:
        if device is not None and device not in known.devices():
            raise UnknownNameError("device", device, known.devices())
        num = export_costs(known, out, device=device)
    _print_result(json, {"written": out, "num_rows": num}, f"{num} rows written to {out}")


@app.command(name="import", short_help="Add the measured costs of a JSON file.")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file that `costs export` wrote.")],
    database: o.Database = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Add the measured costs of a JSON file. If a key is there already, the later measurement stays."""
    from loadmaster.cli.question import parse_size
    from loadmaster.cost.exchange import import_costs

    limit = parse_size("--max-bytes", max_bytes)
    with _open_database(database) as known:
        num, changed = import_costs(known, file, max_bytes=limit)
        path = str(known.path)
    document = {"database": path, "num_rows": num, "num_changed": changed}
    _print_result(json, document, f"{num} rows read, {changed} new or renewed in {path}")


def _open_database(path: str | None) -> "CostDatabase":
    """The database, or an error; what was moved aside is told."""
    from loadmaster.cli.console import stderr
    from loadmaster.cost.database import open_database
    from loadmaster.report.plain_text import escape_control_characters

    return open_database(
        path, needed=True, tell=lambda text: stderr().print(escape_control_characters(text), soft_wrap=True)
    )


def _row_document(row: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(row)


def _print_result(json: bool, document: dict[str, Any], text: str) -> None:
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.report.plain_text import escape_control_characters

    if json:
        print_json(document)
    else:
        stdout().print(escape_control_characters(text), soft_wrap=True)

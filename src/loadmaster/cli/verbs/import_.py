"""loadmaster import: a device_map as a plan, or a profiler's trace as a measured timeline."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Compare a device_map or a profiler's trace with a plan."


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A device_map in JSON, or a Chrome trace (torch.profiler, or ours)."
        ),
    ],
    plan: Annotated[
        str,
        typer.Option(
            "--plan", "-p", metavar="PLAN", help="The plan that the device_map or trace belongs to."
        ),
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="The plan or timeline (.json).")],
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Score a device_map on the problem of a plan, or match a trace to its ops, and save the result.

    To draw a saved timeline below the prediction: loadmaster report PLAN --measured FILE. Exit code 1: the
    device_map does not fit.
    """
    from loadmaster import api
    from loadmaster.cli.console import print_json, progress, stderr, stdout
    from loadmaster.cli.question import check_outputs, parse_size
    from loadmaster.cli.verbs.report import read_placement
    from loadmaster.core.placement import Placement
    from loadmaster.core.reasons import why_none_fits
    from loadmaster.core.units import format_seconds
    from loadmaster.report import documents, tables
    from loadmaster.report.plain_text import escape_control_characters

    limit = parse_size("--max-bytes", max_bytes)
    check_outputs({"--out": out}, inputs=[source, plan])
    asked = read_placement(plan, limit)
    with progress(f"reading {source}"):
        found, notes = api.import_file(source, asked, max_bytes=limit)
    api.save(found, out)
    for note in notes:
        stderr().print(escape_control_characters(f"note: {note}"), style="dim", soft_wrap=True)
    if json:
        answer = (
            documents.placement_document(found)
            if isinstance(found, Placement)
            else documents.timeline_document(found)
        )
        print_json({"source": source, **answer, "notes": list(notes), "written": out})
    elif isinstance(found, Placement):
        stdout().print(tables.summary(found))
        stdout().print(tables.devices(found, None))
        for line in [] if found.fits else why_none_fits(found):
            stdout().print(escape_control_characters(line), style="red", soft_wrap=True)
    else:
        said = (
            f"measured timeline of {len(found.kind)} spans, {format_seconds(found.step_s)}, written to {out}"
        )
        stdout().print(escape_control_characters(said), soft_wrap=True)
    if isinstance(found, Placement) and not found.fits:
        raise typer.Exit(1)

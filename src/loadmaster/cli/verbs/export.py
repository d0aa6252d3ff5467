"""loadmaster export: a plan in the format of another program."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Write a plan in the format of another program."


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A file saved by: loadmaster plan ... --out.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "-t",
            metavar="FORMAT",
            help="device_map, torchtitan, openvino, chrome, graphml, nodelink or csv.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="File to write. Default: standard output."),
    ] = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Write a plan in the format of another program. What the format cannot express is listed on stderr."""
    import sys

    from loadmaster import api
    from loadmaster.cli.console import print_json, stderr
    from loadmaster.cli.question import check_outputs, parse_size
    from loadmaster.cli.verbs.report import read_placement
    from loadmaster.core.errors import InputError
    from loadmaster.core.files import write_bytes
    from loadmaster.report.plain_text import escape_control_characters

    if json and out is None:
        raise InputError("--json describes what was written; name the file with --out")
    check_outputs({"--out": out}, inputs=[plan])
    content, lost = api.export(read_placement(plan, parse_size("--max-bytes", max_bytes)), to)
    if out is None:
        sys.stdout.write(content.decode("utf-8", "replace"))
    else:
        write_bytes(content, out)
    if json:
        print_json({"plan": plan, "format": to, "written": out, "lost": list(lost)})
        return
    for line in lost:
        stderr().print(escape_control_characters(f"not in {to}: {line}"), style="dim", soft_wrap=True)
    if out is not None:
        stderr().print(escape_control_characters(f"{to} written to {out}"), soft_wrap=True)

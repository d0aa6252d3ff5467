"""loadmaster diff: compare two plans of one model."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Compare two plans: what moved, and what it cost."


def command(
    before: Annotated[str, typer.Argument(metavar="A", help="A saved plan.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Show which modules moved, and time, memory and bytes sent before and after.

    The two plans may be for different versions of the code, or for different devices.
    """
    import msgspec

    from loadmaster import api
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import parse_size
    from loadmaster.cli.verbs.report import read_placement
    from loadmaster.report.answer_text import print_answer

    limit = parse_size("--max-bytes", max_bytes)
    one, other = read_placement(before, limit), read_placement(after, limit)
    with progress(f"comparing {before} and {after}"):
        found = api.diff(one, other, names=(before, after))
    if json:
        print_json(msgspec.to_builtins(found))
        return
    print_answer(found, stdout())

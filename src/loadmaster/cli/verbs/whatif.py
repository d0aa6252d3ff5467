"""loadmaster whatif: a plan's question changed and planned again."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Plan again with other memory, links, devices or batch."


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A file saved by: loadmaster plan ... --out.")],
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="gpu1.memory=24GB, gpu1.speed=2x, gpu0-gpu1.rate=32GB (or 2x), ....latency=5us. May be"
            " repeated.",
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="CLUSTER", help="Add devices, e.g. 1xA100-80GB. May be repeated."),
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="DEVICE", help="Remove a device. May be repeated.")
    ] = None,
    batch: o.Batch = None,
    seq: o.Seq = None,
    optimizer: o.Optimizer = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", metavar="NAME", help="Precision of a captured model, as in: loadmaster plan."
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="NAME=A..B",
            help="batch=1..64 (doubling), gpu1.memory=8GB..24GB:5, or batch=1,2,3.",
        ),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Show only all changes together, not each one alone.")
    ] = False,
    budget: Annotated[
        str, typer.Option("--budget", "-b", metavar="BUDGET", help="Plans to try for each row: 100x, or 2s.")
    ] = "100x",
    order: o.Order = "free",
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Save the plan with all changes (not of a sweep)."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE", help="Also write the HTML page, with table and curve."),
    ] = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Plan again with something changed, and compare with the plan as it is.

    With several changes there is one row for each, and one for all together. Exit code 1: no plan fits with
    all changes.
    """
    import msgspec

    from loadmaster import api
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import check_outputs, parse_size
    from loadmaster.cli.verbs.report import read_placement
    from loadmaster.core.errors import InputError
    from loadmaster.report.answer_text import print_answer
    from loadmaster.report.plain_text import escape_control_characters

    if sweep is not None and out is not None:
        raise InputError("--out saves one plan, and --sweep makes several; leave one of them out")
    check_outputs({"--out": out, "--report": report}, inputs=[plan])
    placement = read_placement(plan, parse_size("--max-bytes", max_bytes))
    with progress(f"planning {plan} again") as say:
        found, last = api.whatif(
            placement,
            set=set or (),
            add=add or (),
            remove=remove or (),
            batch=batch,
            seq=seq,
            optimizer=optimizer,
            precision=precision,
            sweep=sweep,
            together=together,
            budget=budget,
            order=order,
            progress=say,
        )
    written = {}
    if report is not None:
        api.write_report(placement, report, outcomes=[found])
        written["report"] = report
    if out is not None and last is not None:
        api.save(last, out)
        written["plan"] = out
    if json:
        print_json({"plan": plan, **msgspec.to_builtins(found), "written": written})
    else:
        console = stdout()
        print_answer(found, console)
        for what, path in written.items():
            console.print(escape_control_characters(f"{what} written to {path}"), soft_wrap=True)
    if sweep is None and (last is None or not last.fits):
        raise typer.Exit(1)

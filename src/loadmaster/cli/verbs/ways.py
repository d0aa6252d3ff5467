"""loadmaster ways: every way to run a step on some devices, in one table."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Compare every way to run a step, with the command that runs each."


def command(
    source: o.Source,
    devices: o.Devices = None,
    batch: o.Batch = None,
    seq: o.Seq = None,
    optimizer: o.Optimizer = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="NAME",
            help="Captured models: fp32, bf16-mixed, fp16-mixed or bf16. Other graphs: fp32 or mixed.",
        ),
    ] = "fp32",
    assume: o.Assume = None,
    reserve: o.Reserve = "0",
    budget: o.BudgetText = "5",
    seed: o.Seed = 0,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="DIR", help="Save the plan of each way in this folder."),
    ] = None,
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Predict the step of every way to run it: time, peaks, gap to a bound, exactness, and the command.

    The budget is for each way. A way that is not possible is listed with the reason.
    Exit code 1 means that none is possible.
    """
    options = locals()  # by name, for build_question; before any other name is bound
    from loadmaster.capacity.ways import weigh_ways
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import build_question
    from loadmaster.core.run import parse_budget
    from loadmaster.report.answer_text import print_answer

    question, limit = build_question(options), parse_budget(budget)
    with progress(f"weighing {source}") as say:
        found = weigh_ways(question, budget=limit, seed=seed, folder=out, progress=say)
    if json:
        import msgspec

        print_json(msgspec.to_builtins(found.table))
    else:
        print_answer(found.table, stdout())
    if all(way.step_s is None for way in found.table.ways):
        raise typer.Exit(1)

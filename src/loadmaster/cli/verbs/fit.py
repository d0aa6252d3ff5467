"""loadmaster fit: whether a model fits, what it holds, the largest batch, and what would make it fit."""

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    pass

SUMMARY = "Check whether a model fits, and what would make it fit."
Quick = Annotated[
    bool, typer.Option("--quick", help="Only check whether it fits: no largest batch, no changes.")
]
Every = Annotated[
    bool, typer.Option("--all-changes", help="Check all changes, not only up to the first that fits.")
]


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
    budget: o.BudgetText = "60x",
    quick: Quick = False,
    all_changes: Every = False,
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Check whether a training step fits, on each device and on all together, and show what its memory is.

    Then find the largest batch that fits, and the cheapest change that makes the step fit. Without
    --devices, every preset is checked. The exit code is 0 also if it does not fit; see `fits` of --json.
    """
    options = locals()  # by name, for build_question; before any other name is bound
    from loadmaster.capacity.fit import answer_fit
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import build_question
    from loadmaster.core.run import parse_budget
    from loadmaster.report.answer_text import print_answer

    question, count = build_question(options), parse_budget(budget)
    with progress(f"fitting {source}") as say:
        answer = answer_fit(question, budget=count, quick=quick, every=all_changes, progress=say)
    if json:
        import msgspec

        print_json(msgspec.to_builtins(answer))
        return
    print_answer(answer, stdout())

"""loadmaster fit: whether a model fits, what it holds, the largest batch, and what would make it fit."""

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    pass

SUMMARY = "Say whether a model fits, and what would make it fit."
Quick = Annotated[bool, typer.Option("--quick", help="Only whether it fits: no largest batch, no changes.")]
Every = Annotated[
    bool, typer.Option("--all-changes", help="Check changes beyond the first that makes it fit.")
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
            help="Of a captured model: fp32, bf16-mixed, fp16-mixed or bf16; of other graphs: fp32 or mixed.",
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
    """Say whether a step fits on each device and on all of them, and what it holds where it holds most.

    Then the largest batch that fits, and the cheapest change that would make it fit. Without devices: every
    preset. "It does not fit" is an answer: exit code 0; `fits` of --json tells.
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

"""loadmaster explain: what limits a plan, and why an op or module is where it is."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Explain what limits a plan, or why an op or module is where it is."
Changes = Annotated[
    str, typer.Option("--budget", "-b", metavar="BUDGET", help="Plans to try for each question: 100x, or 2s.")
]


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A file saved by: loadmaster plan ... --out.")],
    target: Annotated[
        str, typer.Argument(metavar="[OP|MODULE]", help="An op or a module. Default: the whole plan.")
    ] = "",
    budget: Changes = "100x",
    quick: Annotated[
        bool, typer.Option("--quick", help="Only simulate the op on other devices; do not plan again.")
    ] = False,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Explain a plan, or why an op or module is where it is, by trying the alternatives.

    Without a target: what limits the step, and which single change helps most (memory, speed, a link, one
    more device, half the batch). With a target: what other devices would cost in time, bytes sent and memory.
    """
    import msgspec

    from loadmaster import api
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import parse_size
    from loadmaster.cli.verbs.report import read_placement
    from loadmaster.report.answer_text import print_answer

    placement = read_placement(plan, parse_size("--max-bytes", max_bytes))
    with progress(f"explaining {plan}") as say:
        found = api.explain(placement, target, budget=budget, replan=not quick, progress=say)
    if json:
        print_json({"plan": plan, **msgspec.to_builtins(found)})
        return
    print_answer(found, stdout())

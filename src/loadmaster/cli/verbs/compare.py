"""loadmaster compare: every algorithm on one problem."""

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.placement import Placement
    from loadmaster.core.problem import Problem

SUMMARY = "Compare several algorithms on one problem."


def command(
    source: o.Source,
    devices: o.Devices = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            "--algorithms",
            "-a",
            metavar="NAMES",
            help="Comma-separated names. Default: all that support the objective.",
        ),
    ] = None,
    budget: o.BudgetText = "10s",
    seed: o.Seed = 0,
    objective: o.ObjectiveName = None,
    links: o.LinksName = None,
    split: o.SplitName = None,
    load: o.LoadName = None,
    batch: o.Batch = None,
    seq: o.Seq = None,
    optimizer: o.Optimizer = None,
    precision: o.Precision = "fp32",
    target: o.Target = None,
    capture: o.Capture = None,
    assume: o.Assume = None,
    accumulation: o.Accumulation = None,
    range: o.Ranges = None,
    pin: o.Pin = None,
    reserve: o.Reserve = "0",
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    measure: o.Measure = None,
    database: o.Database = None,
    json: o.Json = False,
) -> None:
    """Run several algorithms on one problem and compare their plans."""
    options = locals()  # by name, for build_question; before any other name is bound
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.cli.question import build_question, read_problem
    from loadmaster.core.placement import Placement
    from loadmaster.core.run import parse_budget
    from loadmaster.report import documents, tables
    from loadmaster.report.plain_text import escape_control_characters

    names = parse_algorithms(algorithms)
    parse_budget(budget)
    problem = read_problem(build_question(options))
    rows = run_all(problem, names, budget=budget, seed=seed)
    if json:
        results = [
            {"name": name, **documents.placement_document(result)}
            if isinstance(result, Placement)
            else {"name": name, "status": None, "reason": result}
            for name, result in rows
        ]
        print_json({"source": source, "results": results})
    else:
        console = stdout()
        console.print(tables.comparison(rows))
        console.print()
        for line in tables.findings(problem.graph):
            console.print(escape_control_characters(line), style="yellow", soft_wrap=True)
        for line in tables.notes(rows):
            console.print(line, style="dim", soft_wrap=True)
    if not any(isinstance(result, Placement) and result.fits for _, result in rows):
        raise typer.Exit(1)


def parse_algorithms(text: str | None) -> list[str] | None:
    """The algorithms asked for, None if none are named; unknown ones are refused before any work."""
    from loadmaster.core.errors import InputError
    from loadmaster.placers.registry import placer

    if text is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(
            f"--algorithms {text!r} names none; write for example auto,round_robin, or leave it out"
        )
    for name in names:
        placer(name)
    return names


def run_all(
    problem: "Problem", names: list[str] | None, *, budget: str, seed: int
) -> "list[tuple[str, Placement | str]]":
    """Every algorithm's placement, or why it does not apply; best first.

    None: all of them, but for those that are made for another objective, or for steps of micro-batches.
    """
    from loadmaster import api
    from loadmaster.cli.console import progress
    from loadmaster.core.errors import InputError
    from loadmaster.core.placement import Placement
    from loadmaster.placers.registry import (
        list_algorithms,
        objectives_of,
        placer,
        serves_steps_alone,
        why_not,
    )

    rows: list[tuple[str, Placement | str]] = []
    with progress("comparing") as say:
        for name in list_algorithms() if names is None else names:
            say(name, 0.0)
            try:  # a third party's broken package spoils its own row only
                algorithm = placer(name)
            except InputError as trouble:
                rows.append((name, str(trouble)))
                continue
            elsewhere = problem.objective not in objectives_of(algorithm) or serves_steps_alone(algorithm)
            if names is None and elsewhere:
                continue
            reason = why_not(algorithm, problem)
            rows.append(
                (name, reason)
                if reason
                else (name, api.plan(problem, algorithm=algorithm, budget=budget, seed=seed, progress=say))
            )

    def rank(row: tuple[str, Placement | str]) -> tuple[int, float, str]:
        name, result = row
        if isinstance(result, str):
            return 2, 0.0, name
        return (0, result.score_s, name) if result.score_s is not None else (1, 0.0, name)

    return sorted(rows, key=rank)

"""loadmaster demo: a transformer's training step on four unequal devices, every algorithm."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli import options as o
from loadmaster.report.plain_text import escape_control_characters

if TYPE_CHECKING:
    from loadmaster.core.placement import Placement
    from loadmaster.core.timeline import Timeline

SOURCE = "gen:transformer:1500"
DEVICES = "V100-16GB, T4, RTX2080, cpu-64GB"
SUMMARY = "Plan a transformer on four unequal devices."


def command(
    out_dir: Annotated[
        str, typer.Option("--out-dir", metavar="FOLDER", help="Where plan, trace and page are written.")
    ] = "out",
    budget: o.BudgetText = "10s",
    pin: o.Pin = None,
    reserve: o.Reserve = "0",
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Also train on a plan over parts of this machine.")
    ] = True,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps to train.")] = 10,
    json: o.Json = False,
) -> None:
    """Plan the training step of GPT-2-small, which fits on none of three GPUs, and compare algorithms.

    Then train it here, on two parts of this machine, neither of which has room for it.
    """
    from loadmaster import api
    from loadmaster.cli.console import print_json, stderr, stdout
    from loadmaster.cli.demo import shards, training
    from loadmaster.cli.question import parse_pins, parse_size
    from loadmaster.cli.verbs.compare import run_all
    from loadmaster.core.placement import Placement
    from loadmaster.core.run import parse_budget
    from loadmaster.report import documents

    parse_budget(budget)
    plan_path, trace_path, page_path = _prepare_paths(out_dir)
    say = stderr() if json else stdout()
    say.print(f"GPT-2-small, batch 8 x 1024, AdamW, one training step ({SOURCE}) on {DEVICES}")
    say.print()
    problem = api.problem(
        SOURCE, DEVICES, pin=parse_pins(pin), reserve_bytes=parse_size("--reserve", reserve)
    )
    rows = run_all(problem, None, budget=budget, seed=0)
    best = next(result for _, result in rows if isinstance(result, Placement))
    plan = best.plan or best.least_overflow_plan
    assert plan is not None
    timeline = api.simulate(problem, plan)
    api.save(best, plan_path)
    documents.save_trace(best, timeline, trace_path)
    others = {name: result for name, result in rows if isinstance(result, Placement) and result is not best}
    api.write_report(best, page_path, compare=others)
    if json:
        results = {
            name: documents.placement_document(result)
            if isinstance(result, Placement)
            else {"reason": result}
            for name, result in rows
        }
        trained = training.training_document(out_dir, steps) if train else None
        print_json(
            {
                "results": results,
                "plan": plan_path,
                "trace": trace_path,
                "report": page_path,
                "trained": trained,
            }
        )
        return
    _show(rows, best, timeline)
    console = stdout()
    if train:
        training.show(out_dir, steps)
        shards.show()
    console.print()
    for what, path, then in (
        ("plan", plan_path, f"{program_name()} simulate {plan_path}"),
        ("trace", trace_path, "open it at ui.perfetto.dev"),
        ("page", str(Path(page_path).resolve()), "open it in a browser"),
    ):
        console.print(escape_control_characters(f"{what} written to {path}  ({then})"), soft_wrap=True)


def program_name() -> str:
    """This program as one can type it, also where it is not on the PATH."""
    return "loadmaster" if shutil.which("loadmaster") else sys.argv[0]


def _prepare_paths(out_dir: str) -> tuple[str, str, str]:
    """Where plan, trace and page go; the folder is made, and what cannot be written is refused before any
    work."""
    from loadmaster.core.errors import FileError
    from loadmaster.core.files import require_writable

    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as trouble:
        raise FileError(f"cannot make folder {out_dir}: {trouble.strerror}") from None
    plan, trace, page = (folder / f"demo-{name}" for name in ("plan.json", "trace.json", "report.html"))
    paths = str(plan), str(trace), str(page)
    for path in paths:
        require_writable(path)
    return paths


def _show(rows: "list[tuple[str, Placement | str]]", best: "Placement", timeline: "Timeline") -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.report import tables

    console = stdout()
    console.print(tables.comparison(rows))
    console.print()
    for line in tables.notes(rows):
        console.print(line, style="dim", soft_wrap=True)
    console.print()
    console.print(tables.summary(best))
    console.print()
    console.print(tables.devices(best, timeline))

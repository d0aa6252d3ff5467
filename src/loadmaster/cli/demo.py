"""loadmaster demo: a transformer's training step on four unequal devices, every algorithm."""

from pathlib import Path
from typing import Annotated

import typer

from loadmaster.cli import options as o

SOURCE = "gen:transformer:1500"
DEVICES = "V100-16GB, T4, RTX2080, cpu-64GB"


def command(
    out_dir: Annotated[str, typer.Option("--out-dir", help="Where plan and trace are written.")] = "out",
    budget: o.BudgetText = "10s",
    json: o.Json = False,
) -> None:
    """Plan GPT-2-small's training step, which fits none of three GPUs alone, and compare algorithms."""
    from loadmaster import api
    from loadmaster.cli import answers, tables
    from loadmaster.cli.compare import run_all
    from loadmaster.cli.console import print_json, stderr, stdout
    from loadmaster.core.errors import FileError
    from loadmaster.core.placement import Placement

    say = stderr() if json else stdout()
    say.print(f"GPT-2-small, batch 8 x 1024, AdamW, one training step ({SOURCE}) on {DEVICES}")
    problem = api.problem(SOURCE, DEVICES)
    rows = run_all(problem, None, budget=budget, seed=0)
    best = next(result for _, result in rows if isinstance(result, Placement))
    plan = best.plan or best.least_overflow_plan
    assert plan is not None
    timeline = api.simulate(problem, plan)
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as trouble:
        raise FileError(f"cannot make folder {out_dir}: {trouble.strerror}") from None
    plan_path, trace_path = str(folder / "demo-plan.json"), str(folder / "demo-trace.json")
    api.save(best, plan_path)
    answers.save_trace(best, timeline, trace_path)
    if json:
        results = {
            name: answers.placement_document(result) if isinstance(result, Placement) else {"reason": result}
            for name, result in rows
        }
        print_json({"results": results, "plan": plan_path, "trace": trace_path})
        return
    console = stdout()
    console.print(tables.comparison(rows))
    for line in tables.notes(rows):
        console.print(line, style="dim", soft_wrap=True)
    console.print()
    console.print(tables.summary(best))
    console.print()
    console.print(tables.devices(best, timeline))
    console.print()
    console.print(f"plan written to {plan_path}   (loadmaster simulate {plan_path})", soft_wrap=True)
    console.print(f"trace written to {trace_path}  (open it at ui.perfetto.dev)", soft_wrap=True)

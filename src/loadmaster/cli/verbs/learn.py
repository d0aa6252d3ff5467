"""loadmaster learn: train the networks of placement and of strategies, and evaluate weights."""

from typing import Annotated

import typer

from loadmaster.cli import options as o

SUMMARY = "Train and evaluate learned placement, and the guide of strategies."
app = typer.Typer(help=SUMMARY, rich_markup_mode=None, pretty_exceptions_enable=False)
Workers = Annotated[
    int, typer.Option("--workers", metavar="N", help="Processes that draw and solve problems.")
]
Ray = Annotated[bool, typer.Option("--ray", help="Draw and solve problems on Ray workers.")]


@app.command(name="train", short_help="Train weights of learned_order.")
def train(
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Where weights, curve and checkpoint go.")],
    problems: Annotated[int, typer.Option("--problems", metavar="N", help="Problems to learn from.")] = 300,
    held_out: Annotated[
        int, typer.Option("--held-out", metavar="N", help="Problems that choose the checkpoint.")
    ] = 60,
    imitation: Annotated[
        int, typer.Option("--imitation", metavar="N", help="Updates on the solvers' answers.")
    ] = 1500,
    reinforcement: Annotated[
        int, typer.Option("--reinforcement", metavar="N", help="Updates on simulated times.")
    ] = 4500,
    width: Annotated[int, typer.Option("--width", metavar="N", help="Width of the network.")] = 48,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="Rounds of messages.")] = 5,
    workers: Workers = 1,
    ray: Ray = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the checkpoint in the folder; ends with the same weights."
        ),
    ] = False,
    seed: o.Seed = 0,
    json: o.Json = False,
) -> None:
    """Generate problems, solve them, train a network on them. The same seed gives the same weights."""
    from dataclasses import asdict
    from pathlib import Path

    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.placers.learned.training.session import SessionSettings, train_weights
    from loadmaster.placers.learned.training.train import TrainSettings
    from loadmaster.report.tables import fields

    _require_torch()
    session = SessionSettings(Path(out), problems, held_out, workers, ray, resume)
    settings = TrainSettings(
        imitation=imitation, reinforcement=reinforcement, width=width, rounds=rounds, seed=seed
    )
    with progress("training") as say:
        found = train_weights(session, settings, say)
    if json:
        print_json({**asdict(found), "weights": str(found.weights), "curve": str(found.curve)})
        return
    stdout().print(
        fields(
            {
                "weights": str(found.weights),
                "curve": str(found.curve),
                "examples": f"{found.num_examples}, {found.num_proven} of them proven",
                "untrained": f"{found.untrained:+.4f} mean log ratio to the usual plans of held-out problems",
                "trained": f"{found.held_out:+.4f}",
            }
        )
    )


@app.command(name="evaluate", short_help="Ask weights about problems they never saw.")
def evaluate(
    weights: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Weights; default: the shipped ones.")
    ] = "",
    problems: Annotated[int, typer.Option("--problems", metavar="N", help="Held-out problems.")] = 60,
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="N,N", help="Evaluations: 0 is the first plan alone.")
    ] = "0,10,100",
    workers: Workers = 1,
    ray: Ray = False,
    json: o.Json = False,
) -> None:
    """Compare weights with the usual plans, an untrained network and the best known answers."""
    from pathlib import Path

    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.placers.learned.training.evaluate import evaluate_weights, parse_budgets
    from loadmaster.report.text_columns import columns

    _require_torch()
    asked = parse_budgets(budgets)
    with progress("evaluating") as say:
        found = evaluate_weights(Path(weights) if weights else None, problems, asked, workers, ray, say)
    if json:
        print_json(found)
        return
    table = columns("objective", "evaluations", "trained", "untrained", "best known", "better", right=())
    for row in found["rows"]:
        table.add_row(
            row["objective"],
            str(row["evaluations"]),
            f"{row['trained']:+.4f}",
            f"{row['untrained']:+.4f}",
            f"{row['best_known']:+.4f}",
            f"{row['better']} of {row['problems']}",
        )
    stdout().print(f"{found['weights']}: mean log ratio to the usual plans, below zero is better")
    stdout().print(table)


@app.command(name="guide", short_help="Train weights that guide the search for strategies.")
def guide(
    out: Annotated[str, typer.Argument(metavar="FILE", help="Where the weights go: a .safetensors file.")],
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", help="Searches to learn from.")] = 200,
    replays: Annotated[int, typer.Option("--replays", metavar="N", help="Replays of each search.")] = 400,
    together: Annotated[
        int,
        typer.Option("--together", metavar="N", help="Searches between updates; they can run side by side."),
    ] = 1,
    models: Annotated[
        str,
        typer.Option("--models", metavar="NAME,NAME", help="Steps to search for; NAME@BATCH sets the batch."),
    ] = "",
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Processes that search.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Search on Ray workers.")] = False,
    seed: o.Seed = 0,
    json: o.Json = False,
) -> None:
    """Train the guide of the strategy search on random clusters. The same seed gives the same weights."""
    from dataclasses import asdict
    from pathlib import Path

    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.report.tables import fields

    _require_torch()
    from loadmaster.strategies.guide_session import MODELS, train_guide
    from loadmaster.strategies.guide_training import Settings

    settings = Settings(episodes=episodes, replays=replays, together=together, seed=seed)
    named = tuple(name.strip() for name in models.split(",") if name.strip()) or MODELS
    with progress("training") as say:
        found = train_guide(Path(out), settings, models=named, workers=workers, ray=ray, progress=say)
    if json:
        print_json({**asdict(found), "weights": str(found.weights), "curve": str(found.curve)})
        return
    stdout().print(
        fields(
            {
                "weights": f"{found.weights}, {found.num_bytes} bytes",
                "curve": str(found.curve),
                "loss": f"{found.first_loss:.3f} to {found.last_loss:.3f}",
                "took": f"{found.seconds:.0f} s",
            }
        )
    )


def _require_torch() -> None:
    from loadmaster.core.errors import InputError
    from loadmaster.placers.registry import is_installed

    if not is_installed("torch"):
        raise InputError(
            "loadmaster learn needs torch, which is not installed: pip install 'loadmaster[torch]'"
        )

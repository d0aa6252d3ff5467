"""Weights asked about held-out problems: against the usual plans, an untrained network and the best known."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadmaster.core.errors import InputError
from loadmaster.core.problem import Objective
from loadmaster.core.run import Bound, Budget, Run, ignore_progress
from loadmaster.placers.answer import Tally
from loadmaster.placers.learned._nearby import search_nearby
from loadmaster.placers.learned._order_network import OrderNetwork, make_network
from loadmaster.placers.learned._proposals import first_plans, look_at
from loadmaster.placers.learned._weights import load_weights, shipped_weights
from loadmaster.placers.learned.training.examples import HELD_OUT, Example
from loadmaster.placers.learned.training.session import draw_examples
from loadmaster.placers.learned.training.train import time_of

_NOISE, _FIRST = 0.1, 1000  # the first seed after those that chose a checkpoint


def parse_budgets(text: str) -> list[int]:
    """Numbers of evaluations from '0,10,100'."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise InputError(f"--budgets {text!r} is not a list of numbers >= 0; write for example 0,10,100")
    return found


def time_after(network: OrderNetwork, example: Example, evaluations: int, seed: int = 0) -> float:
    """The time of the best plan after so many evaluations; 0: of the first plan, which needs none."""
    opinion = look_at(network, example.slicer, example.scene)
    if evaluations == 0:
        found = first_plans(example.slicer, opinion)
        return time_of(example, found[0].sliced) if found else np.inf
    simulator = example.simulator
    run = Run(
        budget=Budget(count=evaluations),
        rng=np.random.default_rng(seed),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=Bound(0.0, "none"),
    )
    tally = Tally(example.problem, run)
    search_nearby(example.problem, example.groups, tally, example.slicer, opinion, _NOISE)
    return example.groups.penalised_s(tally.best_score)


def evaluate_weights(
    weights: Path | None,
    problems: int,
    budgets: Sequence[int],
    workers: int = 1,
    ray: bool = False,
    progress: Callable[[str, float], None] = ignore_progress,
) -> dict[str, Any]:
    """Mean log ratios by objective and budget, on problems that chose no checkpoint either."""
    if problems < 1:
        raise InputError(f"problems is {problems}; give a number >= 1")
    path = shipped_weights() if weights is None else weights
    network, about = load_weights(path)
    untrained = make_network(network.size, seed=0).eval()
    first = HELD_OUT + _FIRST
    examples = draw_examples(range(first, first + problems), workers=workers, ray=ray, progress=progress)
    rows = []
    for objective in Objective:
        of_it = [one for one in examples if one.problem.objective == objective]
        for count in budgets if of_it else ():
            progress(f"{objective.value}, {count} evaluations", 0.0)
            ratios = [_ratios(network, untrained, one, count) for one in of_it]
            trained, plain, known = (np.array(column) for column in zip(*ratios, strict=True))
            rows.append(
                {
                    "objective": objective.value,
                    "evaluations": count,
                    "problems": len(of_it),
                    "trained": float(trained.mean()),
                    "untrained": float(plain.mean()),
                    "best_known": float(known.mean()),
                    "better": int((trained < plain - 1e-9).sum()),
                }
            )
    return {"weights": str(path), "training_set": about.get("training_set"), "rows": rows}


def _ratios(
    network: OrderNetwork, untrained: OrderNetwork, example: Example, count: int
) -> tuple[float, float, float]:
    times = [min(time_after(one, example, count), 10.0 * example.usual_s) for one in (network, untrained)]
    trained, plain = (float(np.log(time_s / example.usual_s)) for time_s in times)
    return trained, plain, float(np.log(example.best_s / example.usual_s))

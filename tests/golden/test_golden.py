"""Every timeline in the folder beside, replayed by the compiled simulator and by the reference.

A file holds a claim, its drawing by hand (a column is a second), what the drawing says in numbers, and
the problem and plan as documents of `core.io`. Some hold the published optimum over all plans.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from loadmaster import api
from loadmaster.core import io
from loadmaster.core.placement import Status
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.simulator.events.engine import Dispatch
from tests import reference
from tests.oracle import best_of_all

FOLDER = Path(__file__).parent / "timelines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def golden(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return document


def problem_and_plan(name: str) -> tuple[Problem, Plan]:
    problem, plan = (io.decode(json.dumps(golden(name)[noun]).encode()) for noun in ("problem", "plan"))
    assert isinstance(problem, Problem)
    assert isinstance(plan, Plan)
    return problem, plan


def transfers_of(timeline: Timeline) -> list[list[float]]:
    """Tensor, source, target, start, end of what travels, sorted."""
    num = len(timeline.device_name)
    rows = zip(timeline.kind, timeline.item, timeline.resource, timeline.start_s, timeline.end_s, strict=True)
    return sorted(
        [int(item), int(pair) // num, int(pair) % num, float(start), float(end)]
        for kind, item, pair, start, end in rows
        if kind != SpanKind.COMPUTE
    )


def ops_of(timeline: Timeline) -> tuple[list[float], list[float]]:
    """Start and end of every op."""
    compute = timeline.kind == SpanKind.COMPUTE
    order = timeline.item[compute].argsort()
    return timeline.start_s[compute][order].tolist(), timeline.end_s[compute][order].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_simulator_draws_it(name: str) -> None:
    problem, plan = problem_and_plan(name)
    expected = golden(name)["expected"]
    timeline = api.simulate(problem, plan, dispatch=Dispatch.IN_ORDER)
    assert ops_of(timeline) == (expected["op_start"], expected["op_end"])
    assert transfers_of(timeline) == sorted(expected["transfers"])
    assert timeline.peak_bytes.tolist() == expected["peak_bytes"]
    assert timeline.step_s == expected["step_s"]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_simulator_draws_it(name: str) -> None:
    problem, plan = problem_and_plan(name)
    expected = golden(name)["expected"]
    result = reference.simulate(problem, plan, dispatch="in_order", links=problem.links.value)
    assert (result.op_start, result.op_end) == (expected["op_start"], expected["op_end"])
    assert sorted(map(list, result.transfers)) == sorted(expected["transfers"])
    assert result.peak_bytes == expected["peak_bytes"]
    assert result.step_s == expected["step_s"]


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_may_be_run_and_no_bound_is_above_it(name: str) -> None:
    problem, plan = problem_and_plan(name)
    assert api.check_plan(problem, plan) == []
    assert api.lower_bound(problem).seconds <= golden(name)["expected"]["step_s"]
    assert len(golden(name)["drawing"]) > 2


@pytest.mark.parametrize("name", [name for name in NAMES if "optimum_s" in golden(name)])
def test_the_published_optimum_is_the_best_of_all_plans(name: str) -> None:
    problem, _ = problem_and_plan(name)
    optimum_s = golden(name)["optimum_s"]
    placement = api.plan(problem, algorithm="brute_force", budget="100000x")
    assert (placement.status, placement.score_s) == (Status.OPTIMAL, optimum_s)
    assert best_of_all(problem).fitting_s == optimum_s
    assert golden(name)["expected"]["step_s"] == optimum_s


def test_no_plain_placer_beats_a_published_optimum() -> None:
    for name in ("published_a", "published_b", "published_c", "published_d"):
        problem, _ = problem_and_plan(name)
        best = golden(name)["expected"]["step_s"]
        for algorithm in ("single_device", "round_robin", "fastest_device", "chain_balance"):
            placement = api.plan(problem, algorithm=algorithm, budget="100x")
            assert placement.score_s is None or placement.score_s >= best


def test_the_folder_is_not_empty() -> None:
    assert len(NAMES) >= 10

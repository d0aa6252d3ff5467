"""The same words in Python: parameters, algorithms as instances, and mistakes."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loadmaster as lm
from loadmaster.core.errors import InputError, ProblemError
from loadmaster.placers.heuristic.round_robin import RoundRobin
from tests.unit.formats.format_samples import MSR


def test_the_functions_have_the_promised_parameters() -> None:
    def defaults(function: Callable[..., Any]) -> dict[str, Any]:
        return {p.name: p.default for p in inspect.signature(function).parameters.values()}

    asked = defaults(lm.problem)
    assert list(asked)[:3] == ["source", "devices", "objective"]
    assert (asked["devices"], asked["objective"]) == (None, None)
    planned = defaults(lm.plan)
    assert list(planned)[:8] == [
        "problem_or_source", "devices", "algorithm", "budget", "seed", "objective", "links", "split",
    ]  # fmt: skip
    assert [planned[name] for name in list(planned)[1:8]] == [None, "auto", 10.0, 0, None, None, None]
    assert list(defaults(lm.simulate))[:3] == ["problem", "plan", "links"]


def test_a_source_is_planned_by_name_or_by_instance(tmp_path: Path) -> None:
    named = lm.plan("gen:chain:10", algorithm="round_robin", budget="5x")
    given = lm.plan("gen:chain:10", None, RoundRobin(), budget=lm.Budget(count=5))
    assert named.digest == given.digest
    assert given.algorithm == "round_robin"
    on_others = lm.plan("gen:chain:10", "2xT4", RoundRobin())
    assert on_others.problem.cluster.device_name == ("gpu0", "gpu1")
    lm.save(given, tmp_path / "p.json")
    loaded = lm.load(tmp_path / "p.json")
    assert isinstance(loaded, lm.Placement)
    assert loaded.plan is not None
    assert lm.simulate(loaded.problem, loaded.plan).step_s == given.score_s
    assert lm.check_plan(loaded.problem, loaded.plan) == []


def test_mistakes_in_python_are_answered_like_those_on_the_command_line() -> None:
    problem = lm.problem("gen:chain:4")
    placement = lm.plan(problem, algorithm="round_robin")
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: lm.plan(problem, seed=-1), "seed is -1"),
        (lambda: lm.plan(problem, seed=1.5), "seed is 1.5"),  # type: ignore[arg-type]
        (lambda: lm.plan(problem, algorithm=RoundRobin), "give a name or an instance"),  # type: ignore[arg-type]
        (lambda: lm.plan(problem, algorithm=3), "is not an algorithm"),  # type: ignore[arg-type]
        (lambda: lm.plan(problem, "2xT4"), "has its devices already"),
        (lambda: lm.plan(problem, budget="nonsense"), "is not a budget"),
        (lambda: lm.simulate(problem, placement), "of a Placement, give its .plan"),  # type: ignore[arg-type]
        (lambda: lm.simulate(problem, None), "least_overflow_plan is the nearest plan"),  # type: ignore[arg-type]
        (lambda: lm.simulate("gen:chain:4", None), "make one with loadmaster.problem"),  # type: ignore[arg-type]
        (lambda: lm.problem("gen:chain:4", precision="mixed"), "without an optimizer"),
        (lambda: lm.problem(42), "a source is text, a path"),  # type: ignore[arg-type]
    ]
    for call, message in wrong:
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(ProblemError, match="brings no devices"):
        lm.plan(lm.problem("gen:chain:4").graph)  # a bare graph brings none


def test_a_source_brings_its_own_objective_unless_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "msr.json"
    path.write_text(json.dumps(MSR))
    assert lm.problem(path).objective == "throughput"
    assert lm.problem(path, objective="step").objective == "step"
    assert lm.problem("gen:chain:4").objective == "step"


def test_a_source_has_a_bound_as_its_problem_has(tmp_path: Path) -> None:
    bound = lm.lower_bound("gen:chain:6", devices="2xT4")
    assert bound == lm.lower_bound(lm.problem("gen:chain:6", "2xT4"))
    assert bound.seconds > 0


def test_an_algorithm_is_made_with_parameters_of_its_own() -> None:
    made = lm.placer("ideal_dp", max_ideals=7)
    assert made.max_ideals == 7  # type: ignore[attr-defined]
    placement = lm.plan("gen:chain:8", "2xT4", algorithm=made, budget="5x")
    assert "more than 7 ideals" in placement.members[0].reason
    with pytest.raises(InputError, match="algorithm 'ideal_dp'"):
        lm.placer("ideal_dp", most=7)


def test_a_refusal_names_what_would_be_served() -> None:
    problem = lm.problem("gen:chain:8", "2xT4", "throughput")
    with pytest.raises(ProblemError, match="makes free splits, not chain; ask for --split free"):
        lm.plan(problem, algorithm="local_search")
    with pytest.raises(ProblemError, match="supports step, not throughput; ask for --objective step"):
        lm.plan(problem, algorithm="refine")

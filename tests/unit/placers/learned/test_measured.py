"""Measured evaluations: plans are run for real, counted, and survived where they fail."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Problem
from tests.builders import chain, problem_of, star_cluster

torch = pytest.importorskip("torch", reason="measured evaluations need the extra [torch]")

from loadmaster.runtime.run.launch import RebuiltModel, rebuild_for_graph  # noqa: E402
from loadmaster.runtime.run.plan_timer import PlanTimer  # noqa: E402

MODEL = """
import torch
from torch import nn

class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def build():
    torch.manual_seed(0)
    return Moody(), (torch.randn(4, 8),)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Problem, RebuiltModel]:
    folder: Path = tmp_path_factory.mktemp("moody")
    (folder / "net.py").write_text(MODEL)
    problem = api.problem(f"{folder / 'net.py'}:build", "cpu#0-1MB, cpu#1-1MB")
    return problem, rebuild_for_graph(problem.graph)


def timer_of(asked: tuple[Problem, RebuiltModel], **options: Any) -> PlanTimer:
    return PlanTimer(*asked, **{"repeats": 2, **options})


def all_on(problem: Problem, device: int) -> Any:
    return plan_of(np.full(problem.graph.num_ops, device, dtype=np.int32))


def test_a_plan_gets_the_time_of_its_steps(asked: tuple[Problem, RebuiltModel]) -> None:
    timer = timer_of(asked, repeats=3)
    score = timer.score(all_on(asked[0], 0))
    (found,) = timer.measured
    assert len(found.steps) == 3
    assert score.overflow_bytes == 0
    assert score.time_s == sorted(found.steps)[1]
    assert 0 <= found.noise_s < math.inf


def test_asking_twice_counts_twice_and_runs_once(asked: tuple[Problem, RebuiltModel]) -> None:
    timer = timer_of(asked)
    first, again = (timer.score(all_on(asked[0], 1)) for _ in range(2))
    assert first == again
    assert len(timer.measured) == 2
    assert "2 evaluations on this machine, 1 different plans run" in timer.summary


def test_a_hopeless_plan_is_given_up_after_one_step(asked: tuple[Problem, RebuiltModel]) -> None:
    from loadmaster.runtime.run.plan_timer import MeasuredPlan

    timer = timer_of(asked, repeats=4)
    timer.measured.append(MeasuredPlan("x", 1e-9, 0.0, (1e-9,), 1e-9))  # nothing is as fast as that
    timer.score(all_on(asked[0], 0))
    assert len(timer.measured[-1].steps) == 1
    assert "given up after 1 of 4" in timer.measured[-1].note


def test_a_plan_that_is_too_large_is_not_run_and_counts(asked: tuple[Problem, RebuiltModel]) -> None:
    from dataclasses import replace

    problem, rebuilt = asked
    small = replace(problem, cluster=replace(problem.cluster, memory_bytes=np.array([64, 10**6])))
    timer = PlanTimer(small, rebuilt, 2)
    score = timer.score(all_on(small, 0))
    assert score.overflow_bytes > 0
    assert timer.measured[0].steps == ()
    assert "too large" in timer.measured[0].note


def test_a_plan_that_fails_has_no_time_and_the_search_goes_on(
    asked: tuple[Problem, RebuiltModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadmaster.placers.learned.cross_entropy import CrossEntropy
    from loadmaster.runtime.run import plan_timer

    real, calls = plan_timer.place_on_plan, []

    def moody(*given: Any, **wishes: Any) -> Any:
        calls.append(given)
        if len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("the device is full")
        return real(*given, **wishes)

    monkeypatch.setattr(plan_timer, "place_on_plan", moody)
    found = api.plan(asked[0], algorithm=CrossEntropy(), budget="8x", evaluate="measured", repeats=1)
    assert found.plan is not None
    assert len(calls) >= 3
    note = found.members[-1].reason
    assert "8 evaluations" in note
    assert "0 not run or failed" not in note


@pytest.mark.parametrize("algorithm", ["post", "learned_order"])
def test_algorithms_that_count_use_it(asked: tuple[Problem, RebuiltModel], algorithm: str) -> None:
    found = api.plan(asked[0], algorithm=algorithm, budget="5x", evaluate="measured", repeats=1)
    assert found.plan is not None
    assert found.bound_s == 0.0
    assert "5 evaluations" in found.members[-1].reason
    assert found.plan.priority.tolist() == list(range(asked[0].graph.num_ops))  # as torch runs it


def test_what_cannot_be_measured_is_refused(asked: tuple[Problem, RebuiltModel]) -> None:
    with pytest.raises(UnknownNameError, match="way to evaluate"):
        api.plan(asked[0], evaluate="guessed", budget="2x")
    with pytest.raises(InputError, match="does not say what model"):
        api.plan(problem_of(chain(3), star_cluster(2), 1.0), evaluate="measured", budget="2x")
    with pytest.raises(InputError, match="repeats is 0"):
        timer_of(asked, repeats=0)
    with pytest.raises(InputError, match="spilled"):
        api.plan(asked[0], evaluate="measured", spill="host", budget="2x")

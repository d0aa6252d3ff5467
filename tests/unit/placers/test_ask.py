"""Orders: plans in the graph's own order are scored in it, and say so."""

from dataclasses import replace

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import UnknownNameError
from loadmaster.placers import warm
from tests import reference
from tests.builders import problem_of, star_cluster
from tests.unit.placers.test_segments import step


@pytest.mark.parametrize("algorithm", ["auto", "segments", "refine", "heft", "m_etf"])
def test_a_plan_in_captured_order_is_scored_in_that_order(algorithm: str) -> None:
    problem = problem_of(step(1), star_cluster(2, rate=4.0), 1.0)
    placement = api.plan(problem, algorithm=algorithm, budget="300x", order="captured")
    assert placement.plan is not None
    assert placement.plan.priority.tolist() == list(range(problem.graph.num_ops))
    again = reference.simulate(problem, placement.plan, dispatch="in_order", links="shared")
    assert again.step_s == placement.score_s


def test_the_free_order_is_never_slower() -> None:
    problem = problem_of(step(1), star_cluster(2, rate=4.0), 1.0)
    free, captured = (api.plan(problem, budget="1000x", order=order) for order in ("free", "captured"))
    assert free.score_s is not None
    assert captured.score_s is not None
    assert free.score_s <= captured.score_s


def test_a_plan_that_does_not_fit_keeps_the_order_too() -> None:
    problem = problem_of(step(), star_cluster(2, memory=1), 1.0)
    graph = replace(problem.graph, resident_bytes=np.full(15, 9))
    heavy = problem_of(graph, problem.cluster, 1.0)
    placement = api.plan(heavy, budget="50x", order="captured")
    assert placement.plan is None
    assert placement.least_overflow_plan is not None
    assert placement.least_overflow_plan.priority.tolist() == list(range(15))


def test_an_unknown_order_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"capturd.*captured"):
        api.plan(problem_of(step(), star_cluster(2), 1.0), order="capturd")


def test_a_first_plan_compiles_what_its_own_answer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All algorithms on all tiny problems take more than a minute of processor time."""
    marked: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(warm, "is_warm", lambda part: part in marked)  # as on a machine that is new
    monkeypatch.setattr(warm, "mark_warm", marked.append)
    for _ in range(2):
        api.plan(
            "gen:fork_join:20",
            "2xA100-80GB",
            algorithm="heft",
            budget="5x",
            progress=lambda what, share: said.append(what),
        )
    assert [one for one in said if " of " in one and "compiling" in one] == [f"{warm._MESSAGE}: 1 of 1"]
    assert marked == ["placers-step-free-False-heft"]

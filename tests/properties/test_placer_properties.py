"""Placers and bounds against every plan there is, scored by the reference simulator.

Graham's anomaly is not asserted against: a faster device or a shorter op may make a plan later.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.core.run import Bound, Budget, Run
from loadmaster.placers.registry import list_algorithms, placer, why_not
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests.oracle import Best, best_of_all
from tests.strategies import problems

ROUNDING = 1e-12  # sums of loads in another order
quick = settings(max_examples=12, deadline=None)  # the same at length: `make test-slow`
long = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = [(4, 3), (5, 2)]
COUNTS = {"brute_force": 20_000}  # others: CP-SAT finds some tiny problems hard, and takes all it gets
QUESTIONS: dict[str, dict[str, Any]] = {
    "step": {"issue": False},
    "issued step": {"issue": True},
    "free pipeline": {"objective": Objective.THROUGHPUT, "links": Links.HOST, "split": Split.FREE},
    "chain pipeline": {"objective": Objective.THROUGHPUT, "links": Links.HOST, "split": Split.CHAIN},
    "convex pipeline": {"objective": Objective.THROUGHPUT, "links": Links.HOST, "split": Split.CONVEX},
}


def draw_problem(data: st.DataObject, question: str, size: tuple[int, int]) -> Problem:
    max_ops, max_devices = size
    if question == "issued step":  # every order counts, so that there are many more plans
        max_ops = min(max_ops, 4)
    return data.draw(problems(max_ops, max_devices, **QUESTIONS[question]))


def check(data: st.DataObject, question: str, size: tuple[int, int]) -> None:
    problem = draw_problem(data, question, size)
    best, bound, simulator = best_of_all(problem), lower_bound(problem), prepare(problem)
    assert_bound_holds(bound, best)
    for name in list_algorithms():
        if not why_not(placer(name), problem):
            run = Run(
                budget=Budget(count=COUNTS.get(name, 200)),
                rng=np.random.default_rng(0),
                score=simulator.score,
                arrange=simulator.order_and_score,
                bound=bound,
            )
            answer = placer(name)(problem, run)
            assert_honest(answer, best)
            if name == "brute_force":
                assert_is_the_oracle(answer, best)


def assert_is_the_oracle(answer: Placement, best: Best) -> None:
    if best.fitting_s is None:
        assert answer.status == Status.INFEASIBLE
    else:
        assert answer.status == Status.OPTIMAL
        assert answer.score_s == pytest.approx(best.fitting_s, rel=ROUNDING)


def assert_bound_holds(bound: Bound, best: Best) -> None:
    if bound.infeasible:
        assert best.fitting_s is None, bound.infeasible
        return
    if best.fitting_s is not None:
        assert bound.seconds <= best.fitting_s, bound.name
    if bound.name != "memory" and best.any_s is not None:  # those hold for plans that do not fit, too
        assert bound.seconds <= best.any_s, bound.name


def assert_honest(answer: Placement, best: Best) -> None:
    if answer.score_s is not None:
        assert best.fitting_s is not None, answer.algorithm
        assert answer.score_s >= best.fitting_s * (1 - ROUNDING), answer.algorithm
        assert answer.score_s >= answer.bound_s, answer.algorithm
    if answer.status == Status.INFEASIBLE:
        assert best.fitting_s is None, answer.algorithm
    if answer.status == Status.OPTIMAL:
        assert answer.score_s == pytest.approx(best.fitting_s, rel=1e-9), answer.algorithm


@pytest.mark.parametrize("question", QUESTIONS)
@quick
@given(st.data(), st.sampled_from(SIZES))
def test_no_placer_and_no_bound_contradicts_the_oracle(
    question: str, data: st.DataObject, size: tuple[int, int]
) -> None:
    check(data, question, size)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
@long
@given(st.data(), st.sampled_from([*SIZES, (5, 3)]))
def test_no_placer_and_no_bound_contradicts_the_oracle_at_length(
    question: str, data: st.DataObject, size: tuple[int, int]
) -> None:
    check(data, question, size)


def test_the_oracle_finds_plans_and_the_lack_of_them() -> None:
    """Guards the properties above against problems that are all easy, or all impossible."""
    seen: set[bool] = set()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(problems(4, 3))
    def look(problem: Problem) -> None:
        seen.add(best_of_all(problem).fitting_s is None)

    look()
    assert seen == {True, False}

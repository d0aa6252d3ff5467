"""Small problems to the end: branch and bound against every plan there is, and `auto` on tight memory."""

import pytest

from loadmaster import api
from loadmaster.core.placement import Status
from loadmaster.core.problem import Objective, Problem
from loadmaster.placers.exact.branch_and_bound import BranchAndBound
from tests.odd_problems import odd_problem, tight_problem
from tests.oracle import best_of_all

_CLOSE = 1e-9
_BUDGET = "3000x"


def is_close(one: float | None, other: float | None) -> bool:
    """Equal but for rounding, or both none."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _CLOSE * max(abs(one), 1.0)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("seed", range(40))
def test_branch_and_bound_finds_what_trying_every_plan_finds(seed: int, objective: Objective) -> None:
    problem = odd_problem(10_000 + seed, objective)
    answer = api.plan(problem, algorithm="branch_and_bound", budget="100000x")
    every = api.plan(problem, algorithm="brute_force", budget="1000000x")
    assert answer.status == every.status
    assert is_close(answer.score_s, every.score_s)


@pytest.mark.parametrize("seed", range(6))
def test_branch_and_bound_agrees_with_the_second_simulator(seed: int) -> None:
    problem = odd_problem(20_000 + seed)
    answer = api.plan(problem, algorithm="branch_and_bound", budget="100000x")
    assert is_close(answer.score_s, best_of_all(problem).fitting_s)


def test_branch_and_bound_cuts_what_overflows_before_it_is_a_whole_plan() -> None:
    problem = tight_problem(1)  # 20 whole plans are met if only what stays to the end is looked at
    answer = api.plan(problem, algorithm="branch_and_bound", budget="8x")
    assert answer.status == Status.OPTIMAL


def test_branch_and_bound_cut_short_claims_nothing() -> None:
    problem = tight_problem(15)
    answer = api.plan(problem, algorithm="branch_and_bound", budget="1x")
    assert answer.status in (Status.FEASIBLE, Status.NOT_FOUND)


def test_branch_and_bound_beats_the_plan_it_is_given() -> None:
    problem = tight_problem(15)
    start = api.plan(problem, algorithm="m_etf").plan
    whole = api.plan(problem, algorithm=BranchAndBound(start), budget="100000x")
    assert whole.status == Status.OPTIMAL
    assert whole.score_s == api.plan(problem, algorithm="branch_and_bound", budget="100000x").score_s


def find_shortfall(problem: Problem) -> str:
    """What `auto` misses of a problem that has a plan, '' where it is proven best."""
    answer = api.plan(problem, budget=_BUDGET)
    best = api.plan(problem, algorithm="branch_and_bound", budget="1000000x")
    assert best.status == Status.OPTIMAL  # by construction one plan fits
    if answer.score_s is None:
        return "found nothing"
    return "" if is_close(answer.score_s, best.score_s) else f"{answer.score_s} against {best.score_s}"


@pytest.mark.parametrize("objective", list(Objective))
def test_auto_solves_tiny_problems_whose_memory_just_does(objective: Objective) -> None:
    missed = {seed: find_shortfall(tight_problem(seed, objective)) for seed in range(6)}
    assert not {seed: said for seed, said in missed.items() if said}


@pytest.mark.slow
@pytest.mark.parametrize("objective", list(Objective))
def test_auto_solves_nearly_all_of_many_tiny_problems(objective: Objective) -> None:
    missed = {seed: find_shortfall(tight_problem(seed, objective)) for seed in range(6, 100)}
    missed = {seed: said for seed, said in missed.items() if said}
    assert "found nothing" not in missed.values()
    assert len(missed) <= 1, missed

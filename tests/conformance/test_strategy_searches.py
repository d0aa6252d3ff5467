"""What every search for strategies promises, on a few small problems."""

import functools

import numpy as np
import pytest

pytest.importorskip("torch")

from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget
from loadmaster.core.strategy_check import check_strategy
from loadmaster.strategies.ask import StrategyRequest, find_strategy, make_evaluator
from loadmaster.strategies.predict import op_level
from loadmaster.strategies.registry import list_searches, make_search
from loadmaster.strategies.search_run import SearchRun
from tests.unit.strategies.models import along_step, mixed_step
from tests.unit.strategies.strategies import MIXED_DEVICES, TWO_HOSTS, problem_for, wide_problem

SEARCHES = tuple(list_searches())
COUNT = 150


CASES = {
    "wide": lambda: (wide_problem(width=512), 12),
    "two hosts": lambda: (wide_problem(width=512, devices=TWO_HOSTS), 12),
    "batch norm": lambda: (problem_for(mixed_step(6), MIXED_DEVICES), 6),
    "stuck": lambda: (problem_for(along_step(lambda x: x.cumsum(0)), TWO_HOSTS), 16),
    "one device": lambda: (wide_problem(devices="V100-16GB"), 12),
}


@functools.cache
def problem_of(case: str) -> tuple[Problem, int]:
    """Captured where it is asked for, not while tests are collected."""
    return CASES[case]()


def ask(search: str, case: str, seed: int = 0):  # type: ignore[no-untyped-def]
    problem, batch = problem_of(case)
    return find_strategy(problem, StrategyRequest(batch, search, Budget(count=COUNT), seed))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("search", SEARCHES)
def test_the_answer_is_valid_and_scored_by_the_simulator(search: str, case: str) -> None:
    problem, batch = problem_of(case)
    digest = problem.digest
    answer = ask(search, case)
    assert check_strategy(problem, answer.strategy) == []
    assert answer.strategy.batch == batch
    assert answer.algorithm == search
    score = op_level(problem, answer.strategy)
    assert (score.time_s, score.overflow_bytes) == (answer.score_s, 0)
    assert 0 < answer.bound_s <= answer.score_s
    assert problem.digest == digest


@pytest.mark.parametrize("search", SEARCHES)
def test_the_same_seed_and_count_give_the_same_answer(search: str) -> None:
    assert ask(search, "wide", 3).strategy.digest == ask(search, "wide", 3).strategy.digest


@pytest.mark.parametrize("search", SEARCHES)
def test_the_budget_is_kept(search: str) -> None:
    problem, batch = problem_of("two hosts")
    evaluator = make_evaluator(problem, batch)
    make_search(search)(evaluator, SearchRun(Budget(count=60), np.random.default_rng(0)))
    assert evaluator.replays <= 60 + 8 * 5  # a batch of leaves, each with its variants


@pytest.mark.parametrize("search", SEARCHES)
def test_the_first_line_of_its_file_says_what_it_does(search: str) -> None:
    assert len(list_searches()[search].summary) > 20


@pytest.mark.parametrize("case", CASES)
def test_descent_and_the_guided_search_are_no_worse_than_the_best_uniform_one(case: str) -> None:
    problem, batch = problem_of(case)
    found = {}
    for name in ("uniform", "greedy", "guided"):
        evaluator = make_evaluator(problem, batch)
        run = SearchRun(Budget(count=400), np.random.default_rng(0))
        found[name] = make_search(name)(evaluator, run)[0].rank
    assert found["greedy"] <= found["uniform"]
    assert found["guided"] <= found["uniform"]

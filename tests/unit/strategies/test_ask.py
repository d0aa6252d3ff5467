"""Ask: what is answered, and what is refused in words that say what to do."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

from loadmaster.core.errors import PlanError, ProblemError, UnknownNameError
from loadmaster.core.problem import Links, Objective
from loadmaster.core.run import Budget
from loadmaster.core.strategy import Mode
from loadmaster.graph.transformer import transformer
from loadmaster.strategies.ask import StrategyRequest, find_strategy
from tests.unit.strategies.models import along_step, mixed_step
from tests.unit.strategies.strategies import BATCH, problem_for, wide_problem

SHORT = Budget(count=120)


def test_an_exact_answer_leaves_batch_norm_whole() -> None:
    problem = problem_for(mixed_step(6), "2xV100-16GB")
    norm = problem.graph.op_name.index("norm.weight")
    exact = find_strategy(problem, StrategyRequest(6, "uniform", SHORT, exact=True))
    group = exact.strategy.groups[exact.strategy.group_of[norm]]
    assert group.mode in (Mode.PLACE, Mode.DUPLICATE)
    assert exact.strategy.semantics == ()


def test_deviations_are_said() -> None:
    problem = problem_for(mixed_step(6), "2xV100-16GB")
    answer = find_strategy(problem, StrategyRequest(6, "data_parallel", SHORT))
    assert any("batch norm" in text for text in answer.strategy.semantics)


def test_what_fits_nowhere_is_no_answer() -> None:
    problem = wide_problem(width=512)
    tiny = dataclasses.replace(problem.cluster, memory_bytes=np.full(4, 10**5))
    with pytest.raises(
        PlanError, match=r"no strategy was found that fits: the nearest one lacks .*smaller batch"
    ):
        find_strategy(dataclasses.replace(problem, cluster=tiny), StrategyRequest(BATCH, "greedy", SHORT))


def test_a_tight_memory_is_kept() -> None:
    problem = wide_problem(width=512, devices="2xV100-16GB")
    whole = find_strategy(problem, StrategyRequest(BATCH, "uniform", SHORT))
    room = int(whole.peak_bytes.max()) // 2 + 4_000_000
    small = dataclasses.replace(problem.cluster, memory_bytes=np.full(2, room))
    answer = find_strategy(
        dataclasses.replace(problem, cluster=small), StrategyRequest(BATCH, "greedy", SHORT)
    )
    assert (answer.peak_bytes <= room).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": Objective.THROUGHPUT}, "time of a step"),
        ({"links": Links.HALF_DUPLEX}, "'shared' or 'parallel', not 'half-duplex'"),
    ],
)
def test_other_problems_are_refused(change: dict, words: str) -> None:  # type: ignore[type-arg]
    problem = dataclasses.replace(wide_problem(), **change)
    with pytest.raises(ProblemError, match=words):
        find_strategy(problem, StrategyRequest(BATCH, "uniform", SHORT))


def test_pins_are_refused() -> None:
    problem = wide_problem()
    pinned = np.full(problem.graph.num_ops, -1)
    pinned[3] = 1
    with pytest.raises(ProblemError, match="leave the pins out"):
        find_strategy(dataclasses.replace(problem, pinned=pinned), StrategyRequest(BATCH, "uniform", SHORT))


def test_a_batch_that_was_not_captured_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"no input of the step has 7 rows \(float32\[12,8\]"):
        find_strategy(wide_problem(), StrategyRequest(7, "uniform", SHORT))


def test_an_answer_names_what_cannot_be_split_and_why() -> None:
    problem = problem_for(along_step(lambda x: x.cumsum(0)), "2xV100-16GB")
    answer = find_strategy(problem, StrategyRequest(16, "uniform", SHORT))
    assert answer.notes == (
        "cumsum cannot run on some of the rows, because it mixes rows of the batch;"
        " the group is placed or duplicated",
    )
    assert find_strategy(wide_problem(), StrategyRequest(BATCH, "uniform", SHORT)).notes == ()


def test_a_graph_whose_rows_are_unknown_is_placed_or_duplicated() -> None:
    graph = transformer(num_layers=1, width=64, num_heads=2, seq=8, batch=4, vocab=101)
    answer = find_strategy(problem_for(graph, "2xV100-16GB"), StrategyRequest(4, "greedy", SHORT))
    assert {group.mode for group in answer.strategy.groups} <= {Mode.PLACE, Mode.DUPLICATE}


def test_an_unknown_search_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="greedy"):
        find_strategy(wide_problem(), StrategyRequest(BATCH, "gredy", SHORT))


def test_of_equally_quick_strategies_the_one_that_computes_least_is_the_answer() -> None:
    problem = wide_problem(width=64, devices="cpu#0-4GB, cpu#1-4GB")  # too small to share
    found = find_strategy(problem, StrategyRequest(BATCH, budget=Budget(count=40)))
    assert len(found.strategy.devices) == 1  # not the same twice

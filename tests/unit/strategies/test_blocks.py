"""Blocks: groups that must leave together are found together; walks repeat by seed."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from loadmaster.core.run import Budget
from loadmaster.strategies.ask import make_evaluator
from loadmaster.strategies.registry import make_search
from loadmaster.strategies.scoring.evaluator import Evaluator
from loadmaster.strategies.search.blocks import find_orders
from loadmaster.strategies.search_run import SearchRun
from tests.unit.strategies.models import capture_step
from tests.unit.strategies.strategies import BATCH, TWO_HOSTS, problem_for, wide_problem

ROWS = 4096


class Headed(nn.Module):
    """A body of equal layers, and a head whose scores take more memory than all of it."""

    def __init__(self, width: int = 1024, words: int = 60_000) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(10))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = x + torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.fixture(scope="module")
def headed() -> Evaluator:
    """Two hosts of V100s and one of P100s with 2.6 GiB each, over a slow network: one pair is too small."""
    with torch.device("meta"):
        graph = capture_step(Headed(), torch.zeros(ROWS, 1024), torch.zeros(ROWS, dtype=torch.long))
    problem = problem_for(graph, "2xV100-16GB | 2xV100-16GB | 2xP100 ; inter=10gbit")
    memory = np.full(6, int(2.6 * 2**30))
    cluster = dataclasses.replace(problem.cluster, memory_bytes=memory)
    return make_evaluator(dataclasses.replace(problem, cluster=cluster), ROWS)


def seconds(evaluator: Evaluator, search: str, seed: int = 0) -> float:
    fresh = Evaluator(
        evaluator.problem, evaluator.splits, evaluator.costs, evaluator.facts, evaluator.actions
    )
    run = SearchRun(Budget(count=400), np.random.default_rng(seed))
    found = make_search(search)(fresh, run)[0]
    assert found.overflow == 0
    return found.time_s


@pytest.mark.parametrize("search", ["blocks", "guided"])
def test_a_body_that_should_leave_its_head_does_so_at_once(headed: Evaluator, search: str) -> None:
    one_at_a_time = min(seconds(headed, "greedy"), seconds(headed, "tag_compat"))
    assert seconds(headed, search) < 0.5 * one_at_a_time


def test_orders_follow_the_graph_and_the_sizes(headed: Evaluator) -> None:
    along, heavy = find_orders(headed.facts)
    groups = headed.facts.num_groups
    for order in (along, *heavy):
        assert sorted(order.tolist()) == list(range(groups))
    largest = int(headed.facts.group_gradient_bytes.argmax())
    assert heavy[0][0] == largest
    assert list(along).index(largest) > groups // 2  # the head comes late


def test_a_glance_is_one_replay_and_no_better_than_all_variants() -> None:
    evaluator = make_evaluator(wide_problem(width=512, devices=TWO_HOSTS), BATCH)
    state = (0,) * evaluator.facts.num_groups
    before = evaluator.replays
    glance = evaluator.glance(state, factors=True)
    assert evaluator.replays == before + 1
    assert evaluator.glance(state, factors=True) is glance
    assert evaluator.replays == before + 1
    assert evaluator.evaluate(state).rank <= glance.rank

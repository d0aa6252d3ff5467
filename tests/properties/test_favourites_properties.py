"""The clipped programme against every plan there is: it never exceeds the best one, whatever the problem."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadmaster.core.problem import Links, Problem
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.bounds.favourite_children import NONE, find_favourites, match_favourites
from tests.builders import problem_of, star_cluster
from tests.oracle import best_of_all
from tests.strategies import problems

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
long = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(problem: Problem) -> bool:
    """Whether the published form exceeds the best plan; the clipped one never may."""
    best = best_of_all(problem).any_s
    assert best is not None
    clipped, published = find_favourites(problem), find_favourites(problem, clipped=False)
    assert clipped.solved
    assert clipped.bound_s <= best
    assert clipped.makespan_s <= best * (1 + 1e-9)
    assert published.bound_s <= best
    for found in (clipped, published):
        favourite = match_favourites(found, problem.graph.num_ops).tolist()
        chosen = [child for child in favourite if child != NONE]
        assert len(set(chosen)) == len(chosen)
    return published.makespan_s > best * (1 + 1e-9)


def small_problem(seed: int) -> Problem:
    """3 to 5 ops of 1 to 5 s, transfers of 0 to 9 s that no binary fraction holds, 1 to 3 devices."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(3, 6))
    builder = GraphBuilder("small")
    for op in range(num):
        builder.op(f"op{op}")
    given_s = []
    for i in range(num):
        for j in range(i + 1, num):
            if rng.random() < 0.5:
                builder.use(builder.tensor(i, 1), j)
                given_s.append(int(rng.integers(0, 10)) * 0.1)
    links = [Links.PARALLEL, Links.SHARED, Links.HALF_DUPLEX][seed % 3]
    times = rng.integers(1, 6, num) * 0.1
    return problem_of(builder.build(), star_cluster(1 + seed % 3), times, transfer_s=given_s, links=links)


@pytest.mark.parametrize("links", Links)
@quick
@given(st.data())
def test_no_plan_beats_the_clipped_programme(links: Links, data: st.DataObject) -> None:
    check(data.draw(problems(4, 3, links=links, issue=False)))


@quick
@given(problems(3, 3, issue=True))
def test_no_issued_plan_beats_the_clipped_programme(problem: Problem) -> None:
    check(problem)


@pytest.mark.slow
@pytest.mark.parametrize("links", Links)
@long
@given(st.data())
def test_no_plan_beats_the_clipped_programme_at_length(links: Links, data: st.DataObject) -> None:
    check(data.draw(problems(5, 3, links=links, issue=False)))


def test_no_plan_beats_the_clipped_programme_where_the_published_one_fails() -> None:
    """Transfers up to nine times an op: the published optimum exceeds the best plan again and again."""
    exceeded = [check(small_problem(seed)) for seed in range(45)]
    assert sum(exceeded) >= 8


@pytest.mark.slow
def test_no_plan_beats_the_clipped_programme_where_the_published_one_fails_at_length() -> None:
    exceeded = [check(small_problem(seed)) for seed in range(45, 1000)]
    assert sum(exceeded) >= 150


@quick
@given(problems(6, 3, issue=False), st.floats(0.0, 1.0))
def test_favourites_are_a_matching_for_any_threshold(problem: Problem, threshold: float) -> None:
    found = find_favourites(problem)
    favourite = match_favourites(found, problem.graph.num_ops, threshold)
    chosen = np.flatnonzero(favourite != NONE)
    assert len(np.unique(favourite[chosen])) == len(chosen)
    pairs = set(zip(found.source.tolist(), found.target.tolist(), strict=True))
    assert {(int(i), int(favourite[i])) for i in chosen} <= pairs

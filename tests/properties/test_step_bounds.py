"""Bounds of the step and answers of CP-SAT against every plan there is, scored by the second evaluator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster import api
from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.placement import Status
from loadmaster.core.problem import Links, Objective, Problem
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step
from loadmaster.simulator.bounds.travel import compute_travel
from tests import reference
from tests.builders import cluster_of, graph_of, problem_of
from tests.odd_problems import find_false_bound, odd_problem
from tests.oracle import assignments, best_of_all, orders
from tests.strategies import problems

SLACK = 1 + 1e-9


def small(seed: int, *, tight: bool = True) -> Problem:
    """Four or five ops with tensors, groups and residents on two or three unequal devices."""
    rng = np.random.default_rng(seed)
    num, devices = int(rng.integers(3, 6)), int(rng.integers(2, 4))
    ops: list[dict[str, Any]] = []
    for op in range(num):
        uses = [t for t in range(op) if rng.random() < 0.5]
        ops.append(
            {
                "uses": uses,
                "makes": [{"num_bytes": int(rng.integers(0, 9)), "keep": bool(rng.random() < 0.2)}],
                "resident_bytes": int(rng.integers(0, 6)),
                "workspace_bytes": int(rng.integers(0, 3)),
                "group": int(rng.integers(0, 2)) if rng.random() < 0.3 else -1,
            }
        )
    graph = graph_of(*ops)
    kinds = int(rng.integers(1, devices + 1))
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    total = int(graph.resident_bytes.sum() + graph.tensor_bytes.sum())
    memory = [int(rng.integers(total // 3, total + 3)) + 1 for _ in range(devices)]
    cluster = cluster_of(
        {pair: [int(rng.integers(0, 3))] for pair in pairs},
        kind=[int(rng.integers(0, kinds)) for _ in range(devices)],
        on_host=[False] * kinds,
        memory=memory if tight else UNLIMITED_BYTES,
        rate=[1.0, 2.0, 4.0],
        latency=[0.0, 0.5, 1.0],
    )
    seconds = rng.integers(0, 13, (num, kinds)) / 2.0
    links = (Links.SHARED, Links.PARALLEL, Links.HALF_DUPLEX)[int(rng.integers(0, 3))]
    return problem_of(graph, cluster, seconds, links=links)


def best_s(problem: Problem) -> float | None:
    return best_of_all(problem).fitting_s


def check_bounds(seed: int, *, tight: bool) -> None:
    problem = small(seed, tight=tight)
    best = best_s(problem)
    if best is None:
        return
    assert compute_travel(problem).bound_s <= best * SLACK
    found = lower_bound(problem)
    assert not found.infeasible
    assert found.seconds <= best
    assert solve_relaxed_step(problem).bound_s <= best * SLACK


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_beats_a_bound(seed: int) -> None:
    check_bounds(seed, tight=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_no_plan_of_thousands_of_problems_beats_a_bound(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check_bounds(seed, tight=seed % 2 == 0)


@settings(max_examples=60, deadline=None)
@given(problems(max_ops=4, max_devices=3))
def test_no_plan_beats_a_bound_whatever_the_features(problem: Problem) -> None:
    best = best_s(problem)
    if best is not None:
        assert compute_travel(problem).bound_s <= best * SLACK
        assert solve_relaxed_step(problem).bound_s <= best * SLACK
        assert lower_bound(problem).seconds <= best


@pytest.mark.parametrize("seed", range(40))
def test_heads_and_tails_hold_in_every_run(seed: int) -> None:
    """Not only the sum: no op starts before its head, nor is the step over sooner than its tail after it."""
    problem = small(seed, tight=False)
    found = compute_travel(problem)
    for at, device in enumerate(assignments(problem)):
        if at % 3:
            continue
        for plan in orders(problem, device):
            run = reference.simulate(problem, plan, dispatch="in_order", links=problem.links.value)
            for op, d in enumerate(device):
                assert run.op_start[op] >= found.head_s[op, d] - 1e-9
                assert run.step_s - run.op_end[op] >= found.tail_s[op, d] - 1e-9


def check_cpsat(seed: int, *, tight: bool) -> Status | None:
    """What CP-SAT says of a problem, against every plan there is."""
    problem = small(seed, tight=tight)
    best = best_s(problem)
    answer = api.plan(problem, algorithm="cpsat_latency", budget="150x")
    if best is None:
        assert answer.status in (Status.INFEASIBLE, Status.NOT_FOUND)
        return answer.status
    assert answer.status != Status.INFEASIBLE
    assert answer.bound_s <= best * SLACK
    if answer.score_s is not None:
        assert answer.score_s >= best * (1 - 1e-9)
        if answer.status == Status.OPTIMAL:
            assert answer.score_s == pytest.approx(best, rel=1e-9)
    return answer.status


@pytest.mark.parametrize("seed", range(25))
def test_cpsat_is_optimal_where_it_says_so_and_never_bounds_too_high(seed: int) -> None:
    check_cpsat(seed, tight=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_cpsat_agrees_with_brute_force_on_a_thousand_problems(block: int) -> None:
    said = [check_cpsat(seed, tight=seed % 2 == 0) for seed in range(5000 + 50 * block, 5050 + 50 * block)]
    assert said.count(Status.OPTIMAL) + said.count(Status.INFEASIBLE) >= 25  # it does say something


def test_merging_ops_gives_no_bound() -> None:
    """Two ops that run side by side take 6 s merged, and 3 s apart: what holds of the merged is no bound."""
    apart = problem_of(graph_of({}, {}), cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 0]), [3.0, 3.0])
    merged = replace(apart, graph=replace(apart.graph, group=np.array([0, 0], dtype=np.int32)))
    best = best_s(apart)
    assert best == 3.0
    assert lower_bound(merged).seconds > best
    assert api.lower_bound(apart, "200x").seconds <= best


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_a_bound_scales_with_all_times(seed: int) -> None:
    problem = small(seed, tight=False)
    longer = replace(
        problem,
        costs=replace(problem.costs, compute_s=4 * problem.costs.compute_s),
        cluster=replace(
            problem.cluster,
            link_bytes_per_s=problem.cluster.link_bytes_per_s / 4,
            link_latency_s=4 * problem.cluster.link_latency_s,
        ),
    )
    for bound in (lambda p: compute_travel(p).bound_s, lambda p: solve_relaxed_step(p).bound_s):
        assert bound(longer) == pytest.approx(4 * bound(problem), rel=1e-6)


def test_a_join_without_time_sends_its_output_instead_of_its_inputs() -> None:
    """Two ops on one device feed a join whose only output is read on the other: one transfer, not two."""
    graph = graph_of({"makes": [8]}, {"makes": [8]}, {"uses": [0, 1], "makes": [8]}, {"uses": [2]})
    links = {(0, 1): [0], (1, 0): [0]}
    problem = problem_of(
        graph,
        cluster_of(links, kind=[0, 0], memory=[100, 200]),
        [1.0, 1.0, 0.0, 1.0],
        pinned=np.array([0, 0, -1, 1], dtype=np.int32),
    )
    best = best_s(problem)
    assert best is not None
    assert api.lower_bound(problem).seconds <= best


def name_false_bound(seed: int, *, solvers: bool = False) -> str:
    objective = Objective.THROUGHPUT if seed % 4 == 3 else Objective.STEP
    said = find_false_bound(odd_problem(seed, objective), solvers=solvers)
    return f"odd_problem({seed}): {said}" if said else ""


# Seeds 102 and 157 are among those where charging every input of a join that is taken out is found out.
@pytest.mark.parametrize("block", [5, 7, *(pytest.param(at, marks=pytest.mark.slow) for at in range(8, 30))])
def test_no_bound_is_above_the_best_plan_of_an_odd_problem(block: int) -> None:
    assert not [said for seed in range(20 * block, 20 * block + 20) if (said := name_false_bound(seed))]


@pytest.mark.parametrize("block", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 10))])
def test_no_algorithm_proves_what_a_plan_of_an_odd_problem_disproves(block: int) -> None:
    seeds = range(10_000 + 12 * block, 10_012 + 12 * block)
    assert not [said for seed in seeds if (said := name_false_bound(seed, solvers=True))]

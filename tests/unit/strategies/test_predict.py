"""Predict: what an answer says, and that no strategy beats the bound."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

import loadmaster as lm
from loadmaster.core.errors import PlanError
from loadmaster.core.io import load, save
from loadmaster.core.strategy import Mode, Sync
from loadmaster.strategies.predict import op_level, predict
from loadmaster.strategies.splitting.semantics import find_semantics
from loadmaster.strategies.splitting.splits import PER_REPLICA_NORM, PER_REPLICA_RANDOM, find_splits
from loadmaster.strategies.work_bound import work_bound
from tests.unit.strategies.models import mixed_step
from tests.unit.strategies.strategies import (
    all_ways,
    every_op,
    group_of,
    problem_for,
    strategy_of,
    wide_problem,
)


@pytest.mark.parametrize("way", all_ways(wide_problem()))
def test_no_strategy_beats_the_work_bound(way: str) -> None:
    problem = wide_problem()
    answer = predict(problem, all_ways(problem)[way])
    assert 0 < answer.bound_s <= answer.score_s
    assert answer.bound_s == pytest.approx(work_bound(problem))


def test_the_bound_of_equal_devices_is_the_work_by_their_number() -> None:
    problem = wide_problem(devices="4xV100-16GB")
    total = problem.costs.compute_s.sum(axis=0).min()
    assert work_bound(problem) == pytest.approx(total / 4)


def test_the_bound_of_unequal_devices_is_reached_by_a_fractional_split() -> None:
    # One op takes 2 s on one kind and 6 s on the other: three quarters and one quarter, 1.5 s.
    problem = wide_problem(devices="1xV100-16GB, 1xP100")
    seconds = np.zeros_like(problem.costs.compute_s)
    seconds[20] = (2.0, 6.0)
    changed = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, compute_s=seconds))
    assert work_bound(changed) == pytest.approx(1.5)


def test_semantics_name_what_differs_and_only_where_rows_are_apart() -> None:
    problem = problem_for(mixed_step(6))
    splits = find_splits(problem.graph, 6)
    ops = every_op(problem)
    apart = strategy_of(problem, group_of(ops, (0, 1), (3, 3), sync=Sync.ALLREDUCE), batch=6)
    placed = strategy_of(problem, group_of(ops, (0,), (6,), mode=Mode.PLACE), batch=6)
    assert find_semantics(apart, splits) == (PER_REPLICA_NORM, PER_REPLICA_RANDOM)
    assert find_semantics(placed, splits) == ()


def test_peaks_are_those_of_the_devices_and_overflow_is_counted() -> None:
    problem = wide_problem()
    small = dataclasses.replace(problem.cluster, memory_bytes=np.full(4, 10**6))
    tight = dataclasses.replace(problem, cluster=small)
    score = op_level(tight, all_ways(tight)["even"])
    assert len(score.peak_bytes) == 4
    assert score.overflow_bytes == sum(max(p - 10**6, 0) for p in score.peak_bytes) > 0


def test_a_strategy_for_another_graph_is_refused() -> None:
    problem = wide_problem()
    with pytest.raises(PlanError, match="the strategy is for graph"):
        predict(wide_problem(width=128), all_ways(problem)["even"])


@pytest.mark.parametrize("way", ["uneven", "factors", "then placed", "1f1b"])
def test_a_strategy_is_served_as_a_placement(way: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    problem = wide_problem()
    answer = predict(problem, all_ways(problem)[way])
    placement = lm.lower(answer)
    assert placement.plan is not None
    timeline = lm.simulate(placement.problem, placement.plan)
    assert placement.score_s == timeline.step_s == answer.score_s
    assert placement.peak_bytes[: problem.cluster.num_devices].tolist() == answer.peak_bytes.tolist()
    lm.write_report(placement, tmp_path / "page.html")
    assert b"strategy" in (tmp_path / "page.html").read_bytes()
    content, _ = lm.export(placement, "chrome")
    assert b"traceEvents" in content
    found = lm.explain(placement)
    assert found.changes == ()  # nothing is planned anew for a lowered graph
    assert found.reasons


def test_an_answer_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    problem = wide_problem()
    answer = predict(problem, all_ways(problem)["factors"])
    save(answer, tmp_path / "answer.json")
    assert load(tmp_path / "answer.json").digest == answer.digest

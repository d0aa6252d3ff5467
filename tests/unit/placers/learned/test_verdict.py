"""The verdict rule on synthetic data, and how its file is read."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadmaster.core.problem import Split
from loadmaster.placers.learned._verdict import (
    FILE,
    GraphTimes,
    class_of,
    is_recommended,
    judge,
    read_verdicts,
    recommend,
)
from tests.conformance.problems import fork_join, pipeline


def graphs(ratio: list[float]) -> list[GraphTimes]:
    return [
        GraphTimes(f"g{at}", [value, value, 9.0], {"heft": [1.0, 1.0, 1.0], "random": [5.0, 5.0, 5.0]})
        for at, value in enumerate(ratio)
    ]


def test_a_placer_that_wins_everywhere_is_recommended() -> None:
    found = judge(graphs([0.9, 0.85, 0.95, 0.92]))
    assert found.recommended
    assert (found.num_better, found.num_graphs, found.strongest) == (4, 4, "heft")
    assert found.low <= found.mean_log_ratio <= found.high < 0
    assert found.mean_log_ratio == pytest.approx(np.log([0.9, 0.85, 0.95, 0.92]).mean())


def test_half_of_the_graphs_is_not_more_than_half() -> None:
    assert not judge(graphs([0.5, 0.5, 1.0, 1.0])).recommended


def test_one_large_gain_does_not_carry_an_interval_with_zero_in_it() -> None:
    found = judge(graphs([0.2, 0.999, 0.999, 1.3, 0.999]))
    assert found.num_better == 4
    assert found.high > 0
    assert not found.recommended


def test_it_is_judged_by_medians_and_against_the_best_baseline() -> None:
    """The best seed alone would win, and the weakest baseline would lose."""
    lucky = [GraphTimes("g", [0.1, 2.0, 2.0], {"heft": [1.0], "random": [5.0]}) for _ in range(6)]
    found = judge(lucky)
    assert not found.recommended
    assert found.mean_log_ratio == pytest.approx(np.log(2.0))


def test_equal_times_are_no_win() -> None:
    assert judge(graphs([1.0] * 8)).num_better == 0


def test_no_graphs_recommend_nothing() -> None:
    assert not judge([]).recommended


def test_the_same_seed_gives_the_same_interval() -> None:
    one, other = judge(graphs([0.9, 1.1, 0.8])), judge(graphs([0.9, 1.1, 0.8]))
    assert one == other


def test_both_ways_of_counting_must_agree() -> None:
    good, bad = judge(graphs([0.9] * 5)), judge(graphs([1.1] * 5))
    assert recommend(good, good)
    assert not recommend(good, bad)
    assert not recommend(bad, good)


def test_classes_are_objective_and_size() -> None:
    assert class_of(fork_join()) == "step, up to 1000 ops"
    assert class_of(pipeline(Split.FREE)) == "throughput (free), up to 100 ops"
    assert class_of(pipeline(Split.CHAIN)) == "throughput (chain), up to 100 ops"


def test_a_missing_or_damaged_file_recommends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    assert not is_recommended("learned_order", fork_join(), path)
    for text in (
        "{",
        "[" * 200_000,
        "[]",
        '{"version": 99, "verdicts": {}}',
        '{"version": 1, "verdicts": 5}',
    ):
        path.write_text(text)
        assert read_verdicts(path) == {}
    entry = {"learned_order": {"step, up to 1000 ops": {"recommended": True}}}
    path.write_text(json.dumps({"version": 1, "verdicts": entry}))
    assert is_recommended("learned_order", fork_join(), path)
    assert not is_recommended("learned_order", pipeline(Split.FREE), path)
    assert not is_recommended("post", fork_join(), path)


def test_auto_asks_it_where_the_file_recommends_it_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadmaster import api

    path = tmp_path / "verdict.json"
    monkeypatch.setattr("loadmaster.placers.learned._verdict.FILE", path)
    names = [one.name for one in api.plan(fork_join(), budget="40x").members]
    assert "learned_order" not in names
    entry = {"learned_order": {"step, up to 1000 ops": {"recommended": True}}}
    path.write_text(json.dumps({"version": 1, "verdicts": entry}))
    names = [one.name for one in api.plan(fork_join(), budget="40x").members]
    assert "learned_order" in names


def test_the_shipped_file_is_readable() -> None:
    assert read_verdicts(FILE)

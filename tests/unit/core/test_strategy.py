"""Strategy: what it refuses, in words that say what to do, and what it says of itself."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Phase
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync, microbatch_bounds, share_rows
from loadmaster.core.strategy_check import check_strategy
from tests.builders import cluster_of, graph_of, problem_of

PAIR: dict[str, Any] = {"ops": [0, 1], "devices": (0, 1), "rows": (3, 1), "mode": Mode.REPLICATE}


def group(**changes: Any) -> OpGroup:
    return OpGroup(**{**PAIR, "sync": Sync.ALLREDUCE, **changes})


def strategy(*groups: OpGroup, **changes: Any) -> Strategy:
    given = {"name": "s", "graph_digest": "g", "cluster_digest": "c", "batch": 4, "groups": groups}
    return Strategy(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ops": []}, "no ops"),
        ({"ops": [1, 0]}, "ascend"),
        ({"ops": [1, 1]}, "each op once"),
        ({"devices": (0, 0)}, "device 0 stands twice"),
        ({"devices": ()}, "name at least one device"),
        ({"devices": (0, -1)}, "name at least one device"),
        ({"devices": (0, 0.5)}, "whole numbers"),
        ({"rows": (4,)}, "1 numbers of rows for 2 devices"),
        ({"rows": (4, 0)}, "device 1 takes 0 rows; leave it out"),
        ({"mode": "scatter"}, "none of place, replicate, duplicate, pipeline"),
        ({"mode": "place", "sync": "none"}, "mode 'place' is for one device and 2 are named"),
        ({"mode": "duplicate", "rows": (4, 4)}, "only gradients of several replicas"),
        ({"sync": "ps"}, "the server -1 is none of the group's devices"),
        ({"sync": "ps", "server": 7}, "the server 7 is none"),
        ({"server": 1}, "only 'ps' has one"),
        ({"sync": "none", "sfb": (0,)}, "gathered under 'allreduce' only"),
        ({"sfb": (5,)}, "sfb names op 5, which is not in the group"),
        ({"microbatches": 2}, "2 micro-batches under mode 'replicate'"),
    ],
)
def test_a_group_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as error:
        group(**changes)
    assert words in str(error.value)


def test_rows_must_add_up_to_the_batch() -> None:
    with pytest.raises(PlanError, match=r"rows \[3, 1\] of group 0 add up to 4, the batch has 5"):
        strategy(group(), batch=5)
    with pytest.raises(PlanError, match="each device takes all 4"):
        strategy(group(mode=Mode.DUPLICATE, sync=Sync.NONE))


def test_every_op_is_in_one_group() -> None:
    with pytest.raises(PlanError, match="op 1 is in two groups"):
        strategy(group(), group(ops=[1, 2]))
    with pytest.raises(PlanError, match="op 2 is in no group"):
        strategy(group(), group(ops=[3]))


def test_a_pipeline_has_one_count_and_an_order() -> None:
    stage = {"devices": (0,), "rows": (4,), "mode": Mode.PIPELINE, "sync": Sync.NONE}
    first, second = group(**stage, microbatches=2), group(**stage, ops=[2], microbatches=4)
    with pytest.raises(PlanError, match=r"\[2, 4\] micro-batches"):
        strategy(first, second, schedule="1f1b")
    with pytest.raises(PlanError, match=r"'1f1b' or 'gpipe'"):
        strategy(first)
    with pytest.raises(PlanError, match="8 micro-batches of 4 rows"):
        strategy(dataclasses.replace(first, microbatches=8), schedule="gpipe")
    assert strategy(first, schedule="gpipe").microbatches == 2


def test_it_says_who_runs_what() -> None:
    found = strategy(group(), group(ops=[2], devices=(2,), rows=(4,), mode=Mode.PLACE, sync=Sync.NONE))
    assert found.group_of.tolist() == [0, 0, 1]
    assert found.devices == (0, 1, 2)
    assert found.groups[0].starts == (0, 3)
    assert dataclasses.replace(found, name="another").digest == found.digest


@given(st.integers(1, 200), st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(sum))
def test_shared_rows_add_up_and_are_within_one_of_the_exact_share(batch: int, weights: list[float]) -> None:
    rows = np.array(share_rows(batch, weights))
    assert rows.sum() == batch
    assert (np.abs(rows - batch * np.array(weights) / sum(weights)) < 1 + 1e-6).all()


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")]])
def test_weights_that_share_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(PlanError, match="cannot be shared"):
        share_rows(4, weights)


def test_microbatches_cover_the_batch() -> None:
    assert microbatch_bounds(12, 5) == (0, 2, 5, 7, 10, 12)


class TestAgainstAProblem:
    GRAPH = graph_of(
        {"phase": Phase.PARAM, "makes": [8], "resident_bytes": 8},
        {"uses": [0], "makes": [4]},
        {"uses": [1], "phase": Phase.BACKWARD, "mirror": 1, "makes": [8]},
        {"uses": [2, 0], "phase": Phase.UPDATE},
    )
    CLUSTER = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, True))
    PROBLEM = problem_of(GRAPH, CLUSTER, [[0, 0], [1, 2], [2, 2], [1, 1]])

    def rules(self, *groups: OpGroup, **changes: Any) -> list[str]:
        problem = changes.pop("problem", self.PROBLEM)
        digests = {"graph_digest": problem.graph.digest, "cluster_digest": problem.cluster.digest}
        found = strategy(*groups, **{**digests, **changes})
        return [violation.rule for violation in check_strategy(problem, found)]

    def test_a_whole_replica_passes(self) -> None:
        assert self.rules(group(ops=[0, 1, 2, 3])) == []
        assert self.rules(group(ops=[0, 1, 2, 3], sfb=(0,))) == []

    def test_what_belongs_together_stays_together(self) -> None:
        assert self.rules(group(ops=[0, 1, 3]), group(ops=[2], sync=Sync.NONE)) == ["mirror"]
        assert self.rules(group(ops=[0, 1, 2]), group(ops=[3])) == ["update"]

    def test_replicas_without_a_sum_are_refused(self) -> None:
        assert self.rules(group(ops=[0, 1, 2, 3], sync=Sync.NONE)) == ["sync"]

    def test_factors_are_of_parameters(self) -> None:
        assert self.rules(group(ops=[0, 1, 2, 3], sfb=(1,))) == ["sfb"]

    def test_another_graph_or_cluster_is_said(self) -> None:
        whole = group(ops=[0, 1, 2, 3])
        assert self.rules(whole, graph_digest="another") == ["digest"]
        assert self.rules(whole, cluster_digest="another") == ["digest"]
        assert self.rules(group(ops=[0, 1, 2])) == ["length"]
        assert self.rules(group(ops=[0, 1, 2, 3], devices=(0, 5))) == ["device"]

    def test_an_op_that_cannot_run_there_is_said(self) -> None:
        stuck = problem_of(self.GRAPH, self.CLUSTER, [[0, 0], [1, np.inf], [2, 2], [1, 1]])
        assert self.rules(group(ops=[0, 1, 2, 3]), problem=stuck) == ["support"]

    def test_a_pinned_op_stays(self) -> None:
        pinned = problem_of(
            self.GRAPH, self.CLUSTER, [[0, 0], [1, 2], [2, 2], [1, 1]], pinned=[-1, 0, -1, -1]
        )
        assert self.rules(group(ops=[0, 1, 2, 3]), problem=pinned) == ["pinned"]
        alone = group(ops=[0, 1, 2, 3], devices=(0,), rows=(4,), mode=Mode.PLACE, sync=Sync.NONE)
        assert self.rules(alone, problem=pinned) == []

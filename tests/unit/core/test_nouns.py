"""The nouns refuse every wrong value by name, cannot be changed, and have a digest of their content."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from loadmaster.core.errors import InputError
from loadmaster.core.placement import Status
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Costs, Objective
from loadmaster.core.run import Budget, parse_budget
from tests.unit.core.noun_samples import GRAPH, NOUNS, PIPELINE, PLACEMENT, PROBLEM, other_value

NAN, INF = float("nan"), float("inf")

COLUMNS = [
    (name, field.name)
    for name, noun in NOUNS.items()
    for field in dataclasses.fields(noun)
    if isinstance(getattr(noun, field.name), np.ndarray)
]


def with_first(name: str, field: str, value: Any) -> Any:
    """The field's values as a list of objects, the first one replaced."""
    values = getattr(NOUNS[name], field).astype(object)
    values.flat[0] = value
    return values.tolist()


def refused(name: str, field: str, value: Any) -> str:
    """The message with which a noun refuses a value."""
    with pytest.raises(InputError) as error:
        dataclasses.replace(NOUNS[name], **{field: value})
    return str(error.value)


class TestColumns:
    """What no column of numbers may hold; the message names noun and field."""

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_text_in_a_column_is_refused(self, name: str, field: str) -> None:
        message = refused(name, field, with_first(name, field, "many"))
        assert message.startswith(f"{name}.{field}")
        assert "number" in message

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_nothing_in_a_column_is_refused(self, name: str, field: str) -> None:
        assert refused(name, field, with_first(name, field, None)).startswith(f"{name}.{field}")

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_not_a_number_is_refused(self, name: str, field: str) -> None:
        message = refused(name, field, with_first(name, field, NAN))
        assert f"{name}.{field}" in message
        assert "nan" in message or "true or false" in message

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_a_column_within_a_column_is_refused(self, name: str, field: str) -> None:
        message = refused(name, field, [getattr(NOUNS[name], field).tolist()])
        # Where it gives the number of ops or links, another field may be the one that no longer fits.
        assert message.startswith(f"{name}.")
        assert "needs" in message

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_ragged_rows_are_refused(self, name: str, field: str) -> None:
        message = refused(name, field, [[1], [1, 2], *([[1]] * (len(getattr(NOUNS[name], field)) - 2))])
        assert message.startswith(f"{name}.{field}")

    @pytest.mark.parametrize(
        ("name", "field"),
        [(name, field) for name, field in COLUMNS if getattr(NOUNS[name], field).dtype.kind == "i"],
    )
    def test_a_fraction_of_an_index_or_byte_is_refused(self, name: str, field: str) -> None:
        message = refused(name, field, with_first(name, field, 0.5))
        assert message.startswith(f"{name}.{field}: 0.5 is not a whole number")

    @pytest.mark.parametrize(
        ("name", "field"),
        [(name, field) for name, field in COLUMNS if getattr(NOUNS[name], field).dtype.kind == "i"],
    )
    def test_a_number_too_large_for_its_column_is_refused(self, name: str, field: str) -> None:
        message = refused(name, field, with_first(name, field, 1e30))
        assert message.startswith(f"{name}.{field}")
        assert "1e+30" in message

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_columns_are_read_only_and_contiguous(self, name: str, field: str) -> None:
        values = getattr(NOUNS[name], field)
        assert values.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            values.flat[0] = 1

    @pytest.mark.parametrize(("name", "field"), COLUMNS)
    def test_the_callers_array_is_neither_frozen_nor_aliased(self, name: str, field: str) -> None:
        noun = NOUNS[name]
        own = np.array(getattr(noun, field))
        made = dataclasses.replace(noun, **{field: own})
        assert own.flags.writeable
        before = made.digest
        own.flat[0] += 1
        assert made.digest == before
        assert getattr(made, field).tolist() == getattr(noun, field).tolist()


# noun, field, its first value replaced, and words of the message: the value, and what it should be
FIRST = [
    ("Graph", "phase", 9, "Graph.phase: 9 at position 0; needs 0..3"),
    ("Graph", "dtype", -1, "Graph.dtype: -1 at position 0"),
    ("Graph", "mirror", 4, "Graph.mirror: 4 at position 0; needs -1..3"),
    ("Graph", "mirror", 1, "only a backward op may name"),
    ("Graph", "group", -2, "Graph.group: -2"),
    ("Graph", "signature", 1, "Graph.signature: 1 at position 0; needs -1..0"),
    ("Graph", "flops", -1.0, "Graph.flops: -1.0 at position 0; needs a finite number >= 0"),
    ("Graph", "flops", INF, "Graph.flops: inf"),
    ("Graph", "bytes_moved", -1, "Graph.bytes_moved: -1 is negative"),
    ("Graph", "resident_bytes", -1, "Graph.resident_bytes: -1 is negative"),
    ("Graph", "workspace_bytes", -1, "Graph.workspace_bytes: -1 is negative"),
    ("Graph", "tensor_bytes", -1, "Graph.tensor_bytes: -1 is negative"),
    ("Graph", "tensor_op", 4, "Graph.tensor_op: 4 at position 0; needs 0..3"),
    ("Graph", "tensor_storage", 5, "Graph.tensor_storage: 5"),
    ("Graph", "tensor_storage", 2, "Graph.tensor_storage: tensor 0 is a view of a view"),
    ("Graph", "tensor_storage", 1, "Graph.tensor_storage: a view comes before its base"),
    ("Graph", "keep", 2, "Graph.keep: needs true or false"),
    ("Graph", "use_tensor", 5, "Graph.use_tensor: 5 at position 0; needs 0..4"),
    ("Graph", "use_op", 4, "Graph.use_op: 4"),
    ("Graph", "use_op", 0, "topological order"),
    ("Cluster", "kind", 2, "Cluster.kind: 2 at position 0; needs 0..1"),
    ("Cluster", "memory_bytes", 0, "device 'd0': memory_bytes is 0, needs >= 1"),
    ("Cluster", "reserve_bytes", -1, "device 'd0': reserve_bytes is -1"),
    ("Cluster", "reserve_bytes", 100, "reserve of 100 bytes leaves nothing of its 100 bytes"),
    ("Cluster", "flops_per_s", 0.0, "Cluster.flops_per_s: 0.0"),
    ("Cluster", "memory_bytes_per_s", INF, "Cluster.memory_bytes_per_s: inf"),
    ("Cluster", "overhead_s", -1.0, "Cluster.overhead_s: -1.0"),
    ("Cluster", "route", 2, "Cluster.route: 2 at position 0; needs -1..1"),
    ("Cluster", "link_bytes_per_s", 0.0, "Cluster.link_bytes_per_s: 0.0"),
    ("Cluster", "link_latency_s", -0.5, "Cluster.link_latency_s: -0.5"),
    ("Costs", "compute_s", -1.0, "Costs.compute_s: op 0 takes -1.0 s on kind 0"),
    ("Costs", "issue_s", INF, "Costs.issue_s: inf"),
    ("Costs", "transfer_s", -0.5, "Costs.transfer_s: -0.5"),
    ("Costs", "transfer_s", INF, "Costs.transfer_s: inf"),
    ("Costs", "origin", 3, "Costs.origin: 3"),
    ("Costs", "rel_error", -0.1, "Costs.rel_error: -0.1"),
    ("Problem", "pinned", 2, "Problem.pinned: 2 at position 0; needs -1..1"),
    ("Plan", "device", -1, "Plan.device: -1"),
    ("Pipeline", "stage", 2, "Pipeline.stage: 2 at position 0; needs 0..1"),
    ("Pipeline", "replicas", 0, "Pipeline.replicas: 0"),
    ("Pipeline", "in_flight", 0, "Pipeline.in_flight: 0"),
    ("Pipeline", "stage_s", -1.0, "Pipeline.stage_s: -1.0"),
    ("Timeline", "kind", 3, "Timeline.kind: 3"),
    ("Timeline", "resource", 4, "Timeline.resource: 4 at position 0; needs 0..3"),
    ("Timeline", "start_s", -1.0, "Timeline.start_s: -1.0"),
    ("Timeline", "end_s", INF, "Timeline.end_s: inf"),
    ("Timeline", "start_s", 2.0, "a span ends before it starts"),
    ("Placement", "shortfall_bytes", -1, "Placement.shortfall_bytes: -1"),
    ("Placement", "peak_bytes", -1, "Placement.peak_bytes: -1"),
]  # fmt: skip

# noun, field, the whole value, words of the message
WHOLE = [
    ("Graph", "op_name", ["a", "b", "a", "c"], "duplicate op 'a'"),
    ("Graph", "op_name", [], "has 0 ops"),
    ("Graph", "op_kind", ["a"], "Graph.op_kind has 1 names, needs 4"),
    ("Graph", "module", [1, 2, 3, 4], "Graph.module holds something that is not text"),
    ("Graph", "use_tensor", [0, 0, 4], "'op3' uses a tensor of 'op3'"),
    ("Cluster", "device_name", ["a", "a"], "duplicate device 'a'"),
    ("Cluster", "device_name", [], "zero devices"),
    ("Cluster", "link_name", ["a"], "Cluster.link_name has 1 names, needs 2"),
    ("Cluster", "route", np.full((2, 2, 1), -1), "no route from device 'd0' to 'd1'"),
    ("Costs", "compute_s", [1.0, 2.0], r"Costs.compute_s has shape [2], needs [-1, -1]"),
    ("Costs", "compute_s", 3.0, "Costs.compute_s has shape []"),
    ("Costs", "issue_s", [1.0], "Costs.issue_s has shape [1], needs [4]"),
    ("Costs", "transfer_s", 1.0, "Costs.transfer_s has shape []"),
    ("Problem", "graph", "bert.json", "Problem.graph is a str; needs a Graph"),
    ("Problem", "cluster", None, "Problem.cluster is a NoneType; needs a Cluster"),
    ("Problem", "costs", 3.0, "Problem.costs is a float; needs a Costs"),
    ("Problem", "objective", "speed", "Problem.objective: 'speed' is none of step, throughput"),
    ("Problem", "links", "slow", "Problem.links: 'slow' is none of shared, parallel, half-duplex, host"),
    ("Problem", "split", None, "Problem.split: None is none of chain, convex, free"),
    ("Problem", "load", 3, "Problem.load: 3 is none of sum, max2, max3"),
    ("Problem", "pinned", [-1, -1, 1, -1], "ops 'op2' belong together but no device may run them all"),
    ("Problem", "pinned", [0, -1, -1, 1], "ops 'op0', 'op3' belong together but no device may run them all"),
    ("Plan", "device", 3, "Plan.device has shape []"),
    ("Plan", "priority", [1, 2], "Plan.priority has shape [2], needs [4]"),
    ("Plan", "pipeline", "1f1b", "Plan.pipeline is a str; needs a Pipeline or None"),
    ("Plan", "pipeline", dataclasses.replace(PIPELINE, stage=[0, 1]), "Plan.pipeline: stage has 2 ops"),
    ("Pipeline", "replicas", [], "Pipeline.replicas names 0 stages"),
    ("Pipeline", "num_microbatches", 0, "Pipeline.num_microbatches is 0"),
    ("Pipeline", "num_microbatches", 2.5, "Pipeline.num_microbatches is 2.5"),
    ("Pipeline", "schedule", None, "Pipeline.schedule is None"),
    ("Timeline", "peak_bytes", [1], "Timeline.peak_bytes has shape [1], needs [2]"),
    ("Placement", "problem", None, "Placement.problem is a NoneType"),
    ("Placement", "status", "splendid", "Placement.status: 'splendid' is none of optimal, feasible"),
    ("Placement", "status", Status.NOT_FOUND, "Placement.status is not_found, Placement.plan is there"),
    ("Placement", "plan", None, "Placement.status is feasible, Placement.plan is not there"),
    ("Placement", "score_s", None, "Placement.score_s is None"),
    ("Placement", "score_s", NAN, "Placement.score_s is nan"),
    ("Placement", "bound_s", -1.0, "Placement.bound_s is -1.0"),
    ("Placement", "bound_s", None, "Placement.bound_s is None"),
    ("Placement", "wall_s", INF, "Placement.wall_s is inf"),
]  # fmt: skip


class TestRules:
    @pytest.mark.parametrize(("name", "field", "value", "words"), FIRST)
    def test_a_value_outside_its_range_is_named(self, name: str, field: str, value: Any, words: str) -> None:
        assert words in refused(name, field, with_first(name, field, value))

    @pytest.mark.parametrize(("name", "field", "value", "words"), WHOLE)
    def test_a_field_that_does_not_belong_is_named(
        self, name: str, field: str, value: Any, words: str
    ) -> None:
        assert words in refused(name, field, value)

    def test_an_op_may_not_list_a_tensor_twice(self) -> None:
        with pytest.raises(InputError, match="same tensor twice"):
            dataclasses.replace(GRAPH, use_tensor=[0, 0, 1], use_op=[1, 1, 2])

    def test_costs_and_graph_must_be_of_one_size(self) -> None:
        costs = dataclasses.replace(PROBLEM.costs, compute_s=np.ones((4, 3)))
        with pytest.raises(InputError, match=r"Costs.compute_s has shape \[4, 3\].*2 device kinds"):
            dataclasses.replace(PROBLEM, costs=costs)
        costs = dataclasses.replace(PROBLEM.costs, transfer_s=[1.0])
        with pytest.raises(InputError, match=r"Costs.transfer_s has 1 tensors, the graph 5"):
            dataclasses.replace(PROBLEM, costs=costs)

    def test_an_op_that_runs_nowhere_is_named(self) -> None:
        costs = dataclasses.replace(PROBLEM.costs, compute_s=[[INF, INF], [1, 1], [1, 1], [1, 1]])
        with pytest.raises(InputError, match="op 'op0' can run on none of the 2 devices"):
            dataclasses.replace(PROBLEM, costs=costs)

    def test_an_infeasible_placement_needs_its_proof(self) -> None:
        fields = {"status": Status.INFEASIBLE, "plan": None, "score_s": None}
        with pytest.raises(InputError, match=r"Placement.proof is empty"):
            dataclasses.replace(PLACEMENT, **fields)
        assert not dataclasses.replace(PLACEMENT, proof="too large", **fields).fits

    def test_words_stand_for_their_members(self) -> None:
        problem = dataclasses.replace(PROBLEM, objective="throughput")
        assert problem.objective is Objective.THROUGHPUT
        assert dataclasses.replace(PLACEMENT, status="optimal", proof="seen").status is Status.OPTIMAL

    @pytest.mark.parametrize("seconds", [0.0, -1.0, NAN, INF, "1", True])
    def test_a_budget_of_seconds_is_a_positive_finite_number(self, seconds: Any) -> None:
        with pytest.raises(InputError, match="budget"):
            Budget(seconds=seconds)

    @pytest.mark.parametrize("count", [0, -3, 2.5, True, "7"])
    def test_a_budget_of_plans_is_a_positive_whole_number(self, count: Any) -> None:
        with pytest.raises(InputError, match="budget"):
            Budget(count=count)

    @pytest.mark.parametrize("given", [{}, {"seconds": 1.0, "count": 1}])
    def test_a_budget_is_seconds_or_plans(self, given: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="exactly one"):
            Budget(**given)

    @pytest.mark.parametrize(
        "text", ["", "x", "-1x", "0x", "1.5x", "ten", "nan", "inf", "-3", "9" * 30 + "x", "5 q"]
    )
    def test_a_text_that_is_no_budget_is_refused(self, text: str) -> None:
        with pytest.raises(InputError, match="budget"):
            parse_budget(text)

    def test_budgets_are_read_from_texts_and_numbers(self) -> None:
        assert parse_budget("2000x") == Budget(count=2000)
        assert parse_budget(" 5 x ") == Budget(count=5)
        assert parse_budget("1.5s") == parse_budget("1500ms") == parse_budget("1.5") == parse_budget(1.5)
        assert parse_budget(10).seconds == 10
        assert [str(parse_budget(text)) for text in ("10s", "7x")] == ["10s", "7x"]


class TestFrozenAndDigested:
    @pytest.mark.parametrize("name", NOUNS)
    def test_a_field_cannot_be_set(self, name: str) -> None:
        for field in dataclasses.fields(NOUNS[name]):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(NOUNS[name], field.name, None)
        with pytest.raises((AttributeError, TypeError)):
            NOUNS[name].no_such_field = 1

    @pytest.mark.parametrize("name", ["Graph", "Cluster"])
    def test_the_digest_leaves_the_name_out(self, name: str) -> None:
        renamed = dataclasses.replace(NOUNS[name], name="another")
        assert renamed.digest == NOUNS[name].digest

    def test_a_problem_is_the_same_whatever_its_parts_are_called(self) -> None:
        renamed = dataclasses.replace(PROBLEM, graph=dataclasses.replace(GRAPH, name="another"))
        assert renamed.digest == PROBLEM.digest

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            (name, field.name)
            for name in ("Graph", "Cluster", "Costs", "Problem", "Pipeline", "Plan", "Timeline")
            for field in dataclasses.fields(NOUNS[name])
            if field.name != "name" and (name, field.name) != ("Problem", "pipeline")  # needs others too
        ],
    )
    def test_the_digest_changes_with_any_other_field(self, name: str, field: str) -> None:
        noun = NOUNS[name]
        changed = dataclasses.replace(noun, **{field: other_value(name, field)})
        assert changed.digest != noun.digest
        assert dataclasses.replace(changed, **{field: getattr(noun, field)}).digest == noun.digest

    def test_neighbouring_names_do_not_run_together(self) -> None:
        ours = dataclasses.replace(GRAPH, op_kind=["ab", "c", "", ""])
        for kinds in (["a", "bc", "", ""], ["ab", "", "c", ""], ["ab\0", "c", "", ""], ["2:ab", "c", "", ""]):
            assert dataclasses.replace(GRAPH, op_kind=kinds).digest != ours.digest

    def test_a_placement_is_its_problem_plan_and_claims(self) -> None:
        later = dataclasses.replace(PLACEMENT, wall_s=9.0, algorithm="another")
        assert later.digest == PLACEMENT.digest
        assert dataclasses.replace(PLACEMENT, bound_s=1.0).digest != PLACEMENT.digest
        moved = dataclasses.replace(PLACEMENT, plan=plan_of(np.array([0, 1, 0, 0], dtype=np.int32)))
        assert moved.digest != PLACEMENT.digest

    def test_the_gap_is_how_far_the_score_is_above_the_bound(self) -> None:
        assert PLACEMENT.gap == 4.0 / 2.0 - 1.0
        assert dataclasses.replace(PLACEMENT, bound_s=0.0).gap is None


def test_costs_are_sized_by_their_rows() -> None:
    """Guards the samples above: a kind on which an op cannot run is infinity and is accepted."""
    assert isinstance(PROBLEM.costs, Costs)
    assert PROBLEM.costs.compute_s[2, 1] == INF

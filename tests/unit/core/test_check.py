"""check_plan: for each rule a minimal plan that breaks it and it alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.check import check_plan
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import NO_GROUP, Phase
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.simulator.events.engine import Dispatch, prepare
from tests.builders import chain, graph_of, host_cluster, loose_ops, plan_on, problem_of, star_cluster
from tests.conformance.problems import unequal_cluster

INF = float("inf")


def pair(**fields: Any) -> Problem:
    """Two ops on two equal devices of 10 bytes."""
    graph = fields.pop("graph", None) or loose_ops(2)
    return problem_of(graph, fields.pop("cluster", None) or star_cluster(2, memory=10), 1.0, **fields)


def broken(problem: Problem, device: list[int], priority: list[int] | None = None) -> tuple[str, str]:
    """Rule and message of the only violation."""
    found = check_plan(problem, plan_on(device, priority))
    assert len(found) == 1, found
    return found[0].rule, found[0].message


def test_a_plan_that_obeys_every_rule_breaks_none() -> None:
    graph = graph_of({"group": 4, "resident_bytes": 10, "makes": [0]}, {"group": 4, "uses": [0]}, {})
    problem = problem_of(graph, star_cluster(2, memory=10), 1.0, pinned=[1, 1, -1])
    assert check_plan(problem, plan_on([1, 1, 0], [0, 1, 2])) == []


def test_length() -> None:
    assert broken(pair(), [0, 0, 0]) == ("length", "the plan has 3 ops, the graph 2")


def test_length_of_an_empty_plan() -> None:
    assert broken(pair(), []) == ("length", "the plan has 0 ops, the graph 2")


def test_device() -> None:
    rule, message = broken(pair(), [0, 2])
    assert (rule, message) == ("device", "op 'op1' is on device 2, the cluster has 2")


def test_pinned() -> None:
    rule, message = broken(pair(pinned=[-1, 1]), [0, 0])
    assert (rule, message) == ("pinned", "op 'op1' is pinned to ref1 but is on ref0")


def test_group() -> None:
    rule, message = broken(pair(graph=graph_of({"group": 7}, {"group": 7})), [0, 1])
    assert rule == "group"
    assert message == "ops 'op0' and 'op1' belong together but are on ref0 and ref1"


def test_ops_of_no_group_belong_to_nobody() -> None:
    assert check_plan(pair(graph=graph_of({}, {})), plan_on([0, 1])) == []


def test_support() -> None:
    problem = problem_of(loose_ops(2), unequal_cluster(), [[1, 1], [1, INF]])
    assert broken(problem, [0, 1]) == ("support", "op 'op1' cannot run on d1")


def test_order() -> None:
    rule, message = broken(pair(graph=chain(2, 0)), [0, 0], [1, 0])
    assert rule == "order"
    assert "'op1' waits" in message
    with pytest.raises(PlanError, match="deadlock"):
        prepare(pair(graph=chain(2, 0))).run(plan_on([0, 0], [1, 0]), dispatch=Dispatch.IN_ORDER)


def test_an_order_against_the_edges_is_fine_on_two_engines() -> None:
    """op1 waits on its own device; nothing it holds up is needed by op0."""
    problem = pair(graph=chain(2, 0))
    assert check_plan(problem, plan_on([0, 1], [1, 0])) == []
    assert prepare(problem).run(plan_on([0, 1], [1, 0])).step_s == 2.0


def test_two_devices_of_one_engine_have_one_order() -> None:
    cluster = replace(star_cluster(2), engine=np.array([3, 3]))
    assert broken(pair(graph=chain(2, 0), cluster=cluster), [0, 1], [1, 0])[0] == "order"


def test_two_engines_that_wait_for_each_other() -> None:
    """a -> d and c -> b; the first engine has b before a, the second d before c."""
    graph = graph_of({"makes": [0]}, {"makes": [0]}, {"uses": [1]}, {"uses": [0]})  # a c b d
    rule, message = broken(problem_of(graph, star_cluster(2), 1.0), [0, 1, 0, 1], [2, 3, 0, 1])
    assert rule == "order"
    assert "deadlock" in message


def test_an_op_cannot_be_issued_before_what_it_uses() -> None:
    """One thread issues all ops in order: it has no tensor to hand to op1 yet."""
    rule, message = broken(pair(graph=chain(2, 0), issue_s=1.0), [0, 1], [1, 0])
    assert rule == "order"
    assert "'op1' is issued before op 'op0'" in message


def test_memory_at_the_end_of_the_step() -> None:
    graph = graph_of({"resident_bytes": 6}, {"makes": [{"num_bytes": 5, "keep": True}]})
    rule, message = broken(pair(graph=graph), [1, 1])
    assert (rule, message) == ("memory", "ref1 holds 11 B of 10 B")
    assert check_plan(pair(graph=graph), plan_on([0, 1])) == []


def test_peak_memory_needs_the_simulator() -> None:
    """Ten bytes and a workspace of one, both gone at the end."""
    problem = pair(graph=graph_of({"makes": [10], "workspace_bytes": 1}, {"uses": [0]}))
    assert check_plan(problem, plan_on([0, 0])) == []
    found = api.check_plan(problem, plan_on([0, 0]))
    assert [v.rule for v in found] == ["memory"]
    assert found[0].message == "ref0 needs 11 B but has 10 B (1 B short)"


def test_chain() -> None:
    problem = problem_of(
        chain(3),
        star_cluster(2),
        1.0,
        objective=Objective.THROUGHPUT,
        split=Split.CHAIN,
        links=Links.PARALLEL,
    )
    rule, message = broken(problem, [0, 1, 0])
    assert (rule, message) == (
        "chain",
        "devices ref0, ref1 feed each other in a cycle, which a chain does not allow",
    )


class TestBackwardOpsOfAChain:
    """f0 -> f1, then backward b1 -> x -> b0; b0 shares the class of f0, b1 that of f1, x may be alone."""

    def problem(self, *, group_of_x: int = NO_GROUP, split: Split = Split.CHAIN) -> Problem:
        graph = graph_of(
            {"group": 0, "makes": [0]},
            {"group": 1, "uses": [0], "makes": [0]},
            {"group": 1, "phase": Phase.BACKWARD, "uses": [1], "makes": [0]},
            {"group": group_of_x, "phase": Phase.BACKWARD, "uses": [2], "makes": [0]},
            {"group": 0, "phase": Phase.BACKWARD, "uses": [3]},
        )
        return problem_of(
            graph, star_cluster(3), 1.0, objective=Objective.THROUGHPUT, split=split, links=Links.PARALLEL
        )

    def test_a_class_of_backward_ops_alone_stands_between_its_neighbours(self) -> None:
        """The backward pass goes from the last stage to the first."""
        allowed = [x for x in range(3) if not check_plan(self.problem(), plan_on([0, 2, 2, x, 0]))]
        assert allowed == [0, 1, 2]
        together = self.problem(group_of_x=NO_GROUP)
        assert check_plan(together, plan_on([0, 0, 0, 0, 0])) == []
        rule, message = broken(together, [0, 0, 0, 1, 0])
        assert (rule, message) == (
            "chain",
            "devices ref0, ref1 feed each other in a cycle, which a chain does not allow",
        )

    def test_a_backward_op_with_a_forward_op_in_its_class_just_follows(self) -> None:
        """x shares the class of f1, so b0 and b1 decide nothing; the forward order holds."""
        assert check_plan(self.problem(group_of_x=1), plan_on([0, 1, 1, 1, 0])) == []
        assert check_plan(self.problem(group_of_x=0), plan_on([0, 1, 1, 0, 0])) == []

    def test_other_splits_have_no_such_order(self) -> None:
        for split in (Split.CONVEX, Split.FREE):
            assert check_plan(self.problem(split=split), plan_on([0, 0, 0, 1, 0])) == []


def test_convex() -> None:
    problem = problem_of(chain(3), host_cluster(1), 1.0, objective=Objective.THROUGHPUT, split=Split.CONVEX)
    assert broken(problem, [1, 0, 1]) == ("convex", "a path leaves d1 and returns at op 'op2'")


def test_every_broken_rule_is_named() -> None:
    graph = graph_of({"resident_bytes": 20, "group": 1, "makes": [0]}, {"group": 1, "uses": [0]})
    problem = problem_of(graph, unequal_cluster(10), [[1, INF], [1, 1]])
    assert [v.rule for v in check_plan(problem, plan_on([1, 0], [1, 0]))] == ["group", "support", "memory"]


def test_a_long_chain_is_checked_without_recursion() -> None:
    num = 20_000
    problem = problem_of(chain(num), star_cluster(2), 1.0, objective=Objective.THROUGHPUT, split=Split.CONVEX)
    device = [0] * (num // 2) + [1] * (num // 2)
    assert check_plan(problem, plan_on(device, list(range(num)))) == []
    backwards = check_plan(problem, plan_on(device, list(range(num))[::-1]))
    assert [v.rule for v in backwards] == ["order"]

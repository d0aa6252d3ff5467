"""Each plain placer on examples worked out by hand, the published graphs, and the published defects."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.check import check_plan
from loadmaster.core.graph import NO_GROUP, Phase
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.graph.build import GraphBuilder
from loadmaster.placers.placement_units import load_cargo
from loadmaster.placers.registry import list_algorithms, placer, why_not
from tests import reference
from tests.builders import (
    chain,
    cluster_of,
    diamond,
    graph_of,
    host_cluster,
    loose_ops,
    problem_of,
    star_cluster,
)
from tests.conformance.problems import pipeline, unequal_cluster
from tests.unit.public_graphs import THROUGHPUT, problem_from, throughput_input

INF = float("inf")
PLAIN = ("single_device", "round_robin", "fastest_device", "chain_balance")


def devices(problem: Problem, algorithm: str, budget: str = "200x") -> list[int]:
    return planned(problem, algorithm, budget).plan.device.tolist()  # type: ignore[union-attr]


def planned(problem: Problem, algorithm: str, budget: str = "200x") -> Placement:
    placement = api.plan(problem, algorithm=algorithm, budget=budget)
    assert placement.plan is not None, placement.proof or placement.shortfall_bytes
    return placement


def resident(*num_bytes: int, **fields: Any) -> Any:
    return graph_of(*({"resident_bytes": size} | fields for size in num_bytes))


class TestSingleDevice:
    def test_the_fastest_device_that_holds_everything(self) -> None:
        problem = problem_of(resident(10, 10), unequal_cluster([20, 20]), [[1, 2], [1, 2]])
        assert devices(problem, "single_device") == [0, 0]
        tight = problem_of(resident(10, 10), unequal_cluster([19, 20]), [[1, 2], [1, 2]])
        assert devices(tight, "single_device") == [1, 1]

    def test_the_sum_counts_not_the_op(self) -> None:
        problem = problem_of(chain(3), unequal_cluster(), [[1, 2], [1, 2], [9, 2]])
        assert devices(problem, "single_device") == [1, 1, 1]

    def test_an_op_it_cannot_run_goes_elsewhere(self) -> None:
        problem = problem_of(chain(3), unequal_cluster(), [[1, 9], [INF, 1], [1, 9]])
        assert devices(problem, "single_device") == [0, 1, 0]

    def test_the_least_overflow_is_told(self) -> None:
        problem = problem_of(resident(10, 10, 10), unequal_cluster([19, 25]), [[1, 2]] * 3)
        placement = api.plan(problem, algorithm="single_device", budget="9x")
        assert placement.status == Status.NOT_FOUND
        assert placement.shortfall_bytes.tolist() == [0, 5]


class TestRoundRobin:
    def test_ops_are_dealt_in_turn(self) -> None:
        assert devices(problem_of(loose_ops(5), star_cluster(3), 1.0), "round_robin") == [0, 1, 2, 0, 1]

    def test_a_full_device_is_passed_over(self) -> None:
        problem = problem_of(resident(10, 10, 10, 10), unequal_cluster([10, 30]), [[1, 1]] * 4)
        assert devices(problem, "round_robin") == [0, 1, 1, 1]

    def test_a_device_that_cannot_run_an_op_is_passed_over(self) -> None:
        problem = problem_of(loose_ops(4), unequal_cluster(), [[1, 1], [1, INF], [1, 1], [1, 1]])
        assert devices(problem, "round_robin") == [0, 0, 1, 0]

    def test_a_group_is_dealt_once(self) -> None:
        graph = graph_of({"group": 0}, {}, {"group": 0}, {})
        assert devices(problem_of(graph, star_cluster(2), 1.0), "round_robin") == [0, 1, 0, 0]

    def test_a_weight_rides_with_its_first_reader(self) -> None:
        weight = {"phase": Phase.PARAM, "makes": [5], "resident_bytes": 5}
        graph = graph_of(weight, weight, {}, {"uses": [1]}, {"uses": [0, 1]})
        problem = problem_of(graph, star_cluster(2), [0, 0, 1, 1, 1])
        assert devices(problem, "round_robin") == [0, 1, 0, 1, 0]


class TestFastestDevice:
    def test_each_op_goes_where_it_is_fastest(self) -> None:
        problem = problem_of(loose_ops(4), unequal_cluster(), [[1, 2], [2, 1], [1, 1], [INF, 9]])
        assert devices(problem, "fastest_device") == [0, 1, 0, 1]

    def test_a_full_device_gives_way_to_the_next_fastest(self) -> None:
        problem = problem_of(resident(10, 10, 10), unequal_cluster([25, 25]), [[1, 5]] * 3)
        assert devices(problem, "fastest_device") == [0, 0, 1]

    def test_what_is_gone_at_the_end_of_the_step_takes_room_all_the_same(self) -> None:
        """Eight activations of 10 bytes wait for their backward ops; each device holds five."""
        forward = [{"uses": [at - 1] if at else [], "makes": [10]} for at in range(8)]
        backward = [
            {"uses": sorted({7 - at, 7 + at}), "makes": [1], "phase": Phase.BACKWARD} for at in range(8)
        ]
        problem = problem_of(graph_of(*forward, *backward), unequal_cluster([60, 60]), [[1, 2]] * 16)
        placement = planned(problem, "fastest_device")
        assert (placement.peak_bytes <= 60).all()
        assert len(set(placement.plan.device.tolist())) == 2  # type: ignore[union-attr]


class TestChainBalance:
    def test_blocks_of_equal_time(self) -> None:
        problem = pipelined(problem_of(chain(6, 0), star_cluster(3), [4, 2, 2, 1, 1, 2]))
        placement = planned(problem, "chain_balance")
        assert placement.score_s == 4
        assert placement.status == Status.OPTIMAL  # 12 s of work on three devices
        assert placement.plan is not None
        assert placement.plan.device.tolist() == [0, 1, 1, 2, 2, 2]

    def test_a_fast_device_gets_a_larger_block(self) -> None:
        problem = pipelined(problem_of(chain(6, 0), unequal_cluster(), [[1, 2]] * 6))
        assert sorted(devices(problem, "chain_balance")) == [0, 0, 0, 0, 1, 1]

    def test_a_block_ends_where_memory_does(self) -> None:
        graph = graph_of(
            *({"uses": [at - 1] if at else [], "makes": [0], "resident_bytes": 10} for at in range(6))
        )
        problem = pipelined(problem_of(graph, unequal_cluster([20, 40]), [[1, 1]] * 6))
        assert sorted(devices(problem, "chain_balance")) == [0, 0, 1, 1, 1, 1]

    def test_transfers_through_host_memory_are_part_of_the_load(self) -> None:
        """Equal times would cut at the third edge, which costs 10 s to cross; the second costs 1 s."""
        problem = pipelined(
            problem_of(
                chain(6), host_cluster(2), [[1, 100]] * 6, links=Links.HOST, transfer_s=[9, 1, 10, 9, 9]
            )
        )
        placement = planned(problem, "chain_balance")
        assert placement.plan is not None
        assert placement.plan.device.tolist() == [0, 0, 1, 1, 1, 1]
        assert placement.score_s == 4 + 1

    def test_a_pinned_op_does_not_cut_a_step_in_two(self) -> None:
        """Only a pipeline has to stay a chain: the rest of the step goes around the pinned op."""
        graph = graph_of(*({"resident_bytes": 10} for _ in range(6)))
        problem = problem_of(graph, unequal_cluster([30, 30]), [[1, 1]] * 6, pinned=[-1, -1, 1, -1, -1, -1])
        assert planned(problem, "chain_balance").score_s == 3

    def test_a_pinned_op_takes_its_room_from_the_block_beside_it(self) -> None:
        graph = graph_of(*({"resident_bytes": 10} for _ in range(5)))
        problem = problem_of(graph, unequal_cluster([20, 30]), [[1, 1]] * 5, pinned=[-1, -1, 0, -1, -1])
        assert devices(problem, "chain_balance", "1x") == [0, 1, 0, 1, 1]  # at once, without a repair

    def test_an_op_that_few_can_run_does_not_keep_the_rest_from_the_others(self) -> None:
        problem = problem_of(
            loose_ops(6), unequal_cluster(), [[1, INF] if at == 3 else [1, 1] for at in range(6)]
        )
        assert planned(problem, "chain_balance").score_s == 3

    def test_a_chain_of_ops_that_one_kind_cannot_run(self) -> None:
        """The last device of the chain is the only one that can run the last op."""
        problem = pipelined(problem_of(chain(4, 0), unequal_cluster(), [[INF, 1], [1, 1], [1, 1], [1, 1]]))
        assert devices(problem, "chain_balance") == [1, 1, 0, 0]

    @pytest.mark.parametrize("name", THROUGHPUT)
    def test_a_public_graph_is_cut_near_its_best_chain(self, name: str) -> None:
        """The worst of the twelve is operator bert_l-6 inference, 5.6 % above the optimum."""
        problem = problem_from(throughput_input(name))
        placement = planned(problem, "chain_balance", "1000x")
        assert placement.plan is not None
        assert check_plan(problem, placement.plan) == []
        assert placement.score_s == pytest.approx(reference.throughput(problem, placement.plan), rel=1e-12)
        assert (1 - 1e-9) * THROUGHPUT[name].chain <= placement.score_s <= 1.06 * THROUGHPUT[name].chain

    @pytest.mark.parametrize("name", ["bert24_inference", "bert24_training"])
    def test_on_a_graph_that_is_a_chain_it_finds_the_optimum(self, name: str) -> None:
        problem = problem_from(throughput_input(f"LayerGraphs/{name}"))
        optimum = THROUGHPUT[f"LayerGraphs/{name}"].chain
        assert planned(problem, "chain_balance", "1000x").score_s == pytest.approx(optimum, rel=1e-9)


def pipelined(problem: Problem) -> Problem:
    return replace(problem, objective=Objective.THROUGHPUT, split=Split.CHAIN)


class TestBruteForce:
    def test_where_ops_are_issued_the_order_between_devices_counts(self) -> None:
        """
        second  0  1  2
        thread  a  a  .   op0 takes 2 s to issue, op1 none: op1 first, though each has a device of its own
        ref0    .  .  A
        ref1    B  B  B
        """
        problem = problem_of(loose_ops(2), star_cluster(2), [1, 3], issue_s=[2, 0])
        placement = planned(problem, "brute_force")
        assert (placement.status, placement.score_s) == (Status.OPTIMAL, 3)

    def test_every_order_of_every_assignment_is_tried_once(self) -> None:
        """Two loose ops on two devices: two orders where they share one, one where they do not."""
        placement = planned(problem_of(loose_ops(2), star_cluster(2), [2, 1]), "brute_force")
        assert placement.proof == "all 6 plans tried"


class TestAuto:
    def test_it_says_who_won_and_why_the_others_lost(self) -> None:
        placement = planned(pipeline(Split.FREE), "auto")
        reasons = {member.name: member.reason for member in placement.members}
        elsewhere = {"brute_force", "ideal_dp", "cpsat_latency"}  # an oracle, chains, steps
        elsewhere |= {"pipeline", "pipeline_by_speed", "pipeline_equal"}  # steps of micro-batches
        elsewhere |= {name for name, entry in list_algorithms().items() if entry.family == "learned"}
        assert {name.partition("(")[0] for name in reasons} == set(list_algorithms()) - {"auto", *elsewhere}
        assert list(reasons.values()).count("best") == 1
        assert reasons["chain_balance"] in ("best", "as good")
        assert reasons["round_robin"] == "46.5 s slower"  # 60 s against 13.5 s
        scores = [member.score_s for member in placement.members if member.score_s is not None]
        assert placement.score_s == min(scores)

    def test_it_stops_when_the_bound_is_reached(self) -> None:
        placement = planned(problem_of(chain(4), star_cluster(2), 1.0), "auto")
        assert placement.status == Status.OPTIMAL
        tried = [member.name for member in placement.members if member.status is not None]
        assert tried == ["single_device"]
        assert all("not tried" in m.reason for m in placement.members if m.name != "single_device")

    def test_one_that_does_not_fit_is_reported_with_what_it_lacks(self) -> None:
        problem = problem_of(resident(10, 10, 10), unequal_cluster([20, 20]), [[1, 2]] * 3)
        placement = planned(problem, "auto")
        reasons = {member.name: member.reason for member in placement.members}
        assert reasons["single_device"] in ("d0 lacks 10 B", "d1 lacks 10 B")


class TestCargo:
    """Units in the order in which placers fill devices."""

    def test_a_backward_op_alone_stands_beside_the_unit_it_feeds(self) -> None:
        forward = [{"uses": [at - 1] if at else [], "makes": [1], "group": at} for at in range(3)]
        alone = {"phase": Phase.BACKWARD, "uses": [2], "makes": [1]}
        grouped = {"phase": Phase.BACKWARD, "uses": [3], "group": 1}
        cargo = load_cargo(problem_of(graph_of(*forward, alone, grouped), star_cluster(2), 1.0))
        assert cargo.of_op.tolist() == [0, 1, 3, 2, 1]

    def test_units_that_feed_each_other_become_one_where_circles_are_barred(self) -> None:
        graph = graph_of(
            {"group": 0, "makes": [1]}, {"uses": [0], "makes": [1]}, {"group": 0, "uses": [1]}, {}
        )
        problem = problem_of(graph, star_cluster(2), 1.0)
        assert load_cargo(problem).of_op.tolist() == [0, 1, 0, 2]
        assert load_cargo(problem, acyclic=True).of_op.tolist() == [0, 0, 0, 1]

    def test_a_circle_that_no_device_may_run_stays_apart(self) -> None:
        """op1, pinned elsewhere, stands between the two halves of a pinned group."""
        graph = graph_of({"group": 0, "makes": [1]}, {"uses": [0], "makes": [1]}, {"group": 0, "uses": [1]})
        problem = problem_of(graph, star_cluster(2), 1.0, pinned=[0, 1, 0])
        assert load_cargo(problem, acyclic=True).of_op.tolist() == [0, 1, 0]
        for algorithm in PLAIN:
            assert devices(problem, algorithm) == [0, 1, 0]
        torn = api.plan(pipelined(problem), algorithm="chain_balance", budget="20x")
        assert torn.status == Status.NOT_FOUND
        assert "feed each other in a cycle" in torn.proof

    def test_weights_that_cannot_be_on_one_device_do_not_ride(self) -> None:
        """The reader may run on d0 and d1, one weight on d0 only, the other on d1 only."""
        weight = {"phase": Phase.PARAM, "makes": [1]}
        graph = graph_of(weight, weight, {"uses": [0, 1]})
        problem = problem_of(graph, unequal_cluster(), [[0, INF], [INF, 0], [1, 1]])
        assert (load_cargo(problem).fits.any(axis=1)).all()
        for algorithm in PLAIN:
            assert devices(problem, algorithm)[:2] == [0, 1]

    def test_a_unit_with_an_early_weight_waits_for_its_inputs(self) -> None:
        """The group of op0 and op3 has the earliest op, but uses what op1 and op2 make."""
        graph = graph_of({"group": 0}, {"makes": [1]}, {"uses": [0], "makes": [1]}, {"group": 0, "uses": [1]})
        cargo = load_cargo(problem_of(graph, star_cluster(2), 1.0), acyclic=True)
        assert cargo.of_op.tolist() == [2, 0, 1, 2]

    def test_bytes_of_a_unit(self) -> None:
        graph = graph_of(
            {
                "group": 0,
                "resident_bytes": 3,
                "makes": [5, {"num_bytes": 7, "keep": True}],
                "workspace_bytes": 2,
            },
            {"group": 0, "workspace_bytes": 4},
        )
        cargo = load_cargo(problem_of(graph, star_cluster(2), [1, 2]))
        assert cargo.held_bytes.tolist() == [3 + 7]
        assert cargo.made_bytes.tolist() == [3 + 7 + 5 + 4]
        assert cargo.seconds.tolist() == [[3, 3]]


class TestPublishedDefects:
    """What broke the published placers must not break ours."""

    @pytest.mark.parametrize("algorithm", PLAIN)
    def test_r1_zero_times_and_zero_bytes_are_values_like_any_other(self, algorithm: str) -> None:
        problem = problem_of(diamond(0), star_cluster(2), [0, 0, 1, 0])
        placement = planned(problem, algorithm)
        assert placement.score_s == 1.0
        everything = planned(problem_of(diamond(0), star_cluster(2), 0.0), algorithm)
        assert everything.score_s == 0.0
        assert everything.gap is None

    @pytest.mark.parametrize("family", ["fork_join", "rnn_grid", "layered", "many_source", "chain"])
    def test_r2_no_plan_exceeds_a_devices_memory(self, family: str) -> None:
        problem = api.problem(f"gen:{family}:100")
        found = 0
        for algorithm in PLAIN:
            plan = api.plan(problem, algorithm=algorithm, budget="50x").plan
            if plan is not None:
                found += 1
                replay = reference.simulate(problem, plan, dispatch="in_order", links=problem.links.value)
                assert (np.array(replay.peak_bytes) <= problem.cluster.memory_bytes).all()
        assert found >= 2  # memory is twice the need: more than one way must be found

    @pytest.mark.parametrize(
        "algorithm", ["single_device", "round_robin", "fastest_device", "chain_balance", "auto"]
    )
    def test_r18_a_long_chain_needs_no_recursion(self, algorithm: str) -> None:
        problem = problem_of(chain(5000, 1), star_cluster(4), 1.0)
        assert planned(problem, algorithm, "3x").score_s is not None

    def test_r18_a_long_pipeline_needs_no_recursion(self) -> None:
        problem = pipelined(problem_of(chain(5000, 1), host_cluster(4), [[1, 10]] * 5000, links=Links.HOST))
        placement = planned(problem, "chain_balance", "3x")
        assert placement.score_s is not None
        assert placement.score_s <= 1.01 * placement.bound_s

    @pytest.mark.parametrize("algorithm", PLAIN)
    def test_r21_a_data_edge_and_a_control_edge_between_two_ops(self, algorithm: str) -> None:
        builder = GraphBuilder("two edges")
        first, second = builder.op("first"), builder.op("second")
        for num_bytes in (4, 0):
            builder.use(builder.tensor(first, num_bytes), second)
        placement = planned(problem_of(builder.build(), star_cluster(2), 1.0), algorithm)
        assert placement.plan is not None
        apart = len(set(placement.plan.device.tolist())) == 2
        assert placement.score_s == (1 + 4 + 1 if apart else 2)

    def test_r9_groups_and_pins_hold_on_random_problems(self) -> None:
        rng = np.random.default_rng(7)
        for _ in range(5):
            problem = scattered(rng)
            for algorithm in list_algorithms():
                if not why_not(placer(algorithm), problem):
                    placement = api.plan(problem, algorithm=algorithm, budget="20x")
                    plan = placement.plan or placement.least_overflow_plan
                    assert plan is not None
                    assert not {v.rule for v in check_plan(problem, plan)} & {
                        "group",
                        "pinned",
                        "support",
                        "order",
                    }


def scattered(rng: np.random.Generator) -> Problem:
    """Twenty ops in random groups, some pinned, some that one kind cannot run."""
    builder = GraphBuilder("scattered")
    for op in range(20):
        builder.op(
            f"op{op}",
            group=int(rng.choice([NO_GROUP, NO_GROUP, 0, 1, 2])),
            resident_bytes=int(rng.integers(9)),
        )
        for earlier in rng.integers(0, max(op, 1), size=2).tolist() if op else []:
            builder.use(builder.tensor(earlier, int(rng.integers(4))), op)
    graph = builder.build()
    seconds = rng.uniform(0.1, 1.0, (20, 2))
    seconds[(rng.random(20) < 0.2) & (graph.group == NO_GROUP), 1] = INF
    pinned = np.where((graph.group == NO_GROUP) & (rng.random(20) < 0.2), 0, -1)
    routes = {(i, j): [0] for i in range(3) for j in range(3) if i != j}
    cluster = cluster_of(routes, kind=[0, 1, 1], on_host=(False, False), memory=60)
    return problem_of(graph, cluster, seconds, pinned=pinned)

"""List scheduling by hand: published schedules, and small cases worked out on paper."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from loadmaster import api
from loadmaster.core.arrays import Ints
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Status
from loadmaster.core.problem import Links, Problem
from loadmaster.placers.heuristic import cpop
from loadmaster.placers.heuristic._insert_kernel import insert_ops, ready_order
from loadmaster.placers.heuristic._list_kernel import NOWHERE, PUBLISHED, WAITING
from loadmaster.placers.heuristic._lists import Lists, load_lists
from loadmaster.placers.heuristic.heft import plan_by_insertion
from loadmaster.placers.heuristic.m_topo import fill_devices
from loadmaster.placers.placement_units import load_cargo
from loadmaster.placers.registry import placer
from loadmaster.simulator.events.engine import prepare
from loadmaster.simulator.events.kernel import HALF_DUPLEX, PARALLEL
from tests import reference
from tests.builders import (
    arrows,
    chain,
    cluster_of,
    diamond,
    fan_out,
    graph_of,
    instance_a,
    instance_b,
    instance_c,
    instance_d,
    loose_ops,
    problem_of,
    star_cluster,
    tpds_example,
)
from tests.conformance.problems import unequal_cluster
from tests.oracle import best_of_all

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BUDGET = "500x"


def planned_s(problem: Problem, algorithm: str) -> float | None:
    return api.plan(problem, algorithm=algorithm, budget=BUDGET).score_s


def devices(problem: Problem, algorithm: str) -> list[int]:
    plan = api.plan(problem, algorithm=algorithm, budget=BUDGET).plan
    assert plan is not None
    return [int(device) for device in plan.device]


def nowhere(lists: Lists) -> Ints:
    return np.full(lists.problem.graph.num_ops, NOWHERE, dtype=np.int32)


class TestPublishedInstances:
    """Instances A to D, and the worked example of the paper that HEFT and CPOP come from."""

    def test_a_memory_that_is_filled_to_the_last_byte(self) -> None:
        """The greedy run, with 4 bytes on each device.

        d0  |0|  1  |       |5|        op 2 becomes ready at 4, but d0 holds 3 bytes and op 2 two: d1, at 5
        d1    ..|  4  |  2  |3|        op 5 may go to either: it comes to d0 at 6; op 3 starts at 8
            0 1 2     5   6 7 8 9
        """
        problem = instance_a()
        best = best_of_all(problem)
        assert (best.fitting_s, best.any_s) == (9.0, 8.0)
        for algorithm in ("m_etf", "m_sct", "heft", "cpop", "refine", "auto"):
            placement = api.plan(problem, algorithm=algorithm, budget=BUDGET)
            assert placement.score_s == 9.0, algorithm
            assert placement.peak_bytes.tolist() == [4, 4]
        plan = load_lists(problem).placed(np.arange(6.0), PARALLEL)
        by_name = dict(zip(problem.graph.op_name, plan.device.tolist(), strict=True))
        assert by_name == {"op0": 0, "op1": 0, "op4": 1, "op2": 1, "op5": 0, "op3": 1}

    def test_b_greedy_takes_14_where_the_best_takes_13(self) -> None:
        """Greedy gives op 3 to d1 at 4, so that op 2 has to wait for the transfer of op 1 to d0: 7 + 7."""
        problem = instance_b()
        assert best_of_all(problem).fitting_s == 13.0
        assert planned_s(problem, "m_etf") == 14.0
        for algorithm in ("heft", "cpop", "refine", "auto"):
            assert planned_s(problem, algorithm) == 13.0, algorithm

    def test_c_list_scheduling_finds_the_best(self) -> None:
        """22: ops 0 and 1 end at 9, op 4 at 15 and op 3 at 14; op 2 runs from 12 or 14, op 5 to 19."""
        problem = instance_c()
        for algorithm in ("m_etf", "m_sct", "refine", "auto"):
            assert planned_s(problem, algorithm) == 22.0, algorithm

    @pytest.mark.parametrize(("num_devices", "best_s"), [(3, 29.0), (4, 26.0)])
    def test_d_reaches_the_best_known(self, num_devices: int, best_s: float) -> None:
        problem = instance_d(num_devices)
        assert planned_s(problem, "m_sct") == best_s
        assert planned_s(problem, "auto") == best_s

    def test_upward_ranks_are_those_of_the_paper(self) -> None:
        lists = load_lists(tpds_example())
        up, down = lists.compute_upward_rank(transfers=True), lists.compute_downward_rank(transfers=True)
        thirds = [324, 231, 240, 240, 207, 190, 128, 107, 133, 44]
        assert up * 3 == pytest.approx(thirds)
        assert (up + down)[[0, 1, 8, 9]] == pytest.approx(108)  # the critical path of the paper
        assert (up + down)[[2, 3, 4, 6]] == pytest.approx([105, 102, 93, 105])

    def test_heft_gives_the_schedule_of_the_paper(self) -> None:
        """80: published as task: processor, start - 1: P3 0, 2: P1 27, 3: P3 9, 4: P2 18, 5: P3 28, 6: P2 26,
        7: P3 38, 8: P1 57, 9: P2 56, 10: P2 73. Tasks 3 and 4 are equal in rank.
        """
        problem = tpds_example()
        lists = load_lists(problem)
        order = np.array([1, 3, 4, 2, 5, 6, 9, 7, 8, 10], dtype=np.int32) - 1
        device, start = insert_ops(lists.fixed, lists.rules(None, PARALLEL), order, nowhere(lists))
        assert device.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
        assert start.tolist() == [0, 27, 9, 18, 28, 26, 38, 57, 56, 73]
        plan = plan_by_insertion(lists, order, nowhere(lists))
        replay = reference.simulate(problem, plan, dispatch="in_order", links="parallel")
        assert replay.op_start == start.tolist()
        assert replay.step_s == 80.0
        assert planned_s(problem, "heft") == 80.0

    def test_cpop_gives_the_schedule_of_the_paper(self) -> None:
        """86: tasks 1, 2, 9, 10 on the second processor, 54 s; 85 s with the third, which the paper skips."""
        problem = tpds_example()
        lists = load_lists(problem)
        rank = lists.compute_upward_rank(transfers=True) + lists.compute_downward_rank(transfers=True)
        path = cpop.critical_path(lists, rank)
        assert path.tolist() == [0, 1, 8, 9]
        wanted = nowhere(lists)
        wanted[path] = 1
        plan = plan_by_insertion(lists, ready_order(lists.fixed, -rank), wanted)
        assert plan.device[path].tolist() == [1, 1, 1, 1]
        assert reference.simulate(problem, plan, dispatch="in_order", links="parallel").step_s == 86.0
        assert planned_s(problem, "cpop") == 85.0


class TestMTopo:
    """The current device up to its share of the bytes plus the largest unit, then the next."""

    def test_devices_are_filled_one_after_the_other(self) -> None:
        """Six ops of 2 bytes on three devices: the cap is 12 / 3 + 2 = 6 bytes, three ops; the third stays
        empty, as published.
        """
        graph = graph_of(*({"resident_bytes": 2} for _ in range(6)))
        assert devices(problem_of(graph, star_cluster(3, memory=100), 1.0), "m_topo") == [0, 0, 0, 1, 1, 1]

    def test_shares_follow_memory(self) -> None:
        """12 bytes on devices of 30 and 10: caps 9 + 2 and 3 + 2."""
        graph = graph_of(*({"resident_bytes": 2} for _ in range(6)))
        cargo = load_cargo(problem_of(graph, star_cluster(2), 1.0))
        found = fill_devices(cargo, cargo.held_bytes, np.array([30.0, 10.0]))
        assert found.tolist() == [0, 0, 0, 0, 0, 1]

    def test_a_cap_is_never_above_what_a_device_has(self) -> None:
        """The published cap would be 16 / 2 + 5 = 13 bytes of the 8 there are."""
        graph = graph_of(*({"resident_bytes": size} for size in (5, 3, 5, 3)))
        problem = problem_of(graph, star_cluster(2, memory=8), 1.0)
        assert devices(problem, "m_topo") == [0, 0, 1, 1]

    def test_what_cannot_run_there_or_has_no_room_goes_where_most_is_left(self) -> None:
        graph = graph_of(*({"resident_bytes": 2} for _ in range(4)))
        seconds = [[1, 1], [math.inf, 1], [1, 1], [1, 1]]
        assert devices(problem_of(graph, unequal_cluster(100), seconds), "m_topo") == [0, 1, 0, 0]

    def test_a_group_is_filled_in_as_one(self) -> None:
        graph = graph_of(
            *({"resident_bytes": 2, "group": 0 if op in (0, 3) else op} for op in range(4)),
        )
        cargo = load_cargo(problem_of(graph, star_cluster(2, memory=100), 1.0))
        assert fill_devices(cargo, cargo.held_bytes, np.array([4.0, 4.0]))[cargo.of_op].tolist() == [
            0,
            1,
            1,
            0,
        ]

    def test_without_any_bytes_everything_is_on_the_first_device(self) -> None:
        assert devices(problem_of(loose_ops(3), star_cluster(2), 1.0), "m_topo") == [0, 0, 0]


class TestMEtf:
    """Whatever can start now, best key first."""

    def test_loose_ops_are_spread_over_idle_devices(self) -> None:
        """3, 3, 2 and 2 s: by number the third follows the first, 3 + 2; there is no better plan."""
        problem = problem_of(loose_ops(4), star_cluster(2), [3, 3, 2, 2])
        placement = api.plan(problem, algorithm="m_etf", budget=BUDGET)
        assert (placement.score_s, placement.status) == (5.0, Status.OPTIMAL)
        plan = load_lists(problem).placed(np.arange(4.0), PARALLEL)
        assert (plan.device.tolist(), plan.priority.tolist()) == ([0, 1, 0, 1], [0, 1, 2, 3])

    def test_a_chain_stays_where_it_is(self) -> None:
        """The next device would have to wait for the transfer."""
        assert devices(problem_of(chain(5, 1), star_cluster(3), 1.0), "m_etf") == [0] * 5

    def test_a_branch_goes_elsewhere_once_its_input_is_there(self) -> None:
        """left runs on d0 from 1 to 5, right on d1 from 2 to 6, bottom there from 6: left is sent by then."""
        problem = problem_of(diamond(1), star_cluster(2), [1, 4, 4, 1])
        plan = load_lists(problem).placed(np.arange(4.0), PARALLEL)
        assert plan.device.tolist() == [0, 0, 1, 1]
        assert planned_s(problem, "m_etf") == 7.0 == best_of_all(problem).fitting_s

    def test_of_two_idle_devices_the_one_that_finishes_first_is_taken(self) -> None:
        """Where published placers take the device with the least number."""
        problem = problem_of(loose_ops(1), unequal_cluster(), [[3, 2]])
        assert load_lists(problem).placed(np.zeros(1), PARALLEL).device.tolist() == [1]

    def test_of_equal_finishes_the_device_that_has_had_the_input_longer_is_taken(self) -> None:
        """op 0 feeds op 1, both on d2 until 3, and op 2. At 3 its tensor has just come to d0 and d1."""
        problem = arrows([1, 2, 1], {(0, 1): 2.0, (0, 2): 2.0}, star_cluster(3))
        problem = replace(problem, pinned=np.array([2, 2, -1], dtype=np.int32))
        assert load_lists(problem).placed(np.arange(3.0), PARALLEL).device.tolist() == [2, 2, 2]

    def test_the_key_decides_among_ready_ops(self) -> None:
        problem = problem_of(loose_ops(3), star_cluster(1), 1.0)
        plan = load_lists(problem).placed(np.array([2.0, 0.0, 1.0]), PARALLEL)
        assert plan.priority.tolist() == [2, 0, 1]

    def test_without_a_key_the_first_to_become_ready_is_first(self) -> None:
        """op 3 becomes ready at 2 and op 2 at 3, both for d0, which is busy until 3."""
        problem = arrows([3, 2, 1, 1], {(0, 2): 0.0, (1, 3): 0.0}, star_cluster(2))
        pinned = replace(problem, pinned=np.array([0, 1, 0, 0], dtype=np.int32))
        lists = load_lists(pinned)
        first_come = lists.placed(None, PARALLEL).priority
        assert first_come[3] < first_come[2]
        by_number = lists.placed(np.arange(4.0), PARALLEL).priority
        assert by_number[2] < by_number[3]

    def test_a_full_device_is_passed_over(self) -> None:
        """The fast device holds two of three ops."""
        graph = graph_of(*({"resident_bytes": 5} for _ in range(3)))
        problem = problem_of(graph, unequal_cluster([10, 10]), [[1, 9]] * 3)
        plan = load_lists(problem).placed(np.arange(3.0), PARALLEL)
        assert sorted(plan.device.tolist()) == [0, 0, 1]
        assert planned_s(problem, "m_etf") == 9.0

    def test_first_come_scores_no_order_of_its_own(self) -> None:
        """Both first ops are pinned to d0 and ready at 0. First come first served the short one goes first,
        and op 2 on d1 starts at 1 + 4; by rank it starts at 4.
        """
        problem = arrows([1, 4, 4], {(1, 2): 0.0}, star_cluster(2))
        problem = replace(problem, pinned=np.array([0, 0, 1], dtype=np.int32))
        assert api.plan(problem, algorithm="m_etf", budget=BUDGET).score_s == 8.0
        assert api.plan(problem, algorithm=placer("m_etf", first_come=True), budget=BUDGET).score_s == 9.0
        assert api.plan(problem, algorithm=placer("m_sct", first_come=True), budget=BUDGET).score_s == 9.0


class TestMSct:
    """Favourite children, and devices that wait for them."""

    def test_a_device_waits_for_a_favourite_whose_other_parent_still_runs(self) -> None:
        """op 2 can start at 6.5 on d1, the device of op 1, and at 7 elsewhere. From 4 on d1
        could run op 3, for 9 s. Awake it leaves that to d2 and waits; asleep it takes it.
        """
        problem = arrows([6, 4, 7, 9], {(0, 2): 0.5, (1, 2): 3.0, (1, 3): 0.0}, star_cluster(3))
        lists = load_lists(problem)
        favourite = np.array([NOWHERE, 2, NOWHERE, NOWHERE], dtype=np.int32)
        awake = lists.placed(np.arange(4.0), PARALLEL, favourite=favourite, awake=WAITING)
        assert awake.device.tolist() == [0, 1, 1, 2]
        asleep = lists.placed(np.arange(4.0), PARALLEL)
        assert asleep.device.tolist() == [0, 1, 0, 1]

    def test_a_device_gives_up_when_the_transfer_it_would_save_is_over(self) -> None:
        """d1 waits for op 2 until 6, but op 0 runs until 9: op 3 has its turn on d1, op 2 stays on d0."""
        problem = arrows([9, 4, 7, 1], {(0, 2): 5.0, (1, 2): 2.0, (1, 3): 9.0}, star_cluster(2))
        lists = load_lists(problem)
        favourite = np.array([NOWHERE, 2, NOWHERE, NOWHERE], dtype=np.int32)
        plan = lists.placed(np.arange(4.0), PARALLEL, favourite=favourite, awake=WAITING)
        assert plan.device.tolist() == [0, 1, 0, 1]
        assert plan.priority[3] < plan.priority[2]

    def test_the_published_rule_does_not_wait_while_a_parent_runs(self) -> None:
        lists = load_lists(instance_b())
        favourite = np.array([NOWHERE, 2, NOWHERE, NOWHERE], dtype=np.int32)
        plan = lists.placed(np.arange(4.0), PARALLEL, favourite=favourite, awake=PUBLISHED)
        assert plan.device.tolist() == [0, 1, 0, 1]

    def test_a_chain_is_optimal_and_says_so(self) -> None:
        placement = api.plan(problem_of(chain(5, 1), star_cluster(2), 1.0), algorithm="m_sct", budget=BUDGET)
        assert (placement.score_s, placement.status) == (5.0, Status.OPTIMAL)

    def test_the_bound_of_the_programme_is_reported_where_it_is_the_best(self) -> None:
        """Only one of two children can follow at once: 2.5 s. The longest way is 2 s, the work 3 / 2."""
        problem = arrows([1, 1, 1], {(0, 1): 1.0, (0, 2): 1.0}, star_cluster(2))
        placement = api.plan(problem, algorithm="m_sct", budget=BUDGET)
        assert placement.score_s == 3.0 == best_of_all(problem).fitting_s
        assert placement.bound_name == "small communication"
        assert placement.bound_s == pytest.approx(2.5)

    @pytest.mark.parametrize("seed", range(6))
    def test_it_is_never_worse_than_m_etf(self, seed: int) -> None:
        problem = api.problem(f"gen:fork_join:60:{seed}")
        sct, etf = planned_s(problem, "m_sct"), planned_s(problem, "m_etf")
        assert sct is not None
        assert etf is not None
        assert sct <= etf


class TestHeft:
    """Ops by rank, each into the gap where it finishes first."""

    def test_a_short_op_goes_into_the_gap_while_a_device_waits(self) -> None:
        """d0 waits from 2 to 5 for the transfer of op 1; op 3 (3 s, the last by rank) fills that gap."""
        problem = arrows([2, 4, 6, 3], {(0, 2): 9.0, (1, 2): 1.0}, star_cluster(2))
        lists = load_lists(problem)
        device, start = insert_ops(
            lists.fixed,
            lists.rules(None, PARALLEL),
            np.array([0, 1, 2, 3], dtype=np.int32),
            np.array([0, 1, 0, NOWHERE], dtype=np.int32),
        )
        assert (device.tolist(), start.tolist()) == ([0, 1, 0, 0], [0, 0, 5, 2])

    def test_unequal_devices_get_what_they_finish_first(self) -> None:
        """4 s and 5 s: the second op finishes at 5 on the slow device, the third at 8 on the fast one."""
        problem = problem_of(loose_ops(3), unequal_cluster(), [[4, 5]] * 3)
        assert devices(problem, "heft") == [0, 1, 0]
        assert planned_s(problem, "heft") == 8.0 == best_of_all(problem).fitting_s


class TestCpop:
    """The critical path on one device."""

    def test_the_path_is_on_the_device_that_runs_it_fastest(self) -> None:
        """The diamond's longer side: top, right, bottom take 1 + 6 + 1 on d1 and 2 + 12 + 2 on d0."""
        problem = problem_of(diamond(1), unequal_cluster(), [[2, 1], [4, 2], [12, 6], [2, 1]])
        lists = load_lists(problem)
        rank = lists.compute_upward_rank(transfers=True) + lists.compute_downward_rank(transfers=True)
        assert cpop.critical_path(lists, rank).tolist() == [0, 2, 3]
        found = devices(problem, "cpop")
        assert [found[op] for op in (0, 2, 3)] == [1, 1, 1]
        assert planned_s(problem, "cpop") == 8.0 == best_of_all(problem).fitting_s

    def test_a_path_that_one_device_cannot_run_whole(self) -> None:
        """Only d1 runs op 1 and only d0 the rest: nothing raises, and the only plan is found."""
        problem = problem_of(chain(3, 1), unequal_cluster(), [[1, math.inf], [math.inf, 1], [1, math.inf]])
        assert devices(problem, "cpop") == [0, 1, 0]


class TestMemoryWhilePlacing:
    """What a unit holds when the forward pass is over, and copies of it, counted once."""

    def test_what_is_kept_or_saved_for_backward_stands(self) -> None:
        graph = graph_of(
            {"phase": Phase.PARAM, "resident_bytes": 8, "makes": [4]},
            {"uses": [0], "makes": [16, {"num_bytes": 32, "keep": True}]},
            {"uses": [1, 2], "makes": [64]},
            {"phase": Phase.BACKWARD, "uses": [1, 3], "mirror": 1, "makes": [128]},
        )
        lists = load_lists(problem_of(graph, star_cluster(2), [0, 1, 1, 1]))
        # tensor 3 (64) is made in the forward pass and read by the backward op; 4 (128) is backward's own
        assert lists.standing.tolist() == [False, True, True, True, False]
        held = [lists.footprint[unit] for unit in lists.cargo.of_op.tolist()]
        assert held == [8 + 16 + 32, 8 + 16 + 32, 64, 0]  # the parameter rides with its reader

    def test_workspace_is_kept_free_on_every_device(self) -> None:
        graph = graph_of({"workspace_bytes": 3}, {"workspace_bytes": 7})
        cluster = cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 0], memory=[20, 40], reserve=[1, 2])
        assert load_lists(problem_of(graph, cluster, 1.0)).room_bytes.tolist() == [20 - 1 - 7, 40 - 2 - 7]

    def test_a_view_and_an_uncounted_tensor_hold_nothing(self) -> None:
        graph = graph_of(
            {"makes": [{"num_bytes": 8, "keep": True}]},
            {"uses": [0], "makes": [{"num_bytes": 8, "keep": True, "storage": 0}]},
            {"uses": [1], "makes": [{"num_bytes": 5, "keep": True, "storage": -1}]},
        )
        lists = load_lists(problem_of(graph, star_cluster(2), 1.0))
        assert lists.footprint.tolist() == [8, 0, 0]


class TestRanks:
    """Longest ways, by networkx."""

    def test_means_are_over_the_devices_an_op_may_use(self) -> None:
        problem = problem_of(loose_ops(2), unequal_cluster(), [[1, 3], [math.inf, 5]], pinned=[-1, -1])
        assert load_lists(problem).mean_s.tolist() == [2, 5]
        pinned = replace(problem, pinned=np.array([1, -1], dtype=np.int32))
        assert load_lists(pinned).mean_s.tolist() == [3, 5]

    def test_transfers_are_the_mean_over_pairs_or_as_given(self) -> None:
        """8 bytes at 2 and at 4 bytes per second, after 1 s: 5 and 3; the other tensor is given."""
        graph = graph_of({"makes": [8, 8]}, {"uses": [0, 1]})
        cluster = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 0], rate=[2.0, 4.0], latency=1.0)
        problem = problem_of(graph, cluster, 1.0, transfer_s=[-1.0, 7.0])
        assert load_lists(problem).transfer_s.tolist() == [4, 7]

    def test_one_device_has_no_transfers(self) -> None:
        assert load_lists(problem_of(chain(2, 8), star_cluster(1), 1.0)).transfer_s.tolist() == [0]


class TestContendedLinks:
    """A pass may see transfers that wait for each other."""

    def test_a_tensor_for_many_is_sent_one_device_after_the_other(self) -> None:
        """One reader stays with the source, whose port sends to d1 from 1 to 3 and to d2 from 3 to 5."""
        problem = problem_of(fan_out(3, 2), star_cluster(3), [1, 5, 4, 4], links=Links.HALF_DUPLEX)
        plan = load_lists(problem).placed(np.arange(4.0), HALF_DUPLEX)
        assert plan.device.tolist() == [0, 0, 1, 2]
        assert prepare(problem).score(plan).time_s == 9.0

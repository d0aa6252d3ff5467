"""Memory-first placement: nearly full memory on every generator, and by hand."""

import math
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.cluster import star
from loadmaster.core.graph import NO_GROUP, Graph, held_bytes
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Problem
from loadmaster.graph import generate
from loadmaster.placers.heuristic._packing import best_fit, order_depth_first
from tests import reference
from tests.builders import graph_of, loose_ops, problem_of, star_cluster
from tests.conformance.problems import unequal_cluster

FAMILIES = ("chain", "diamond", "fork_join", "rnn_grid", "layered", "many_source")
FACTORS = (1.02, 1.05, 1.1, 1.2)
EQUAL = (0.25, 0.25, 0.25, 0.25)
UNEQUAL = (0.4, 0.3, 0.2, 0.1)
# No plan fits these at 1.02: layered by a linear programme (tests/properties/test_feasibility.py), rnn_grid
# because ops of 5 MiB in 377.4 MiB leave 7 MiB for the 8 tensors that enter a part of the grid.
IMPOSSIBLE = {("layered", 300), ("rnn_grid", 300)}


def tight(family: str, num_ops: int, factor: float, shares: tuple[float, ...] = EQUAL) -> Problem:
    """A generated graph, all of it kept, on devices that share `factor` times what it holds."""
    graph = generate.FAMILIES[family](num_ops, 0)
    need = int(held_bytes(graph).sum())
    cluster = star(
        "tight",
        memory_bytes=[math.floor(factor * need * share) for share in shares],
        bytes_per_s=1.0 / (generate.US_PER_BYTE * 1e-6),
        latency_s=generate.US_PER_TRANSFER * 1e-6,
    )
    costs = generate.with_benchmark_cluster(graph).costs
    assert costs is not None
    return problem_of(graph, cluster, costs.compute_s, transfer_s=costs.transfer_s)


def placed(problem: Problem, **options: Any) -> Placement:
    return api.plan(problem, algorithm="memory_first", **({"budget": "500x"} | options))


def assert_fits(problem: Problem, placement: Placement) -> None:
    """By the peaks of the reference simulator."""
    assert placement.plan is not None, (placement.status, placement.shortfall_bytes)
    run = reference.simulate(problem, placement.plan, dispatch="in_order", links=problem.links.value)
    usable = (problem.cluster.memory_bytes - problem.cluster.reserve_bytes).tolist()
    assert all(peak <= room for peak, room in zip(run.peak_bytes, usable, strict=True))


class TestNearlyFull:
    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_of_300_ops_fits(self, family: str, factor: float) -> None:
        if factor == min(FACTORS) and (family, 300) in IMPOSSIBLE:
            return
        problem = tight(family, 300, factor)
        assert_fits(problem, placed(problem))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_of_1000_ops_fits_at_2_percent(self, family: str) -> None:
        problem = tight(family, 1000, 1.02)
        assert_fits(problem, placed(problem))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_unequal_devices_fit_at_5_percent(self, family: str) -> None:
        problem = tight(family, 300, 1.05, UNEQUAL)
        assert_fits(problem, placed(problem))

    def test_many_devices(self) -> None:
        problem = tight("fork_join", 1000, 1.1, (1 / 16,) * 16)
        assert_fits(problem, placed(problem))

    @pytest.mark.slow
    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize("num_ops", [5000, 10000])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_large_graphs_fit(self, family: str, num_ops: int, factor: float) -> None:
        problem = tight(family, num_ops, factor)
        assert_fits(problem, placed(problem))


class TestByHand:
    def test_large_units_first_leave_gaps_for_small_ones(self) -> None:
        """7 + 3, 6 + 4 and 5 + 5 fill three devices of 10 to the byte."""
        problem = problem_of(resident(3, 4, 5, 5, 6, 7), star_cluster(3, memory=10), 1.0)
        placement = placed(problem)
        assert_fits(problem, placement)
        assert placement.peak_bytes.tolist() == [10, 10, 10]

    def test_groups_stay_together(self) -> None:
        graph = graph_of(*({"resident_bytes": 5, "group": at % 4} for at in range(8)))
        problem = problem_of(graph, star_cluster(2, memory=20), 1.0)
        placement = placed(problem)
        assert_fits(problem, placement)
        assert placement.plan is not None
        device, group = placement.plan.device, problem.graph.group
        assert all(len(set(device[group == g].tolist())) == 1 for g in set(group.tolist()) - {NO_GROUP})

    def test_pins_and_support_are_kept(self) -> None:
        seconds = [[1, 1], [float("inf"), 1], [1, 1], [1, float("inf")]]
        problem = problem_of(resident(5, 5, 5, 5), unequal_cluster([10, 10]), seconds, pinned=[1, -1, -1, -1])
        placement = placed(problem)
        assert_fits(problem, placement)
        assert placement.plan is not None
        assert placement.plan.device.tolist() == [1, 1, 0, 0]

    def test_what_lies_between_copies_is_cut_where_least_is_copied(self) -> None:
        """Two clusters of ops around big tensors, one small tensor between them; 1 byte to spare."""
        graph = graph_of(
            {"makes": [kept(10)]},
            {"uses": [0], "makes": [kept(10)]},
            {"uses": [0, 1], "makes": [kept(1)]},
            {"uses": [2], "makes": [kept(10)]},
            {"uses": [3], "makes": [kept(9)]},
        )
        problem = problem_of(graph, star_cluster(2, memory=21), 1.0)
        placement = placed(problem)
        assert_fits(problem, placement)
        assert placement.plan is not None
        assert len(set(placement.plan.device[:3].tolist())) == 1
        assert sorted(placement.peak_bytes.tolist()) == [20, 21]

    def test_where_nothing_can_fit_the_nearest_start_says_by_how_much(self) -> None:
        placement = placed(problem_of(resident(10, 10, 10), star_cluster(2, memory=10), 1.0))
        assert placement.status == Status.INFEASIBLE
        assert int(placement.shortfall_bytes.sum()) == 10

    def test_one_device_is_enough_of_a_cluster(self) -> None:
        problem = problem_of(loose_ops(3), star_cluster(1), 1.0)
        assert_fits(problem, placed(problem))

    def test_one_plan_is_answered_under_a_budget_of_one(self) -> None:
        placement = placed(tight("layered", 300, 1.05), budget="1x")
        assert placement.plan is not None or placement.least_overflow_plan is not None


def resident(*num_bytes: int) -> Graph:
    return graph_of(*({"resident_bytes": size} for size in num_bytes))


def kept(num_bytes: int) -> dict[str, Any]:
    return {"num_bytes": num_bytes, "keep": True}


class TestPacking:
    def test_the_fullest_device_with_room_then_the_emptiest(self) -> None:
        """8 into 9, 7 into 10, 3 into the gap of 3; nothing holds 5: the emptiest of 0, 1 and 4 takes it."""
        size, room = np.array([8, 7, 3, 5]), np.array([9, 10, 4])
        device = best_fit(size, np.arange(4), np.ones((4, 3), dtype=np.bool_), room)
        assert device.tolist() == [0, 1, 1, 2]
        assert room.tolist() == [9, 10, 4]

    def test_only_allowed_devices(self) -> None:
        allowed = np.array([[False, True], [True, False]])
        assert best_fit(np.array([5, 5]), np.arange(2), allowed, np.array([9, 5])).tolist() == [1, 0]

    def test_a_branch_is_followed_to_its_end(self) -> None:
        """0 -> 1 -> 3 -> 5 and 0 -> 2 -> 4 -> 5: the first branch, the second, then the join."""
        pointer = np.array([0, 2, 3, 4, 5, 6, 6], dtype=np.int32)
        target = np.array([1, 2, 3, 4, 5, 5], dtype=np.int32)
        assert order_depth_first(pointer, target).tolist() == [0, 1, 3, 2, 4, 5]

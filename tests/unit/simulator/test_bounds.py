"""Lower bounds by hand, against published values, and against the linear programme written out in full."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from loadmaster.core.arrays import Floats
from loadmaster.core.graph import NO_STORAGE, Graph, Phase
from loadmaster.core.problem import Links, Objective, Split
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.bounds.relaxation import Classes, relaxed_bound_s
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
from tests.conformance.problems import unequal_cluster
from tests.unit.placers.test_memory_first import FAMILIES, tight
from tests.unit.public_graphs import THROUGHPUT, printed_as, problem_from, throughput_input

INF = float("inf")


class TestStepBounds:
    def test_a_chain_is_bound_by_its_fastest_times(self) -> None:
        problem = problem_of(chain(3), unequal_cluster(), [[1, 9], [8, 2], [3, 3]])
        bound = lower_bound(
            replace(problem, links=Links.PARALLEL, costs=replace(problem.costs, transfer_s=[0, 0]))
        )
        assert bound.name == "critical path"
        assert bound.seconds == pytest.approx(1 + 2 + 3)

    def test_who_changes_the_device_pays_for_the_transfer(self) -> None:
        """1 s here, then a byte at 1 byte/s, then 2 s and 3 s there."""
        bound = lower_bound(problem_of(chain(3, 1), unequal_cluster(), [[1, 9], [8, 2], [3, 3]]))
        assert bound.name == "path with transfers"
        assert bound.seconds == pytest.approx(1 + 1 + 2 + 3)

    def test_of_two_branches_the_longer_counts(self) -> None:
        problem = problem_of(diamond(), star_cluster(4), [1, 5, 2, 1])
        assert lower_bound(problem).seconds == pytest.approx(1 + 5 + 1)

    def test_equal_devices_share_the_work(self) -> None:
        bound = lower_bound(problem_of(loose_ops(5), star_cluster(2), [3, 1, 4, 1, 5]))
        assert bound.name == "work"
        assert bound.seconds == pytest.approx(14 / 2)

    def test_unequal_devices_share_the_work_in_fractions(self) -> None:
        """Three ops of 6 s on the first device and 12 s on the second: T/6 + T/12 = 3, so T = 12."""
        bound = lower_bound(problem_of(loose_ops(3), unequal_cluster(), [[6, 12]] * 3))
        assert bound.name == "work"
        assert bound.seconds == pytest.approx(12)

    def test_each_op_goes_where_it_is_comparatively_fast(self) -> None:
        """
        a: 2 s or 6 s, b: 6 s or 2 s, c: 4 s or 4 s. a and b where they are fast, c in halves: T = 2 + 4/2.
        """
        bound = lower_bound(problem_of(loose_ops(3), unequal_cluster(), [[2, 6], [6, 2], [4, 4]]))
        assert bound.seconds == pytest.approx(4)

    def test_a_fast_device_without_room_spreads_the_work(self) -> None:
        """Four ops of 10 bytes, 1 s fast or 4 s slow; the fast device holds 20 bytes: two take 8 s slowly."""
        graph = graph_of(*({"resident_bytes": 10} for _ in range(4)))
        bound = lower_bound(problem_of(graph, unequal_cluster([20, 100]), [[1, 4]] * 4))
        assert bound.name == "memory"
        assert bound.seconds == pytest.approx(8)
        roomy = lower_bound(problem_of(graph, unequal_cluster([40, 100]), [[1, 4]] * 4))
        assert roomy.name == "work"
        assert roomy.seconds == pytest.approx(4 / (1 + 1 / 4))

    def test_a_reserve_is_no_room(self) -> None:
        graph = graph_of(*({"resident_bytes": 10} for _ in range(4)))
        cluster = cluster_of(
            {(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False), memory=[40, 100], reserve=[20, 0]
        )
        assert lower_bound(problem_of(graph, cluster, [[1, 4]] * 4)).seconds == pytest.approx(8)

    def test_a_group_runs_one_after_the_other(self) -> None:
        graph = graph_of({"group": 0}, {"group": 0}, {"group": 0}, {})
        bound = lower_bound(problem_of(graph, star_cluster(4), [2, 3, 4, 5]))
        assert bound.name == "largest unit"
        assert bound.seconds == pytest.approx(9)

    def test_a_group_counts_on_one_device_only(self) -> None:
        """First op fast here, second fast there: together 1 + 10 or 10 + 2, not 1 + 2."""
        graph = graph_of({"group": 0}, {"group": 0})
        problem = problem_of(graph, unequal_cluster(), [[1, 10], [10, 2]])
        assert lower_bound(problem).seconds == pytest.approx(11)

    def test_a_pin_forces_the_slow_device(self) -> None:
        problem = problem_of(chain(2), unequal_cluster(), [[1, 9], [1, 9]], pinned=[-1, 1])
        assert lower_bound(problem).seconds == pytest.approx(1 + 2 + 9)  # two bytes cross

    def test_an_op_counts_where_it_can_run(self) -> None:
        problem = problem_of(chain(2), unequal_cluster(), [[INF, 9], [1, 9]])
        assert lower_bound(problem).seconds == pytest.approx(9 + 2 + 1)  # two bytes cross

    def test_logical_devices_of_one_chip_share_its_time(self) -> None:
        routes = {(i, j): [0] for i in range(3) for j in range(3) if i != j}
        cluster = cluster_of(routes, kind=[0, 0, 0], engine=[7, 7, 8])
        assert lower_bound(problem_of(loose_ops(6), cluster, 2.0)).seconds == pytest.approx(12 / 2)

    def test_issuing_takes_its_time(self) -> None:
        bound = lower_bound(problem_of(loose_ops(4), star_cluster(4), 1.0, issue_s=[1, 2, 3, 4]))
        assert bound.name == "issue"
        assert bound.seconds == pytest.approx(10)

    def test_ops_without_time_are_bound_by_nothing(self) -> None:
        assert lower_bound(problem_of(loose_ops(3), unequal_cluster(), 0.0)).seconds == 0.0


class TestThroughputBounds:
    def test_neither_depth_nor_issue_bounds_a_pipeline(self) -> None:
        problem = problem_of(
            chain(4), star_cluster(4), 1.0, issue_s=1.0, objective=Objective.THROUGHPUT, split=Split.CHAIN
        )
        assert lower_bound(problem).seconds == pytest.approx(1.0)

    def test_a_cpu_ten_times_slower_takes_its_tenth(self) -> None:
        """Two accelerators and a CPU: 21 ops of 1 s or 10 s give 21 / (2 + 1/10)."""
        problem = problem_of(
            loose_ops(21),
            host_cluster(2),
            [[1, 10]] * 21,
            objective=Objective.THROUGHPUT,
            links=Links.HOST,
        )
        assert lower_bound(problem).seconds == pytest.approx(10)

    @pytest.mark.parametrize("name", THROUGHPUT)
    def test_the_work_bound_of_a_public_graph_is_the_published_one(self, name: str) -> None:
        bound = lower_bound(problem_from(throughput_input(name)))
        assert bound.name in ("work", "memory")
        assert printed_as(bound.seconds, THROUGHPUT[name].work_bound)
        assert bound.seconds <= THROUGHPUT[name].chain


class TestProofsThatNothingFits:
    def test_an_op_and_its_group_larger_than_every_device(self) -> None:
        graph = graph_of({"group": 0, "resident_bytes": 12}, {"group": 0, "resident_bytes": 12})
        bound = lower_bound(problem_of(graph, star_cluster(3, memory=20), 1.0))
        assert "'op0' and the ops that belong with it need 24 B on one device" in bound.infeasible
        assert "largest allowed has 20 B (4 B short)" in bound.infeasible

    def test_the_largest_device_does_not_help_a_pinned_op(self) -> None:
        graph = graph_of({"resident_bytes": 12})
        pinned = problem_of(graph, unequal_cluster([10, 100]), [[1, 1]], pinned=[0])
        assert "need 12 B on one device, the largest allowed has 10 B" in lower_bound(pinned).infeasible
        assert lower_bound(problem_of(graph, unequal_cluster([10, 100]), [[1, 1]])).infeasible == ""

    def test_inputs_workspace_and_outputs_of_an_op_are_needed_at_once(self) -> None:
        graph = graph_of({"makes": [5]}, {"makes": [6]}, {"uses": [0, 1], "makes": [3], "workspace_bytes": 2})
        need = 5 + 6 + 3 + 2
        assert (
            f"need {need} B"
            in lower_bound(problem_of(graph, star_cluster(2, memory=need - 1), 1.0)).infeasible
        )
        assert lower_bound(problem_of(graph, star_cluster(2, memory=need), 1.0)).infeasible == ""

    def test_all_together_hold_more_than_all_devices(self) -> None:
        graph = graph_of(*({"resident_bytes": 10} for _ in range(5)))
        bound = lower_bound(problem_of(graph, star_cluster(2, memory=20), 1.0))
        assert "all ops together hold 50 B" in bound.infeasible
        assert "all devices have 40 B (10 B short)" in bound.infeasible

    def test_ops_of_few_devices_hold_more_than_those(self) -> None:
        """Three devices of 20 bytes; three ops of 15 that the third device cannot run."""
        routes = {(i, j): [0] for i in range(3) for j in range(3) if i != j}
        cluster = cluster_of(routes, kind=[0, 0, 1], on_host=(False, False), memory=20)
        graph = graph_of(*({"resident_bytes": 15} for _ in range(3)))
        bound = lower_bound(problem_of(graph, cluster, [[1, INF]] * 3))
        assert "may run on d0, d1 only hold 45 B" in bound.infeasible
        assert "those devices have 40 B (5 B short)" in bound.infeasible

    def test_pins_that_overfill_a_device(self) -> None:
        graph = graph_of(*({"resident_bytes": 15} for _ in range(3)))
        problem = problem_of(graph, star_cluster(3, memory=20), 1.0, pinned=[1, 1, -1])
        assert "may run on ref1 only hold 30 B" in lower_bound(problem).infeasible

    def test_a_weight_is_not_counted_twice_where_it_lives(self) -> None:
        """The reader of a weight needs no copy where the weight is resident, however little it is there."""
        graph = graph_of({"phase": Phase.PARAM, "makes": [100], "resident_bytes": 1}, {"uses": [0]})
        assert lower_bound(problem_of(graph, star_cluster(2, memory=10), [0, 1])).infeasible == ""
        resident = graph_of({"phase": Phase.PARAM, "makes": [100], "resident_bytes": 100}, {"uses": [0]})
        assert lower_bound(problem_of(resident, star_cluster(2, memory=10), [0, 1])).infeasible != ""


class TestCopiesThatEverySplitMakes:
    """Kept tensors stay on every device they reach; parts of a connected graph share some."""

    def test_a_connected_graph_in_memory_that_only_its_parts_fill(self) -> None:
        """Four ops of 10 bytes, 2 of them a kept tensor the next one uses, on two devices of 20."""
        bound = lower_bound(problem_of(kept_chain(4), star_cluster(2, memory=20), 1.0))
        assert "all ops together hold 40 B at the end of the step" in bound.infeasible
        assert "on 2 of 2 devices they copy at least 1 kept tensors" in bound.infeasible
        assert "need 42 B where there are 40 B" in bound.infeasible
        assert "(2 B short): use a smaller batch or one more device" in bound.infeasible

    def test_with_room_for_the_copy_nothing_is_claimed(self) -> None:
        assert lower_bound(problem_of(kept_chain(4), star_cluster(2, memory=22), 1.0)).infeasible == ""
        assert lower_bound(problem_of(kept_chain(4), star_cluster(2, memory=21), 1.0)).infeasible == ""

    def test_each_device_more_is_a_copy_more(self) -> None:
        """Eight ops of 10 bytes on four devices take three copies of 2 bytes: 86 in all."""
        for memory, said in ((21, True), (22, False)):
            bound = lower_bound(problem_of(kept_chain(8), star_cluster(4, memory=memory), 1.0))
            assert ("at least 3 kept tensors, and need 86 B" in bound.infeasible) is said

    def test_two_graphs_without_a_common_tensor_need_no_copy(self) -> None:
        ops = [holding(10, 2, uses=[at - 1] if at % 2 else []) for at in range(4)]
        assert lower_bound(problem_of(graph_of(*ops), star_cluster(2, memory=20), 1.0)).infeasible == ""

    def test_tensors_that_are_freed_or_not_counted_join_nothing(self) -> None:
        for made in ({"num_bytes": 2}, {"num_bytes": 2, "keep": True, "storage": NO_STORAGE}):
            ops = [holding(10, 0, uses=[at - 1] if at else []) | {"makes": [made]} for at in range(4)]
            text = lower_bound(problem_of(graph_of(*ops), star_cluster(2, memory=22), 1.0)).infeasible
            assert "copy" not in text

    def test_the_smallest_copies_are_counted_as_often_as_they_may_be_made(self) -> None:
        """A tensor of 1 byte has two users, those of 5 bytes one each: four parts copy 1 + 1 + 5."""
        ops = [holding(10, 1), holding(10, 5, uses=[0]), holding(10, 5, uses=[0])]
        ops += [holding(10, 5, uses=[at]) for at in range(1, 6)]
        for memory, said in ((21, True), (22, False)):
            bound = lower_bound(problem_of(graph_of(*ops), star_cluster(4, memory=memory), 1.0))
            assert ("at least 3 kept tensors, and need 87 B" in bound.infeasible) is said

    def test_fewer_devices_may_do_with_fewer_copies(self) -> None:
        """On the largest alone everything fits, and little ones beside it prove nothing; then they do."""
        for largest, said in ((40, ""), (39, "on 1 of 3 devices they need 40 B where there are 39 B")):
            cluster = replace(star_cluster(3), memory_bytes=np.array([largest, 1, 1]))
            assert said in lower_bound(problem_of(kept_chain(4), cluster, 1.0)).infeasible
            assert bool(said) == bool(lower_bound(problem_of(kept_chain(4), cluster, 1.0)).infeasible)

    def test_ops_that_belong_together_share_without_a_copy(self) -> None:
        ops = [holding(10, 2, uses=[at - 1] if at % 2 else [], group=at // 2) for at in range(4)]
        assert lower_bound(problem_of(graph_of(*ops), star_cluster(2, memory=20), 1.0)).infeasible == ""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_no_family_fits_in_exactly_what_it_holds(self, family: str) -> None:
        """R5 of the published defects: at 1.0 proven infeasible, at 1.05 not."""
        assert "kept tensors, and need" in lower_bound(tight(family, 300, 1.0)).infeasible
        assert lower_bound(tight(family, 300, 1.05)).infeasible == ""

    def test_the_published_dead_end_is_told_with_both_sizes_and_a_remedy(self) -> None:
        text = lower_bound(tight("fork_join", 300, 1.0)).infeasible
        assert (round(3585 / 1024, 3), round(3582 / 1024, 3)) == (3.501, 3.498)
        assert "need 3.501 GiB where there are 3.498 GiB" in text
        assert "(3.0 MiB short): use a smaller batch or one more device" in text


def kept_chain(num_ops: int) -> Graph:
    """Ops of 10 bytes, 2 of them a tensor that stays and that the next one uses."""
    return graph_of(*(holding(10, 2, uses=[at - 1] if at else []) for at in range(num_ops)))


def holding(num_bytes: int, made: int, **fields: Any) -> dict[str, Any]:
    """An op that holds so many bytes, `made` of them in a tensor that stays."""
    return {"resident_bytes": num_bytes - made, "makes": [{"num_bytes": made, "keep": True}], **fields}


class TestRelaxation:
    @pytest.mark.parametrize("seed", range(40))
    def test_the_bound_is_the_linear_programmes(self, seed: int) -> None:
        """Three kinds whose speeds differ up to a thousandfold, with and without rows for memory."""
        classes = random_classes(np.random.default_rng(seed), num_classes=3)
        for with_memory in (False, True):
            whole = full_programme_s(classes, with_memory=with_memory)
            ours = relaxed_bound_s(classes, with_memory=with_memory)
            assert whole is not None
            assert ours <= whole * (1 + 1e-9)
            assert ours >= whole * (1 - 1e-6)

    @pytest.mark.parametrize("seed", range(20))
    def test_memory_that_just_does_has_a_high_price(self, seed: int) -> None:
        classes = random_classes(np.random.default_rng(1000 + seed), num_classes=4, slack=1.0001)
        whole = full_programme_s(classes, with_memory=True)
        assert whole is not None
        assert whole * (1 - 1e-6) <= relaxed_bound_s(classes, with_memory=True) <= whole * (1 + 1e-9)

    def test_the_last_free_bytes_may_be_worth_any_time(self) -> None:
        """
        The fast class has room for one of ten small units beside the large one that only it can run; a small
        unit takes 1 s there and 100 s elsewhere. 900 s, and a byte would save more than all time there is.
        """
        small, large = [[1.0, 100.0]] * 10, [[1.0, INF]]
        classes = Classes(
            np.ones(2), np.array([1.0, 9.0]), np.array(small + large), np.array([1e-3] * 10 + [1 - 1e-3])
        )
        assert relaxed_bound_s(classes, with_memory=True) == pytest.approx(900, rel=1e-6)

    def test_some_programmes_are_bound_by_memory(self) -> None:
        """Guards the test above against rows that never bind."""
        drawn = [random_classes(np.random.default_rng(seed), num_classes=3) for seed in range(40)]
        gained = [
            relaxed_bound_s(c, with_memory=True) > 1.01 * relaxed_bound_s(c, with_memory=False) for c in drawn
        ]
        assert sum(gained) >= 10


def random_classes(rng: np.random.Generator, *, num_classes: int, slack: float = 1.3) -> Classes:
    """Units that each can run somewhere, and memory that some way to spread them needs less `slack`."""
    num_units = int(rng.integers(2, 25))
    seconds = rng.uniform(0.1, 1.0, (num_units, num_classes)) * 10.0 ** rng.uniform(-2, 1, num_classes)
    seconds[rng.random(seconds.shape) < 0.25] = INF
    home = rng.integers(num_classes, size=num_units)
    seconds[np.arange(num_units), home] = rng.uniform(0.1, 1.0, num_units)
    held = rng.uniform(0.0, 1.0, num_units)
    memory = slack * np.bincount(home, held, num_classes) + 1e-3
    return Classes(rng.integers(1, 5, num_classes).astype(np.float64), memory, seconds, held)


def full_programme_s(classes: Classes, *, with_memory: bool) -> float | None:
    """The optimum of the relaxation with a variable for every unit and class, None if it has none."""
    units, kinds = np.nonzero(np.isfinite(classes.seconds))
    num = len(units)
    rows: list[Floats] = []
    limits: list[float] = []
    for c, count in enumerate(classes.count):
        here = kinds == c
        rows.append(np.append(np.where(here, classes.seconds[units, c], 0.0), -count))
        limits.append(0.0)
        if with_memory:
            rows.append(np.append(np.where(here, classes.held_bytes[units], 0.0), 0.0))
            limits.append(float(classes.memory_bytes[c]))
    shares = np.zeros((len(classes.held_bytes), num + 1))
    shares[units, np.arange(num)] = 1.0
    with np.errstate(invalid="ignore"):
        matrix = np.nan_to_num(np.array(rows), posinf=0.0)
    found = linprog(
        np.append(np.zeros(num), 1.0), A_ub=matrix, b_ub=limits, A_eq=shares, b_eq=np.ones(len(shares))
    )
    return float(found.fun) if found.status == 0 else None

"""Standing memory, cuts, the compiled search and repairs: against plain Python and the other simulator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadmaster.core.arrays import Ints
from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.graph import NO_STORAGE, Graph, Phase
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Budget, Run
from loadmaster.placers._partition import Schedule, Standing, Terms, anneal_partition
from loadmaster.placers.answer import Tally
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.placers.repair import load_bench, repair_until_fits
from loadmaster.placers.resident_memory import load_standing, running_bytes, standing_bytes
from loadmaster.placers.unit_cuts import cut_bytes, cut_into_blocks, move_overflow
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests import reference
from tests.builders import chain, cluster_of, graph_of, loose_ops, problem_of, star_cluster
from tests.conformance.problems import tight_activations, unequal_cluster
from tests.strategies import picks, problems

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def by_hand(problem: Problem, device: list[int]) -> list[int]:
    """Bytes standing on each device, tensor by tensor, from what the word means; `device` of each op."""
    graph = problem.graph
    load = [0] * problem.cluster.num_devices
    for op, size in enumerate(graph.resident_bytes.tolist()):
        load[device[op]] += size
    later = [phase in (Phase.BACKWARD, Phase.UPDATE) for phase in graph.phase.tolist()]
    needs: list[set[int]] = [set() for _ in range(graph.num_tensors)]  # devices where a tensor stands
    for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        if graph.keep[t] or (later[op] and not later[int(graph.tensor_op[t])]):
            needs[t].add(device[op])
    for t in sorted(range(graph.num_tensors), key=lambda t: -int(graph.tensor_op[t])):
        base, op = int(graph.tensor_storage[t]), int(graph.tensor_op[t])
        if base not in (t, NO_STORAGE) and (graph.keep[t] or needs[t]):  # a view prolongs what it looks into
            read = graph.use_tensor[graph.use_op == op].tolist()
            needs[next((r for r in read if graph.tensor_storage[r] == base), base)].add(device[op])
    for t in range(graph.num_tensors):
        home, size = device[int(graph.tensor_op[t])], int(graph.tensor_bytes[t])
        base, weight = int(graph.tensor_storage[t]), graph.phase[graph.tensor_op[t]] == Phase.PARAM
        if base == NO_STORAGE:
            continue
        for d in needs[t] | ({home} if graph.keep[t] else set()):
            load[d] += size if d != home else 0 if weight or base != t else size
    return load


def units_on(draw: st.DrawFn, problem: Problem, cargo: Cargo) -> Ints:
    """An allowed device for every unit."""
    codes = picks(draw, range(64), cargo.num_units)
    choices = [np.flatnonzero(row) for row in cargo.fits]
    return np.array([c[k % len(c)] for c, k in zip(choices, codes, strict=True)], dtype=np.int32)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, Cargo, Ints]:
    problem = draw(problems(8, 4))
    cargo = load_cargo(problem)
    return problem, cargo, units_on(draw, problem, cargo)


def terms_of(problem: Problem, cargo: Cargo, room: list[int], running: list[int] | None = None) -> Terms:
    beside = np.array(running if running is not None else [0] * cargo.num_units, dtype=np.int64)
    heavy = np.argsort(-beside, kind="stable")[: int((beside > 0).sum())]
    rank = np.full(cargo.num_units, len(heavy), dtype=np.int64)
    rank[heavy] = np.arange(len(heavy))
    rooms = np.array(room, dtype=np.int64)
    return Terms(rooms, heavy, np.append(beside[heavy], 0), rank, cargo.seconds, np.inf, 0.0)


def schedule_of(num_tries: int = 2000, *, seed: int = 1, stop: bool = False) -> Schedule:
    return Schedule(4.0, 0.2, 0.6, 3.0, num_tries, seed, stop)


class TestStanding:
    @quick
    @given(placed())
    def test_it_is_what_the_words_say(self, case: tuple[Problem, Cargo, Ints]) -> None:
        problem, cargo, device = case
        standing = load_standing(problem, cargo)
        num = problem.cluster.num_devices
        assert standing_bytes(standing, device, num).tolist() == by_hand(
            problem, device[cargo.of_op].tolist()
        )

    @quick
    @given(placed())
    def test_where_everything_is_kept_it_is_the_peak(self, case: tuple[Problem, Cargo, Ints]) -> None:
        problem, cargo, device = case
        graph = problem.graph
        kept = replace(
            graph, keep=np.ones(graph.num_tensors, bool), workspace_bytes=graph.workspace_bytes * 0
        )
        problem = replace(problem, graph=kept)
        plan = plan_of(device[cargo.of_op])
        run = reference.simulate(problem, plan, dispatch="ready", links=problem.links.value)
        standing = load_standing(problem, cargo)
        assert standing_bytes(standing, device, problem.cluster.num_devices).tolist() == run.peak_bytes

    def test_a_tensor_saved_for_backward_stands_where_it_is_used_not_where_it_was_made(self) -> None:
        graph = graph_of(
            {"makes": [7]}, {"uses": [0], "makes": [1]}, {"uses": [0, 1], "phase": Phase.BACKWARD}
        )
        problem = problem_of(graph, star_cluster(3), 1.0)
        cargo = load_cargo(problem)
        for place in ([0, 1, 2], [2, 1, 2]):
            device = np.empty(3, dtype=np.int32)
            device[cargo.of_op] = place
            assert standing_bytes(load_standing(problem, cargo), device, 3).tolist() == [0, 0, 7 + 1]

    def test_beside_come_tensors_that_are_freed_and_workspace(self) -> None:
        graph = graph_of({"makes": [7]}, {"uses": [0], "makes": [2, kept(30)]}, {})
        graph = replace(graph, workspace_bytes=np.array([0, 100, 5]))
        problem = problem_of(graph, star_cluster(2), 1.0)
        cargo = load_cargo(problem)
        assert running_bytes(problem, cargo, workspace=False).tolist() == [7, 9, 0]
        assert running_bytes(problem, cargo, workspace=True).tolist() == [7, 109, 5]


class TestSearch:
    @quick
    @given(placed(), st.integers(0, 5), st.data())
    def test_what_it_counts_move_by_move_is_what_there_is(
        self, case: tuple[Problem, Cargo, Ints], seed: int, data: st.DataObject
    ) -> None:
        problem, cargo, device = case
        num = problem.cluster.num_devices
        room = data.draw(st.lists(st.integers(0, 12), min_size=num, max_size=num))
        running = data.draw(st.lists(st.integers(0, 4), min_size=cargo.num_units, max_size=cargo.num_units))
        before = device.copy()
        standing = load_standing(problem, cargo)
        terms = terms_of(problem, cargo, room, running)
        found, over, copied, tries = anneal_partition(standing, device, terms, schedule_of(seed=seed))
        assert device.tolist() == before.tolist()
        assert tries == (2000 if num > 1 else 0)
        assert cargo.fits[np.arange(cargo.num_units), found].all()
        load = by_hand(problem, found[cargo.of_op].tolist())
        beside = [max((running[u] for u in np.flatnonzero(found == d)), default=0) for d in range(num)]
        assert over == sum(max(0, x + y - z) for x, y, z in zip(load, beside, room, strict=True))
        assert copied == sum(load) - int(standing.unit_bytes.sum())

    @quick
    @given(placed(), st.integers(0, 20))
    def test_it_never_gets_worse_and_is_the_same_again(
        self, case: tuple[Problem, Cargo, Ints], room: int
    ) -> None:
        problem, cargo, device = case
        standing = load_standing(problem, cargo)
        rooms = [room] * problem.cluster.num_devices
        found, over, _, _ = anneal_partition(standing, device, terms_of(problem, cargo, rooms), schedule_of())
        again, _, _, _ = anneal_partition(standing, device, terms_of(problem, cargo, rooms), schedule_of())
        lacking = sum(max(0, load - room) for load in by_hand(problem, device[cargo.of_op].tolist()))
        assert over <= lacking
        assert again.tolist() == found.tolist()

    def test_a_swap_is_found_where_no_single_move_helps(self) -> None:
        """6 and 5 on one device of 10, 4 and 4 on the other: 5 and 4, or 6 and 4, must change places."""
        graph = graph_of(*({"resident_bytes": size} for size in (6, 5, 4, 4)))
        problem = problem_of(graph, star_cluster(2, memory=10), 1.0)
        start = np.array([0, 0, 1, 1], dtype=np.int32)
        found, over, _, _ = searched(problem, start, [10, 10])
        assert over == 0
        assert sorted(by_hand(problem, found.tolist())) == [9, 10]

    def test_it_stops_at_the_first_state_that_fits(self) -> None:
        graph = graph_of(*({"resident_bytes": 1} for _ in range(100)))
        problem = problem_of(graph, star_cluster(2), 1.0)
        start = np.zeros(100, dtype=np.int32)
        found, over, _, tries = searched(problem, start, [90, 100], stop=True)
        assert over == 0
        assert tries < 2000
        assert int(found.sum()) == 10  # ten moved, no more

    def test_moves_that_were_too_many_to_take_back_are_not_lost(self) -> None:
        """Two units that change places thousands of times: the best state is long behind at the end."""
        graph = graph_of({"resident_bytes": 3}, {"resident_bytes": 3})
        problem = problem_of(graph, star_cluster(2), 1.0)
        hot = Schedule(1e9, 1e9, 1.0, 1.0, 10_001, 1, False)
        cargo = load_cargo(problem)
        start = np.zeros(2, dtype=np.int32)
        found, over, _, _ = anneal_partition(
            load_standing(problem, cargo), start, terms_of(problem, cargo, [3, 3]), hot
        )
        assert over == 0
        assert sorted(found.tolist()) == [0, 1]

    def test_seconds_beyond_the_limit_cost_as_told(self) -> None:
        """Twenty of thirty units must leave the first device; the second is slow, the third is not."""
        graph = graph_of(*({"resident_bytes": 2} for _ in range(30)))
        routes = {(i, j): [0] for i in range(3) for j in range(3) if i != j}
        cluster = cluster_of(routes, kind=[0, 1, 0], on_host=(False, False))
        problem = problem_of(graph, cluster, [[1, 50]] * 30)
        cargo = load_cargo(problem)
        start, standing = np.zeros(30, dtype=np.int32), load_standing(problem, cargo)
        free = terms_of(problem, cargo, [20, 60, 60])
        timely = free._replace(limit_s=30.0, bytes_per_s=100.0)
        on_slow = [
            int((anneal_partition(standing, start, terms, schedule_of(stop=True))[0] == 1).sum())
            for terms in (free, timely)
        ]
        assert on_slow[0] >= 5
        assert on_slow[1] == 0

    def test_a_net_of_very_many_users_is_counted_too(self) -> None:
        users = [{"uses": [0], "resident_bytes": 1} for _ in range(80)]
        graph = graph_of({"makes": [kept(9)]}, *users)
        problem = problem_of(graph, star_cluster(3), 1.0)
        start = (np.arange(81) % 3).astype(np.int32)
        found, over, copied, _ = searched(problem, start, [60, 40, 30], num_tries=20_000)
        load = by_hand(problem, found.tolist())
        assert over == 0
        assert copied == sum(load) - 89


def searched(
    problem: Problem, start: Ints, room: list[int], num_tries: int = 2000, *, stop: bool = False
) -> Any:
    cargo = load_cargo(problem)
    standing: Standing = load_standing(problem, cargo)
    return anneal_partition(
        standing, start, terms_of(problem, cargo, room), schedule_of(num_tries, stop=stop)
    )


class TestCuts:
    def test_the_bytes_of_every_cut(self) -> None:
        """a -> b -> c -> d with 5, 1 and 4 bytes, and a -> d with 2."""
        graph = graph_of(
            {"makes": [kept(5), kept(2)]},
            {"uses": [0], "makes": [kept(1)]},
            {"uses": [2], "makes": [kept(4)]},
            {"uses": [1, 3]},
        )
        problem = problem_of(graph, star_cluster(2), 1.0)
        standing = load_standing(problem, load_cargo(problem))
        assert cut_bytes(standing, np.arange(4)).tolist() == [7, 3, 6, 0]
        assert cut_bytes(standing, np.array([1, 0, 2, 3])).tolist() == [6, 3, 6, 0]

    def test_blocks_are_as_large_as_rooms_and_cut_where_little_is_copied(self) -> None:
        sizes = [9, 9, 9, 1, 9, 9, 9, 9]
        ops = [
            {
                "uses": [at - 1] if at else [],
                "makes": [{"num_bytes": size, "keep": True}],
                "resident_bytes": 91,
            }
            for at, size in enumerate(sizes)
        ]
        problem = problem_of(graph_of(*ops), star_cluster(2), 1.0)
        cargo = load_cargo(problem)
        standing = load_standing(problem, cargo)
        device = cut_into_blocks(standing, cargo.fits, np.arange(8), np.array([500, 500]))
        assert device.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        turned = cut_into_blocks(
            standing, cargo.fits, np.arange(8), np.array([500, 500]), devices=np.array([1, 0])
        )
        assert turned.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
        uneven = cut_into_blocks(standing, cargo.fits, np.arange(8)[::-1], np.array([200, 600]))
        assert uneven.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]

    def test_what_a_device_cannot_run_is_not_in_its_block(self) -> None:
        problem = problem_of(loose_ops(4), unequal_cluster(), [[1, 1], [float("inf"), 1], [1, 1], [1, 1]])
        cargo = load_cargo(problem)
        standing = load_standing(problem, cargo)._replace(unit_bytes=np.full(4, 10))
        device = cut_into_blocks(standing, cargo.fits, np.arange(4), np.array([30, 30]))
        assert device.tolist() == [0, 1, 1, 1]

    def test_more_devices_than_units_leave_some_empty(self) -> None:
        problem = problem_of(chain(2), star_cluster(5), 1.0)
        cargo = load_cargo(problem)
        device = cut_into_blocks(load_standing(problem, cargo), cargo.fits, np.arange(2), np.full(5, 7))
        assert ((device >= 0) & (device < 5)).all()

    def test_the_last_units_of_an_overfull_device_are_carved_off(self) -> None:
        graph = graph_of(*({"resident_bytes": 10} for _ in range(6)))
        problem = problem_of(graph, star_cluster(3), 1.0)
        cargo = load_cargo(problem)
        start = np.zeros(6, dtype=np.int32)
        device = move_overflow(load_standing(problem, cargo), cargo.fits, start, np.array([30, 20, 10]))
        assert device.tolist() == [0, 0, 0, 2, 1, 1]


class TestRepaired:
    def test_what_fits_stays(self) -> None:
        problem = problem_of(chain(6), star_cluster(3), 1.0)
        start = np.array([2, 0, 1, 1, 2, 0], dtype=np.int32)
        room = np.full(3, UNLIMITED_BYTES)
        assert load_bench(problem, load_cargo(problem)).repair_devices(start, room).tolist() == start.tolist()

    def test_one_byte_too_much_moves_one_unit(self) -> None:
        graph = graph_of(*({"resident_bytes": 1} for _ in range(50)))
        problem = problem_of(graph, star_cluster(2), 1.0)
        start = np.zeros(50, dtype=np.int32)
        moved = load_bench(problem, load_cargo(problem)).repair_devices(start, np.array([49, 49]))
        assert int((moved != start).sum()) == 1

    def test_units_go_where_they_may(self) -> None:
        seconds = [[1, float("inf")] if at % 2 else [1, 1] for at in range(10)]
        graph = graph_of(*({"resident_bytes": 1} for _ in range(10)))
        problem = problem_of(graph, unequal_cluster(), seconds, pinned=[0] + [-1] * 9)
        moved = load_bench(problem, load_cargo(problem)).repair_devices(
            np.zeros(10, dtype=np.int32), np.array([6, 10])
        )
        assert np.flatnonzero(moved).tolist() == [2, 4, 6, 8]

    def test_a_chain_on_one_device_is_cut_not_torn(self) -> None:
        """Moving any single op of a chain copies as much as it frees: runs must go together."""
        graph = kept_chain(60)
        problem = problem_of(graph, star_cluster(4), 1.0)
        room = np.full(4, 17 * 10)
        moved = load_bench(problem, load_cargo(problem)).repair_devices(np.zeros(60, dtype=np.int32), room)
        assert max(by_hand(problem, moved.tolist())) <= 170


def kept_chain(num_ops: int) -> Graph:
    """Ten bytes an op, all of them in tensors that stay."""
    return graph_of(*({"uses": [at - 1] if at else [], "makes": [kept(10)]} for at in range(num_ops)))


def kept(num_bytes: int) -> dict[str, Any]:
    """A tensor that stays."""
    return {"num_bytes": num_bytes, "keep": True}


def tally_of(problem: Problem, count: int = 1000) -> Tally:
    simulator = prepare(problem)
    run = Run(
        budget=Budget(count=count),
        rng=np.random.default_rng(0),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=lower_bound(problem),
    )
    return Tally(problem, run)


class TestFitted:
    def test_the_plan_that_is_kept_fits_in_the_reference_simulator(self) -> None:
        problem = problem_of(kept_chain(40), star_cluster(4, memory=120), 1.0)
        tally = tally_of(problem)
        assert repair_until_fits(problem, tally, load_cargo(problem), np.zeros(40, dtype=np.int32))
        placement = tally.answer(algorithm="test")
        assert placement.plan is not None
        run = reference.simulate(problem, placement.plan, dispatch="in_order", links="shared")
        assert max(run.peak_bytes) <= 120

    def test_activations_that_are_freed_count_through_the_simulator(self) -> None:
        problem = tight_activations()
        tally = tally_of(problem)
        assert repair_until_fits(problem, tally, load_cargo(problem), np.zeros(8, dtype=np.int32))
        assert tally.answer(algorithm="test").fits

    def test_workspace_is_used_before_memory_is_full(self) -> None:
        """10 and 2 bytes stay on a device of 12; before the 10 are there, 10 of workspace are free."""
        graph = graph_of(
            {"makes": [kept(10)]}, {"makes": [kept(2)], "workspace_bytes": 10}, {"makes": [kept(10)]}
        )
        problem = problem_of(graph, star_cluster(2, memory=12), 1.0, pinned=[0, 0, 1])
        tally = tally_of(problem)
        assert repair_until_fits(problem, tally, load_cargo(problem), np.array([0, 0, 1], dtype=np.int32))
        assert tally.scored == 2  # first come first served overflows, workspace first does not

    def test_the_given_order_is_tried_first(self) -> None:
        problem = problem_of(loose_ops(3), star_cluster(1), 1.0)
        tally = tally_of(problem)
        priority = np.array([2, 1, 0], dtype=np.int32)
        assert repair_until_fits(
            problem, tally, load_cargo(problem), np.zeros(3, dtype=np.int32), priority=priority
        )
        plan = tally.answer(algorithm="test").plan
        assert plan is not None
        assert plan.priority.tolist() == [2, 1, 0]

    def test_nothing_is_tried_in_vain(self) -> None:
        start = np.zeros(40, dtype=np.int32)
        infeasible = problem_of(kept_chain(40), star_cluster(4, memory=99), 1.0)
        pipeline = problem_of(
            kept_chain(40),
            star_cluster(4, memory=120),
            1.0,
            objective=Objective.THROUGHPUT,
            split=Split.CHAIN,
        )
        for problem in (infeasible, pipeline):
            tally = tally_of(problem)
            assert not repair_until_fits(problem, tally, load_cargo(problem), start)
            assert tally.scored == 0

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_a_count_budget_is_kept(self, count: int) -> None:
        problem = problem_of(kept_chain(40), star_cluster(4, memory=108), 1.0)
        tally = tally_of(problem, count)
        repair_until_fits(problem, tally, load_cargo(problem), np.zeros(40, dtype=np.int32))
        assert tally.scored <= count

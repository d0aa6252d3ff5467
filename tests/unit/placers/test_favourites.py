"""The small-communication-times programme: published optima, bounds by hand, the whole programme in full."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.problem import Links, Objective, Problem
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.generate import FAMILIES, with_benchmark_cluster
from loadmaster.simulator.bounds.favourite_children import NONE, Favourites, find_favourites, match_favourites
from loadmaster.simulator.bounds.small_communication import Network, earliest_starts, solve
from loadmaster.simulator.bounds.small_communication_part import Part
from tests.builders import chain, cluster_of, graph_of, host_cluster, loose_ops, problem_of, star_cluster
from tests.conformance.problems import unequal_cluster

Edge = tuple[int, int, float]  # producer, consumer, seconds of the transfer
A = ([1, 3, 3, 1, 3, 1], [(0, 1, 1), (0, 4, 1), (1, 2, 1), (2, 3, 1), (4, 5, 1), (5, 3, 1)])
B = ([5, 4, 7, 4], [(0, 2, 1), (1, 2, 3), (1, 3, 1)])
C = ([9, 9, 8, 5, 6, 4], [(0, 2, 2), (1, 2, 3), (1, 3, 1), (4, 5, 3)])
D = (
    [6, 7, 9, 8, 10, 6, 6, 10, 6],
    [
        *((0, 2, 1), (0, 3, 5), (0, 4, 2), (1, 2, 1), (1, 3, 1), (1, 4, 1)),
        *((2, 5, 5), (2, 6, 3), (3, 5, 4), (3, 6, 1), (3, 7, 5), (4, 8, 1)),
    ],
)


def edge_problem(times: Sequence[float], edges: Sequence[Edge], devices: int = 2, **fields: Any) -> Problem:
    """Ops with one tensor per edge, each with a given transfer time, on equal devices with free links."""
    builder = GraphBuilder("edges")
    for op in range(len(times)):
        builder.op(f"op{op}")
    for source, target, _ in edges:
        builder.use(builder.tensor(source, 1), target)
    given = [seconds for _, _, seconds in edges]
    fields = {"links": Links.PARALLEL, **fields}
    return problem_of(builder.build(), star_cluster(devices), times, transfer_s=given, **fields)


def generated(family: str, num_ops: int) -> Problem:
    graph = FAMILIES[family](num_ops, 0)
    with_costs = with_benchmark_cluster(graph)
    assert with_costs.cluster is not None
    assert with_costs.costs is not None
    seconds, given = with_costs.costs.compute_s, with_costs.costs.transfer_s
    return problem_of(graph, with_costs.cluster, seconds, transfer_s=given, links=Links.PARALLEL)


class TestPublishedForm:
    @pytest.mark.parametrize(("case", "optimum"), [(A, 8), (B, 12.5), (C, 18.2), (D, 77 / 3)])
    def test_the_optimum_of_the_published_instances_is_the_published_one(
        self, case: Any, optimum: float
    ) -> None:
        found = find_favourites(edge_problem(*case), clipped=False)
        assert found.solved
        assert found.makespan_s == pytest.approx(optimum, rel=1e-9)

    def test_its_optimum_may_exceed_the_best_plan_and_is_then_no_bound(self) -> None:
        """Ops of 1 s, transfers of 10 s: one device takes 3 s."""
        problem = edge_problem([1, 1, 1], [(0, 1, 10), (0, 2, 10)])
        published = find_favourites(problem, clipped=False)
        assert published.makespan_s == pytest.approx(7)
        assert published.bound_s == 0
        assert find_favourites(problem).bound_s == pytest.approx(2.5)

    def test_where_no_transfer_is_longer_than_an_op_it_is_a_bound(self) -> None:
        found = find_favourites(edge_problem(*A), clipped=False)
        assert found.bound_s == pytest.approx(8)
        assert found.bound_s <= 8


class TestClippedBound:
    @pytest.mark.parametrize(
        ("family", "num_ops", "bound_ms"),
        [
            ("fork_join", 100, 28.1),
            ("rnn_grid", 100, 8.1),
            ("layered", 100, 12.9),
            ("many_source", 100, 17.1),
            ("fork_join", 1000, 266.2),
            ("rnn_grid", 1000, 74.4),
            ("layered", 1000, 136.3),
            ("many_source", 1000, 199.9),
            ("fork_join", 5000, 1275),
            ("many_source", 5000, 1003),
            ("fork_join", 10000, 2520),
            ("layered", 10000, 1337),
            ("many_source", 10000, 2013),
            ("rnn_grid", 10000, 748.5),
        ],
    )
    def test_of_a_generated_graph_it_is_the_one_in_the_benchmark(
        self, family: str, num_ops: int, bound_ms: float
    ) -> None:
        """The better of programme and work, to the digits that are recorded."""
        problem = generated(family, num_ops)
        found = find_favourites(problem)
        assert found.solved
        ours_ms = 1e3 * max(found.bound_s, problem.device_compute_s.sum() / 16)  # summed over 4 devices
        assert ours_ms == pytest.approx(bound_ms, abs=0.06 if bound_ms < 1000 else 0.6)

    def test_a_chain_needs_no_transfer(self) -> None:
        found = find_favourites(problem_of(chain(5, num_bytes=9), star_cluster(3), [1, 2, 3, 4, 5]))
        assert found.bound_s == pytest.approx(15)
        assert (found.x == 0).all()

    def test_ops_that_have_nothing_to_do_with_each_other(self) -> None:
        found = find_favourites(problem_of(loose_ops(3), star_cluster(2), [1, 2, 3]))
        assert found.bound_s == pytest.approx(3)
        assert match_favourites(found, 3).tolist() == [NONE] * 3

    def test_it_takes_the_fastest_device_and_the_fastest_pair(self) -> None:
        """
        A fork into two ops of 3 s (5 s on the other kind) with 4 bytes; the faster way moves 4 bytes/s. So
        c = c' = 1: half a transfer for each.
        """
        graph = graph_of({"makes": [4]}, {"uses": [0]}, {"uses": [0]})
        cluster = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False), rate=[2.0, 4.0])
        found = find_favourites(problem_of(graph, cluster, [[2, 1], [3, 5], [5, 3]]))
        assert found.seconds.tolist() == [1, 1]
        assert found.bound_s == pytest.approx(1 + 0.5 + 3)

    def test_ops_pinned_apart_pay_their_transfer_in_full(self) -> None:
        problem = problem_of(chain(2, num_bytes=50), star_cluster(3), [1, 2], pinned=[0, 1])
        assert find_favourites(problem).bound_s == pytest.approx(1 + 50 + 2)
        assert find_favourites(
            problem_of(chain(2, num_bytes=50), star_cluster(3), [1, 2])
        ).bound_s == pytest.approx(3)

    def test_an_op_pinned_apart_takes_no_place_among_the_favourites(self) -> None:
        graph = graph_of({"makes": [9]}, {"uses": [0]}, {"uses": [0]})
        found = find_favourites(problem_of(graph, star_cluster(2), [1, 2, 3], pinned=[0, 1, -1]))
        assert found.bound_s == pytest.approx(1 + 9 + 2)
        assert found.x.tolist() == [1, 0]

    def test_ops_of_a_group_wait_for_each_other_however_fast_the_links(self) -> None:
        """Two children of 2 s on their parent's device: one waits; half of it is in the programme."""
        graph = graph_of({"group": 0, "makes": [0]}, {"group": 0, "uses": [0]}, {"group": 0, "uses": [0]})
        assert find_favourites(problem_of(graph, star_cluster(2), [1, 2, 2])).bound_s == pytest.approx(
            1 + 1 + 2
        )

    def test_one_device_is_bound_like_a_group(self) -> None:
        graph = graph_of({"makes": [0]}, {"uses": [0]}, {"uses": [0]})
        assert find_favourites(problem_of(graph, star_cluster(1), [1, 2, 2])).bound_s == pytest.approx(4)

    def test_a_sibling_without_time_does_not_hide_the_others(self) -> None:
        """Children of 2, 2 and 0 s with transfers of 10 s: of the two that take time one waits."""
        problem = edge_problem([1, 2, 2, 0], [(0, 1, 10), (0, 2, 10), (0, 3, 10)])
        assert find_favourites(problem).bound_s == pytest.approx(1 + 1 + 2)

    def test_a_weight_among_the_inputs_does_not_hide_the_others(self) -> None:
        graph = graph_of(
            {"phase": Phase.PARAM, "makes": [9]}, {"makes": [9]}, {"makes": [9]}, {"uses": [0, 1, 2]}
        )
        found = find_favourites(problem_of(graph, star_cluster(2), [0, 2, 2, 1]))
        assert found.bound_s == pytest.approx(2 + 1 + 1)
        assert match_favourites(found, 4)[0] == NONE

    def test_of_several_tensors_the_slowest_counts(self) -> None:
        graph = graph_of({"makes": [1, 3]}, {"uses": [0, 1]})
        assert find_favourites(
            problem_of(graph, star_cluster(2), 1.0, pinned=[0, 1])
        ).bound_s == pytest.approx(1 + 3 + 1)

    def test_host_links_pay_a_write_and_a_read(self) -> None:
        """Pinned to two accelerators; then one of them to the CPU, which reads for nothing."""
        problem = problem_of(chain(2, num_bytes=3), host_cluster(2), 1.0, links=Links.HOST, pinned=[0, 1])
        assert find_favourites(problem).bound_s == pytest.approx(1 + 3 + 3 + 1)
        problem = problem_of(chain(2, num_bytes=3), host_cluster(2), 1.0, links=Links.HOST, pinned=[0, 2])
        assert find_favourites(problem).bound_s == pytest.approx(1 + 3 + 1)
        problem = problem_of(
            chain(2, num_bytes=3), host_cluster(2), 1.0, links=Links.HOST, pinned=[0, 1], transfer_s=5.0
        )
        assert find_favourites(problem).bound_s == pytest.approx(1 + 5 + 5 + 1)

    def test_where_a_host_side_pair_is_free_nothing_is_added(self) -> None:
        graph = graph_of({"makes": [9]}, {"uses": [0]}, {"uses": [0]})
        free = problem_of(graph, host_cluster(1, 2), 1.0, links=Links.HOST)
        assert find_favourites(free).bound_s == pytest.approx(2)
        paid = problem_of(graph, host_cluster(2, 1), 1.0, links=Links.HOST)
        assert find_favourites(paid).bound_s == pytest.approx(2.5)

    def test_devices_of_one_engine_pay_for_transfers_all_the_same(self) -> None:
        cluster = cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 0], engine=[3, 3])
        graph = graph_of({"makes": [9]}, {"uses": [0]}, {"uses": [0]})
        assert find_favourites(problem_of(graph, cluster, [1, 2, 2])).bound_s == pytest.approx(1 + 1 + 2)

    def test_a_pipeline_has_no_such_bound(self) -> None:
        problem = problem_of(chain(3), star_cluster(2), 1.0, objective=Objective.THROUGHPUT)
        found = find_favourites(problem)
        assert found.bound_s == 0
        assert match_favourites(found, 3).tolist() == [1, 2, NONE]

    def test_views_and_empty_tensors_wait_for_the_latency(self) -> None:
        graph = graph_of(
            {"makes": [4]}, {"uses": [0], "makes": [{"num_bytes": 0, "storage": 0}]}, {"uses": [1]}
        )
        problem = problem_of(graph, star_cluster(2, latency=0.25), 1.0, pinned=[0, 0, 1])
        assert find_favourites(problem).bound_s == pytest.approx(3.25)


class TestSolver:
    @pytest.mark.parametrize("seed", range(30))
    def test_the_optimum_is_that_of_the_whole_programme(self, seed: int) -> None:
        network = random_network(np.random.default_rng(seed))
        found = solve(network)
        assert found.solved
        assert found.makespan_s == pytest.approx(whole_programme_s(network), rel=1e-7)
        assert found.proven_s <= whole_programme_s(network) * (1 + 1e-9)
        assert found.proven_s == pytest.approx(found.makespan_s, rel=1e-6)

    @pytest.mark.parametrize("seed", range(10))
    def test_x_obeys_the_programme_and_reaches_the_optimum(self, seed: int) -> None:
        network = random_network(np.random.default_rng(seed))
        found = solve(network)
        for side in (network.source, network.target):
            assert np.bincount(side, 1 - found.x).max() <= 1 + 1e-6
        assert (found.x >= 0).all()
        assert (found.x <= 1).all()
        ends = earliest_starts(network, network.transfer_s * found.x) + network.op_s
        assert ends.max() == pytest.approx(found.makespan_s)

    @pytest.mark.parametrize("scale", [1e-9, 1e6])
    def test_the_unit_of_time_does_not_matter(self, scale: float) -> None:
        network = random_network(np.random.default_rng(3))
        scaled = Network(
            network.op_s * scale,
            network.source,
            network.target,
            network.delay_s * scale,
            network.transfer_s * scale,
        )
        assert solve(scaled).makespan_s == pytest.approx(scale * solve(network).makespan_s, rel=1e-8)

    def test_both_methods_agree(self) -> None:
        part = fork(width=7)
        simplex, interior = part.solve("highs-ds", 1000), part.solve("highs-ipm", 1000)
        assert simplex is not None
        assert interior is not None
        assert simplex.proven == pytest.approx(6 / 7)  # one of seven children stays: x = 6/7 each
        assert interior.proven == pytest.approx(6 / 7, rel=1e-5)

    def test_a_method_stopped_early_gives_nothing(self) -> None:
        assert fork(width=7).solve("highs-ds", 1) is None

    def test_no_multipliers_prove_more_than_the_optimum(self) -> None:
        rng, part = np.random.default_rng(0), fork(width=4)
        proven = [
            part.proven(rng.choice([0.0, 1.0, rng.random()], part.num_rows), top)
            for top in (0.75, 3.0)
            for _ in range(500)
        ]
        assert max(proven) <= 0.75
        assert len(set(proven)) > 10

    def test_a_large_bound_is_proven_to_almost_all_digits(self) -> None:
        found = find_favourites(generated("fork_join", 1000))
        assert found.makespan_s * (1 - 1e-8) < found.bound_s < found.makespan_s

    def test_the_same_problem_gets_the_same_answer(self) -> None:
        problem = generated("rnn_grid", 400)
        first, second = find_favourites(problem), find_favourites(problem)
        assert first.x.tobytes() == second.x.tobytes()
        assert first.bound_s == second.bound_s

    def test_without_effort_the_child_with_the_longest_way_is_favoured(self) -> None:
        """op0 feeds 1 (way 1 + transfer 4) and 2 (way 3 + 3, transfer 1)."""
        problem = edge_problem([1, 1, 3, 3], [(0, 1, 4), (0, 2, 1), (2, 3, 1)])
        found = find_favourites(problem, effort=0.0)
        assert not found.solved
        assert found.makespan_s == 0
        assert found.bound_s == 0
        assert match_favourites(found, 4).tolist() == [2, NONE, 3, NONE]
        longer = edge_problem([1, 1, 3, 3], [(0, 1, 7), (0, 2, 1), (2, 3, 1)])
        assert match_favourites(find_favourites(longer, effort=0.0), 4).tolist() == [1, NONE, 3, NONE]

    def test_a_programme_given_up_keeps_what_is_proven(self) -> None:
        """The longest chain is 41.738 ms, the optimum 43.34 ms."""
        found = find_favourites(generated("rnn_grid", 1000), effort=0.01)
        assert not found.solved
        assert 0.041738 * (1 - 1e-9) <= found.bound_s <= 0.04335

    def test_scipy_is_loaded_when_needed_only(self) -> None:
        code = "import sys, loadmaster.simulator.bounds.favourite_children; sys.exit('scipy' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestMatching:
    @pytest.mark.parametrize("clipped", [True, False])
    @pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.9])
    def test_favourites_are_a_matching_of_edges(self, clipped: bool, threshold: float) -> None:
        problem = generated("layered", 200)
        found = find_favourites(problem, clipped=clipped)
        favourite = match_favourites(found, problem.graph.num_ops, threshold)
        chosen = np.flatnonzero(favourite != NONE)
        assert len(np.unique(favourite[chosen])) == len(chosen) > 20
        pairs = set(zip(found.source.tolist(), found.target.tolist(), strict=True))
        assert {(int(i), int(favourite[i])) for i in chosen} <= pairs

    def test_of_two_halves_the_longer_transfer_wins(self) -> None:
        found = by_hand([(0, 1, 3.0, 0.5), (0, 2, 4.0, 0.5), (3, 2, 1.0, 0.5)])
        assert match_favourites(found, 4).tolist() == [2, NONE, NONE, NONE]

    def test_an_op_taken_leaves_its_other_parents_their_other_children(self) -> None:
        found = by_hand([(0, 2, 3.0, 0.0), (1, 2, 5.0, 0.0), (0, 3, 1.0, 0.4)])
        assert match_favourites(found, 4).tolist() == [3, 2, NONE, NONE]
        assert match_favourites(found, 4, 0.3).tolist() == [NONE, 2, NONE, NONE]

    def test_what_is_below_the_threshold_but_for_the_solver_is_below_it(self) -> None:
        assert match_favourites(by_hand([(0, 1, 1.0, 0.5 + 1e-12)]), 2).tolist() == [1, NONE]
        assert match_favourites(by_hand([(0, 1, 1.0, 0.6)]), 2).tolist() == [NONE, NONE]

    def test_room_left_by_the_programme_is_used(self) -> None:
        """Both branches have time to spare: the programme does not care, and one is favoured all the same."""
        graph: Graph = graph_of({"makes": [1]}, {"uses": [0]}, {"uses": [0]}, {})
        found = find_favourites(problem_of(graph, star_cluster(2), [1, 2, 3, 50]))
        assert found.makespan_s == pytest.approx(50)
        assert match_favourites(found, 4).tolist() == [2, NONE, NONE, NONE]


def test_unequal_devices_are_accepted() -> None:
    found = find_favourites(problem_of(chain(3), unequal_cluster(), [[1, 9], [8, 2], [3, 3]]))
    assert found.bound_s == pytest.approx(1 + 2 + 3)


def by_hand(rows: list[tuple[int, int, float, float]]) -> Favourites:
    """Edges given as source, target, seconds, x."""
    source, target, seconds, x = (np.array(column) for column in zip(*rows, strict=True))
    return Favourites(source.astype(np.int32), target.astype(np.int32), seconds, x, 0.0, 0.0, True)


def fork(width: int) -> Part:
    """An op without time and `width` children, all on the longest path; a transfer takes 1."""
    every = np.arange(width)
    return Part(
        source=np.zeros(width, dtype=np.int64),
        target=every + 1,
        slack=np.zeros(width),
        spare=np.zeros(width + 1),
        free=every,
        transfer=np.ones(width),
        flip=every % 2 == 1,
    )


def random_network(rng: np.random.Generator) -> Network:
    """A random DAG with some forced delays, and transfers from nothing to several times an op."""
    num = int(rng.integers(3, 40))
    pairs = np.argwhere(np.triu(rng.random((num, num)) < 3.0 / num, 1)).astype(np.int32)
    op_s = rng.integers(0, 6, num) + rng.choice([0.0, 0.1], num)
    delay_s = rng.choice([0.0, 0.0, 0.0, 2.5], len(pairs))
    transfer_s = np.where(delay_s > 0, 0.0, rng.integers(0, 12, len(pairs)) / rng.choice([1.0, 3.0]))
    return Network(op_s, pairs[:, 0].copy(), pairs[:, 1].copy(), delay_s, transfer_s)


def whole_programme_s(network: Network) -> float:
    """Every edge with a row and a variable, as it is written down."""
    num, count = len(network.op_s), len(network.source)
    rows: list[Floats] = []
    limits: list[float] = []
    for edge, (i, j) in enumerate(zip(network.source, network.target, strict=True)):
        row = np.zeros(count + num + 1)
        row[edge], row[count + i], row[count + j] = network.transfer_s[edge], 1.0, -1.0
        rows.append(row)
        limits.append(-network.op_s[i] - network.delay_s[edge])
    for op in range(num):
        row = np.zeros(count + num + 1)
        row[count + op], row[-1] = 1.0, -1.0
        rows.append(row)
        limits.append(-network.op_s[op])
        for side in (network.source, network.target):
            row = np.zeros(count + num + 1)
            row[:count] = -1.0 * ((side == op) & (network.transfer_s > 0))
            rows.append(row)
            limits.append(float(row.sum()) + 1.0)
    bounds = [(0.0, 1.0)] * count + [(0.0, None)] * (num + 1)
    cost = np.append(np.zeros(count + num), 1.0)
    found = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), bounds=bounds)
    assert found.status == 0
    return float(found.fun)

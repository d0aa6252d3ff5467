"""CP-SAT for the step: known optima, the published latency model, budgets, the programme's arguments."""

import sys
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError, ProblemError
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Status
from loadmaster.core.problem import Links, Problem
from loadmaster.core.run import Budget
from loadmaster.graph.formats import msr
from loadmaster.placers.exact._latency.symmetry import find_alike_devices
from loadmaster.placers.exact._latency.ticks import choose_ticks
from loadmaster.placers.registry import placer
from loadmaster.simulator.bounds.certified import Rows, solve_certified
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step, standing_bytes
from tests import reference
from tests.builders import (
    cluster_of,
    graph_of,
    host_cluster,
    instance_a,
    instance_b,
    instance_c,
    instance_d,
    loose_ops,
    problem_of,
    star_cluster,
    tpds_example,
)
from tests.published_latency import CPU, best_pieces, pieces_latency_s
from tests.unit.public_graphs import shared


class TestKnownOptima:
    @pytest.mark.parametrize(
        ("problem", "seconds"),
        [
            (instance_a(), 9.0),
            (instance_b(), 13.0),
            (instance_c(), 22.0),
            (instance_d(), 29.0),
            (instance_d(4), 26.0),
            (tpds_example(), 73.0),
        ],
        ids=["a", "b", "c", "d", "d on four", "HEFT paper"],
    )
    def test_the_optimum_is_found_and_proven(self, problem: Problem, seconds: float) -> None:
        answer = api.plan(problem, algorithm="cpsat_latency", budget="5000x")
        assert answer.status == Status.OPTIMAL
        assert answer.score_s == pytest.approx(seconds, rel=1e-9)
        assert answer.plan is not None
        run = reference.simulate(problem, answer.plan, dispatch="in_order", links=problem.links.value)
        assert run.step_s == pytest.approx(seconds, rel=1e-9)

    def test_memory_that_no_order_keeps_within_is_proven(self) -> None:
        """Three tensors of 8 bytes, used in pairs, on one device of 20: no op alone tells."""
        makers = [{"makes": [8]} for _ in range(3)]
        users = [{"uses": pair} for pair in ([0, 1], [1, 2], [0, 2])]
        problem = problem_of(graph_of(*makers, *users), star_cluster(1, memory=20), 1.0)
        answer = api.plan(problem, algorithm="cpsat_latency", budget="2000x")
        assert answer.status == Status.INFEASIBLE
        assert "no placement and order keeps within" in answer.proof
        assert api.lower_bound(problem).infeasible == ""
        assert "no placement and order" in api.lower_bound(problem, "2000x").infeasible

    def test_a_time_out_gives_the_best_plan_and_a_bound(self) -> None:
        answer = api.plan("gen:fork_join:40", algorithm="cpsat_latency", budget="40x")
        assert answer.status == Status.FEASIBLE
        assert answer.score_s is not None
        assert 0 < answer.bound_s <= answer.score_s

    def test_a_count_repeats_the_answer(self) -> None:
        first, again = (
            api.plan("gen:fork_join:40", algorithm="cpsat_latency", budget="100x") for _ in range(2)
        )
        assert first.digest == again.digest

    def test_the_solvers_bound_beats_the_arguments_where_devices_contend(self) -> None:
        """Five ops of 2 s on two devices: work says 5 s, but ops are not cut."""
        problem = problem_of(loose_ops(5), star_cluster(2), 2.0)
        assert api.lower_bound(problem).seconds == pytest.approx(5)
        bound = api.lower_bound(problem, "500x")
        assert bound.name == "cp-sat"
        assert bound.seconds == pytest.approx(6)


class TestWithoutTheSolver:
    def test_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
        with pytest.raises(InputError, match=r"loadmaster\[exact\]"):
            api.plan(instance_a(), algorithm="cpsat_latency", budget="10x")


class TestProgramme:
    def test_one_that_has_no_time_is_said_to_be_unsolved_by_auto_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = api.problem("gen:layered:300", "T4, V100-16GB")
        monkeypatch.setattr("loadmaster.placers.exact.cpsat_latency._PROGRAMME", 1e-6)
        for algorithm in ("cpsat_latency", "auto"):
            hurried = api.plan(problem, algorithm=algorithm, budget="2s")
            (solver,) = [m for m in hurried.members if m.name == "cpsat_latency"]
            assert "the step programme was not solved within" in solver.reason


class TestTicks:
    def test_microseconds_are_whole_ticks(self) -> None:
        ticks = choose_ticks(np.array([1e-6, 3e-6, 0.017]), 0.05)
        assert ticks.exact
        assert ticks.one(3e-6) == 3 * ticks.one(1e-6)

    def test_other_durations_are_rounded_down(self) -> None:
        seconds = np.random.default_rng(0).uniform(0, 1, 100)
        ticks = choose_ticks(seconds, 100.0)
        assert not ticks.exact
        assert (ticks.down(seconds) / ticks.per_s <= seconds).all()
        assert (ticks.down(seconds) / ticks.per_s >= seconds - 1 / ticks.per_s).all()
        assert ticks.one(100.0) < 2**30


class TestSymmetry:
    def test_ports_of_a_star_are_alike_and_unlike_devices_are_not(self) -> None:
        assert find_alike_devices(problem_of(loose_ops(2), star_cluster(3), 1.0)) == [[0, 1, 2]]
        cluster = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False))
        assert find_alike_devices(problem_of(loose_ops(2), cluster, [[1, 1]] * 2)) == []

    def test_a_link_that_two_devices_share_sets_them_apart_from_a_third(self) -> None:
        routes = {(0, 1): [0], (1, 0): [1], (0, 2): [2], (2, 0): [3], (1, 2): [2], (2, 1): [3]}
        cluster = cluster_of(routes, kind=[0, 0, 0])
        assert find_alike_devices(problem_of(loose_ops(2), cluster, 1.0)) == [[0, 1]]

    def test_a_pin_tells_devices_apart(self) -> None:
        assert find_alike_devices(problem_of(loose_ops(2), star_cluster(2), 1.0, pinned=[0, -1])) == []


class TestStepProgramme:
    def test_side_work_that_waits_for_the_path_counts_after_it(self) -> None:
        """4 s, then three ops of 2 s that need its end, on two devices: 4 + 3, where work says 5."""
        ops: list[dict[str, Any]] = [{"makes": [0]}, *({"uses": [0]} for _ in range(3))]
        problem = problem_of(graph_of(*ops), star_cluster(2), [4, 2, 2, 2])
        assert solve_relaxed_step(problem).bound_s == pytest.approx(7, rel=1e-6)

    def test_what_the_forward_pass_leaves_behind_forces_a_slow_device(self) -> None:
        """Two blocks that each leave 10 bytes for their backward op; the fast device holds 15."""
        ops: list[dict[str, Any]] = [
            {"makes": [10, 0], "group": 0},
            {"uses": [1], "makes": [10, 0], "group": 1},
            {"uses": [2, 3], "makes": [0], "group": 1, "phase": Phase.BACKWARD},
            {"uses": [0, 4], "group": 0, "phase": Phase.BACKWARD},
        ]
        cluster = cluster_of(
            {(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False), memory=[15, 100]
        )
        problem = problem_of(graph_of(*ops), cluster, [[1, 10]] * 4)
        free = problem_of(graph_of(*ops), star_cluster(1), 1.0)
        assert solve_relaxed_step(free).bound_s == pytest.approx(4, rel=1e-6)
        assert solve_relaxed_step(problem).bound_s > 4 + 0.5 * 18 - 1e-5  # half a block, 18 s more as a whole

    def test_what_stands_at_a_moment(self) -> None:
        graph = graph_of(
            {"makes": [7], "group": 0}, {"uses": [0], "makes": [5]}, {"uses": [0, 1], "group": 0}
        )
        before, after = np.array([True, False, False]), np.array([False, False, True])
        unit = np.array([0, 1, 0], dtype=np.int32)
        assert standing_bytes(graph, unit, 2, before, after).tolist() == [7.0, 0.0]

    def test_any_prices_prove_no_more_than_the_optimum(self) -> None:
        """min z0 + z1 with z0 + 2 z1 >= 1, z0 = z1: 2/3, and the proof is not above it."""
        most, equal = Rows(), Rows()
        most.add((0, -1.0), (1, -2.0), limit=-1.0)
        equal.add((0, 1.0), (1, -1.0))
        found = solve_certified(np.ones(2), most, equal, np.ones(2), limit_s=10.0)
        assert found is not None
        assert 2 / 3 - 1e-9 <= found.proven <= 2 / 3


def latency_input(name: str) -> Problem:
    work = msr.read(shared("latency-inputs", f"{name}.json"), name)
    return api.problem(work, objective="step")


class TestPublishedLatency:
    """Values of the authors' model: `exact.md`, section 10, latency set."""

    @pytest.mark.parametrize(
        ("name", "seconds"),
        [
            ("LayerGraphs/bert24_inference", 924.06),
            ("LayerGraphs/gnmt_inference", 1824.35),
            ("LayerGraphs/inceptionv3_inference", 1952.77),
            ("OperatorGraphs/bert_l-3_inference", 1099.93),
            ("OperatorGraphs/resnet50_inference", 6666.67),
        ],
    )
    def test_everything_on_cpus(self, name: str, seconds: float) -> None:
        problem = latency_input(name)
        nowhere = np.full(problem.graph.num_ops, CPU, dtype=np.int32)
        assert pieces_latency_s(problem, nowhere) == pytest.approx(seconds, abs=0.006)

    def test_the_optimum_of_bert_24(self) -> None:
        found = best_pieces(latency_input("LayerGraphs/bert24_inference"), Budget(seconds=60))
        assert found.latency_s == pytest.approx(100.2185, rel=1e-6)
        assert found.bound_s == pytest.approx(found.latency_s, rel=1e-6)

    @pytest.mark.slow
    def test_the_optimum_of_bert_l_3_and_the_best_known_of_gnmt(self) -> None:
        bert = best_pieces(latency_input("OperatorGraphs/bert_l-3_inference"), Budget(seconds=150))
        assert bert.latency_s == pytest.approx(408.4744, rel=1e-6)
        assert bert.bound_s <= bert.latency_s * (1 + 1e-9)
        gnmt = best_pieces(latency_input("LayerGraphs/gnmt_inference"), Budget(seconds=90))
        assert gnmt.latency_s <= 225.6479 * 1.01
        assert 182.43 <= gnmt.bound_s <= gnmt.latency_s

    @pytest.mark.parametrize("seed", range(15))
    def test_small_graphs_against_every_assignment(self, seed: int) -> None:
        problem = small_host(seed)
        best = min(
            slow_pieces_s(problem, piece)
            for piece in np.ndindex(*[3] * problem.graph.num_ops)
            if fits(problem, piece)
        )
        found = best_pieces(problem, Budget(count=3000))
        assert found.latency_s == pytest.approx(best, rel=1e-9)
        assert found.bound_s <= best * (1 + 1e-9)

    def test_links_between_devices_are_another_question(self) -> None:
        with pytest.raises(ProblemError, match="links 'host'"):
            best_pieces(instance_a(), Budget(seconds=1))


def small_host(seed: int) -> Problem:
    """Five ops, two accelerators and a CPU, memory for about half of them."""
    rng = np.random.default_rng(seed)
    ops: list[dict[str, Any]] = [
        {
            "uses": [t for t in range(op) if rng.random() < 0.5],
            "makes": [1],
            "resident_bytes": int(rng.integers(1, 5)),
        }
        for op in range(5)
    ]
    cluster = host_cluster(2)
    cluster = cluster_of(
        {(i, j): [0] for i in range(3) for j in range(3) if i != j},
        kind=cluster.kind.tolist(),
        on_host=(False, True),
        memory=[8, 8, 2**40],
    )
    seconds = [[float(rng.integers(1, 6)), float(rng.integers(4, 30))] for _ in range(5)]
    moves = rng.integers(0, 4, 5).astype(float)
    return problem_of(graph_of(*ops), cluster, seconds, transfer_s=moves, links=Links.HOST)


def fits(problem: Problem, piece: tuple[int, ...]) -> bool:
    held = np.bincount(piece, problem.graph.resident_bytes, 3)
    return bool((held[:2] <= 8).all())


def slow_pieces_s(problem: Problem, piece: tuple[int, ...]) -> float:
    """The published latency by going round until nothing changes (never in a circle); piece 2 is the CPUs."""
    graph = problem.graph
    arrows = [
        (int(graph.tensor_op[t]), int(v), int(t)) for t, v in zip(graph.use_tensor, graph.use_op, strict=True)
    ]
    done = [0.0] * len(piece)
    for _ in range(3 * len(piece) + 3):
        before = list(done)
        for j in (0, 1):
            mine = [v for v in range(len(piece)) if piece[v] == j]
            reads = {t for u, v, t in arrows if piece[v] == j and piece[u] != j}
            writes = {t for u, v, t in arrows if piece[u] == j and piece[v] != j}
            start = max([0.0, *(done[u] for u, v, t in arrows if t in reads and piece[v] == j)])
            took = sum(float(problem.costs.compute_s[v, 0]) for v in mine)
            took += sum(float(problem.costs.transfer_s[t]) for t in [*reads, *writes])
            for v in mine:
                done[v] = start + took
        for v in range(len(piece)):
            if piece[v] == 2:
                done[v] = max([0.0, *(done[u] for u, w, _ in arrows if w == v)]) + float(
                    problem.costs.compute_s[v, 1]
                )
        if done == before:
            return max(done)
    return float("inf")


def test_auto_asks_the_solver_and_keeps_its_bound() -> None:
    answer = api.plan(instance_d(), budget="4000x")
    assert answer.status == Status.OPTIMAL
    assert answer.score_s == pytest.approx(29)


def test_a_start_is_never_made_worse() -> None:
    problem = api.problem("gen:fork_join:40")
    start = api.plan(problem, algorithm="m_etf", budget="50x")
    answer = api.plan(problem, algorithm=placer("cpsat_latency", start=start.plan), budget="50x")
    assert answer.score_s is not None
    assert start.score_s is not None
    assert answer.score_s <= start.score_s

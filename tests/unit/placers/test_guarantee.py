"""What theory promises of list scheduling: values by hand, when nothing is promised, and greedy runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loadmaster as lm
from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.graph import Phase, edges
from loadmaster.core.problem import Links, Objective, Problem
from loadmaster.graph.build import GraphBuilder
from loadmaster.placers.heuristic._guarantee import etf_guarantee
from loadmaster.placers.registry import list_algorithms
from tests.builders import chain, cluster_of, diamond, graph_of, problem_of, star_cluster
from tests.conformance.problems import unequal_cluster
from tests.oracle import best_of_all

quick = settings(max_examples=60, deadline=None)
few = settings(max_examples=15, deadline=None)


def free_links(graph: Any, cluster: Any, times: Any, **fields: Any) -> Problem:
    return problem_of(graph, cluster, times, **{"links": Links.PARALLEL, **fields})


class TestEtf:
    def test_with_memory_to_spare_it_is_the_theorem_of_hwang(self) -> None:
        """A diamond of 1, 5, 2, 1 s with transfers of 2 s: work 9 s, the chain 7 s and two transfers."""
        found = etf_guarantee(free_links(diamond(), star_cluster(4), [1, 5, 2, 1]))
        assert found is not None
        assert found.factor == pytest.approx(2 - 1 / 4)
        assert found.plus_s == pytest.approx(2 + 2)
        assert found.seconds == pytest.approx(9 / 4 + 3 / 4 * 7 + 4)
        assert found.of_best == pytest.approx(2 - 1 / 4 + 2 / 1)
        assert found.sentence == (
            "m-ETF: at most 1.75 x the best without transfers + 4 s of transfers, here 11.5 s"
            " (4 equal devices, free links, memory not binding; Hwang et al. 1989)"
        )

    def test_the_chain_may_be_another_with_transfers_than_without(self) -> None:
        graph = graph_of({"makes": [50]}, {"uses": [0]}, {})
        found = etf_guarantee(free_links(graph, star_cluster(2), [1, 1, 9]))
        assert found is not None
        assert found.seconds == pytest.approx(11 / 2 + max(1 / 2 * 9, 1 / 2 * 2 + 50))

    def test_on_one_device_it_is_the_serial_time(self) -> None:
        found = etf_guarantee(free_links(diamond(9), star_cluster(1), [1, 5, 2, 1]))
        assert found is not None
        assert found.seconds == pytest.approx(9)
        assert (found.factor, found.plus_s) == (1, 0)

    @pytest.mark.parametrize(
        ("memory", "num_open"), [(16, 1), (19, 1), (20, 2), (26, 2), (27, 3), (49, 3), (50, 4)]
    )
    def test_scarce_memory_leaves_fewer_devices_open(self, memory: int, num_open: int) -> None:
        """Nine ops of 5 bytes, 45 in all: a device that shuts one out has at least `memory` - 4 of them."""
        graph = graph_of(*({"resident_bytes": 5} for _ in range(9)))
        found = etf_guarantee(free_links(graph, star_cluster(4, memory=memory), 1.0))
        assert found is not None
        assert found.seconds == pytest.approx(9 / num_open + (1 - 1 / num_open) * 1)
        assert found.factor == pytest.approx(4 / num_open + 1 - 1 / num_open)

    def test_one_rule_for_memory_of_k_times_the_share(self) -> None:
        """M = K D/n + d_max with K = 2, rho = 1/2: at most 2 + rho + 1/(K - 1)."""
        ops = [{"resident_bytes": 10, "makes": [{"num_bytes": 0, "keep": True}]} for _ in range(8)]
        graph = graph_of(*ops, {"uses": list(range(8))})
        cluster = star_cluster(4, memory=2 * 80 // 4 + 10, latency=0.5)
        found = etf_guarantee(free_links(graph, cluster, 1.0))
        assert found is not None
        assert found.of_best <= 2 + 0.5 + 1 / (2 - 1)
        assert found.of_best == pytest.approx(
            4 / 3 + 1 - 1 / 3 + 0.5
        )  # 80 bytes never shut two of 40 and more
        assert "always room on 3" in found.sentence

    def test_links_may_differ(self) -> None:
        cluster = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 0], rate=[1.0, 4.0])
        found = etf_guarantee(free_links(chain(2, num_bytes=8), cluster, 1.0))
        assert found is not None
        assert found.plus_s == pytest.approx(8)

    def test_contended_links_do_where_transfers_take_no_time(self) -> None:
        assert etf_guarantee(problem_of(chain(2, num_bytes=0), star_cluster(2), 1.0)) is not None
        assert etf_guarantee(problem_of(chain(2, num_bytes=1), star_cluster(2), 1.0)) is None

    @pytest.mark.parametrize(
        ("problem", "why"),
        [
            (problem_of(diamond(), star_cluster(2), 1.0), "links contend"),
            (free_links(diamond(), unequal_cluster(), [[1, 2]] * 4), "devices differ"),
            (free_links(chain(2), star_cluster(2), 1.0, pinned=[0, -1]), "a pin"),
            (free_links(chain(2), star_cluster(2), 1.0, issue_s=1.0), "issue times"),
            (free_links(graph_of({"group": 0}, {"group": 0}), star_cluster(2), 1.0), "a group"),
            (free_links(chain(2), star_cluster(2), 1.0, objective=Objective.THROUGHPUT), "a pipeline"),
            (
                free_links(chain(2), cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 0], engine=[1, 1]), 1.0),
                "one engine",
            ),
            (
                free_links(
                    graph_of({"phase": Phase.PARAM, "makes": [1]}, {"uses": [0]}), star_cluster(2), [0, 1]
                ),
                "a parameter rides with its reader",
            ),
            (
                free_links(graph_of({"resident_bytes": 9}), star_cluster(2, memory=12), 1.0),
                "no room for certain",
            ),
            (
                free_links(graph_of(*({"makes": [5]} for _ in range(9))), star_cluster(4, memory=35), 1.0),
                "scarce memory that is freed",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_without_its_assumptions_nothing_is_promised(self, problem: Problem, why: str) -> None:
        assert etf_guarantee(problem) is None, why


@st.composite
def equal_problems(draw: st.DrawFn, *, max_ops: int, max_devices: int, small: bool = False) -> Problem:
    """Ops on equal devices with free links; outputs stay, memory is ample or scarce."""
    num = draw(st.integers(2, max_ops))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    builder = GraphBuilder("equal")
    given_s: list[float] = []
    for op in range(num):
        builder.op(f"op{op}", resident_bytes=int(rng.integers(0, 4)), workspace_bytes=int(rng.integers(0, 2)))
    for i in range(num):
        users = [j for j in range(i + 1, num) if rng.random() < 2.0 / num]
        builder.use(builder.tensor(i, int(rng.integers(0, 3)), keep=True), *users)
        given_s.append(float(rng.integers(0, 5 if small else 20)) / 4)
    times = rng.integers(1, 6, num) if not small else rng.integers(4, 8, num) / 4
    devices = draw(st.integers(1, max_devices))
    memory = draw(st.sampled_from((UNLIMITED_BYTES, 40, 20, 60)))
    cluster = star_cluster(devices, memory=memory)
    return free_links(builder.build(), cluster, times.astype(float), transfer_s=given_s)


def greedy_s(problem: Problem, rng: np.random.Generator) -> float:
    """One greedy run, ties at random: no device is idle that has room and all inputs of an op."""
    graph, devices = problem.graph, problem.cluster.num_devices
    op_s, room = problem.device_compute_s[:, 0].tolist(), int(problem.cluster.usable_bytes.min())
    room -= int(graph.workspace_bytes.max())
    inputs: list[list[int]] = [[] for _ in op_s]
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        inputs[op].append(tensor)
    held: list[set[int]] = [set() for _ in range(devices)]
    used, free = [0] * devices, [0.0] * devices
    home: dict[int, int] = {}
    end: dict[int, float] = {}
    now = 0.0

    def there(tensor: int, device: int) -> float:
        maker = int(graph.tensor_op[tensor])
        return end[maker] + (0.0 if home[maker] == device else float(problem.costs.transfer_s[tensor]))

    def added(op: int, device: int) -> int:
        new = [t for t in inputs[op] if t not in held[device] and home[int(graph.tensor_op[t])] != device]
        return int(graph.resident_bytes[op] + graph.tensor_bytes[[op, *new]].sum())

    while len(end) < len(op_s):
        ready = [
            o
            for o in range(len(op_s))
            if o not in end and all(int(graph.tensor_op[t]) in end for t in inputs[o])
        ]
        could = [
            (max([free[d], *(there(t, d) for t in inputs[o])]), o, d)
            for o in ready
            for d in range(devices)
            if used[d] + added(o, d) <= room
        ]
        now = max(now, min(start for start, _, _ in could))
        startable = [(o, d) for start, o, d in could if start <= now]
        op, device = startable[rng.integers(len(startable))]
        used[device] += added(op, device)
        held[device].update(inputs[op])
        home[op], end[op] = device, now + op_s[op]
        free[device] = end[op]
    return max(end.values())


@quick
@given(equal_problems(max_ops=12, max_devices=4), st.integers(0, 2**32 - 1))
def test_no_greedy_run_exceeds_the_guarantee(problem: Problem, seed: int) -> None:
    found = etf_guarantee(problem)
    if found is not None:
        assert found.seconds is not None
        assert greedy_s(problem, np.random.default_rng(seed)) <= found.seconds * (1 + 1e-12)


def test_problems_with_scarce_memory_are_among_them() -> None:
    """Guards the property above against problems that are all easy, or without a promise."""
    seen: set[str] = set()

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(equal_problems(max_ops=12, max_devices=4))
    def look(problem: Problem) -> None:
        found = etf_guarantee(problem)
        seen.add("none" if found is None else "ample" if "not binding" in found.sentence else "scarce")

    look()
    assert seen == {"none", "ample", "scarce"}


@few
@given(equal_problems(max_ops=5, max_devices=2), st.integers(0, 2**32 - 1))
def test_the_guarantee_is_within_its_factor_of_the_best(problem: Problem, seed: int) -> None:
    found = etf_guarantee(problem)
    if found is None:
        return
    nothing = problem_of(
        problem.graph,
        problem.cluster,
        problem.costs.compute_s,
        transfer_s=np.zeros(problem.graph.num_tensors),
        links=Links.PARALLEL,
    )
    best, without = best_of_all(problem).any_s, best_of_all(nothing).any_s
    assert best is not None
    assert without is not None
    assert found.seconds is not None
    assert found.factor is not None
    assert found.seconds <= (found.factor * without + found.plus_s) * (1 + 1e-12)
    assert greedy_s(problem, np.random.default_rng(seed)) <= found.of_best * best * (1 + 1e-12)


@pytest.mark.skipif("m_etf" not in list_algorithms(), reason="m_etf is not registered")
@quick
@given(equal_problems(max_ops=12, max_devices=4))
def test_m_etf_keeps_its_promise(problem: Problem) -> None:
    found = etf_guarantee(problem)
    if found is not None:
        answer = lm.plan(problem, algorithm="m_etf", budget="1000x")
        assert answer.score_s is not None
        assert found.seconds is not None
        assert answer.score_s <= found.seconds * (1 + 1e-12)


@pytest.mark.skipif("m_sct" not in list_algorithms(), reason="m_sct is not registered")
@few
@given(equal_problems(max_ops=5, max_devices=2, small=True))
def test_m_sct_is_within_what_is_published_of_the_best(problem: Problem) -> None:
    factor, best = published_sct_factor(problem), best_of_all(problem).fitting_s
    if factor is not None:
        answer = lm.plan(problem, algorithm="m_sct", budget="1000x")
        assert best is not None
        assert answer.score_s is not None
        assert answer.score_s <= factor * best * (1 + 1e-12)


def published_sct_factor(problem: Problem) -> float | None:
    """Hanen, Munier: equal links, room for everything, no transfer longer than the shortest op."""
    found, n = etf_guarantee(problem), problem.cluster.num_devices
    if found is None or found.factor > 2 - 1 / n + 1e-12:
        return None
    rho = found.of_best - found.factor
    return 1 + (1 - 1 / n) * 2 * (1 + rho) / (2 + rho) if rho <= 1 else None


def test_edges_of_the_test_problems_are_many() -> None:
    """Guards the properties above against graphs without dependencies."""
    counts: list[int] = []

    @settings(max_examples=30, deadline=None, database=None)
    @given(equal_problems(max_ops=12, max_devices=4))
    def look(problem: Problem) -> None:
        counts.append(len(edges(problem.graph)[0]))

    look()
    assert max(counts) >= 8

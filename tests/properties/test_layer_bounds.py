"""The bound over the layers of training steps, against plans that just fit and against all plans."""

from dataclasses import replace

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Status
from loadmaster.core.problem import Problem
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.bounds import window_options
from loadmaster.simulator.bounds.layer_search import bound_by_layers
from loadmaster.simulator.bounds.spine import find_spine
from tests.builders import cluster_of, problem_of
from tests.odd_steps import draw_plan, fit_memory, odd_step

SLACK = 1 + 1e-9


def name_false_bound(seed: int) -> str:
    """A plan that takes all the memory there is, and is faster than the bound, or ''."""
    problem, rng = odd_step(seed), np.random.default_rng(seed + 1_000_000)
    for _ in range(3):
        tight, seconds = fit_memory(problem, draw_plan(problem, rng))
        for upper, width in ((1.5 * seconds, 4), (1.02 * seconds, 32)):
            found = bound_by_layers(tight, upper, most_branches=8, width=width) if seconds > 0 else 0.0
            if found > seconds * SLACK:
                return f"odd_step({seed}): {found} above {seconds}"
    return ""


@pytest.mark.parametrize("block", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 9))])
def test_no_plan_that_takes_all_memory_beats_the_bound(block: int) -> None:
    seeds = range(30 * block, 30 * block + (30 if block else 6))
    assert not [said for seed in seeds if (said := name_false_bound(seed))]


@pytest.mark.parametrize("block", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 9))])
def test_no_plan_beats_the_bound_where_units_are_at_an_end_or_elsewhere(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_options, "_MOST_KEPT", 3)  # so that amounts are rounded down, too
    for seed in range(1000 + 30 * block, 1000 + 30 * block + (30 if block else 4)):
        problem, rng = odd_step(seed), np.random.default_rng(seed)
        tight, seconds = fit_memory(problem, draw_plan(problem, rng))
        for upper in (1.5 * seconds, 1.02 * seconds) if seconds > 0 else ():
            found = bound_by_layers(tight, upper, most_branches=8, width=16, most_options=1, coarse=True)
            assert found <= seconds * SLACK, seed


def two_layers(seed: int) -> Problem:
    """Six ops that brute force can try: three layers, of which each leaves bytes for its backward op."""
    rng = np.random.default_rng(seed)
    build = GraphBuilder("three layers")
    outputs: list[int] = []
    for at in range(3):
        op = build.op(f"f{at}", group=at)
        if at:
            build.use(outputs[-1], op)
        outputs.append(build.tensor(op, int(rng.integers(1, 6))))
    gradient = outputs[-1]
    for at in (2, 1, 0):
        op = build.op(f"b{at}", phase=Phase.BACKWARD, mirror=at, group=at)
        build.use(gradient, op)
        build.use(outputs[at], op)
        gradient = build.tensor(op, int(rng.integers(1, 6)))
    cluster = cluster_of(
        {(0, 1): [0], (1, 0): [1]},
        kind=[0, 1],
        on_host=(False, False),
        memory=[int(rng.integers(4, 14)), int(rng.integers(4, 30))],
        rate=float(rng.choice([1.0, 4.0])),
    )
    return problem_of(build.build(), cluster, rng.integers(1, 7, (6, 2)) / 2.0)


@pytest.mark.parametrize("seed", range(30))
def test_of_three_layers_it_is_never_above_the_best_of_all_plans(seed: int) -> None:
    problem = two_layers(seed)
    best = api.plan(problem, algorithm="brute_force", budget="1000000x")
    if best.score_s is None:
        return
    assert best.status == Status.OPTIMAL
    assert bound_by_layers(problem, 2 * best.score_s, most_branches=20) <= best.score_s * SLACK


@pytest.mark.parametrize("block", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 5))])
def test_of_odd_steps_it_is_never_above_the_best_that_is_proven(block: int) -> None:
    """Memory is what a random plan needs, so that little else fits; the best plan is proven by trying all."""
    for seed in range(20 * block, 20 * block + 20):
        problem, rng = odd_step(seed, most_layers=3), np.random.default_rng(seed)
        tight, seconds = fit_memory(problem, draw_plan(problem, rng))
        if seconds == 0:
            continue
        best = api.plan(tight, algorithm="branch_and_bound", budget="3000x")
        if best.status != Status.OPTIMAL or best.score_s is None:
            continue
        for share, width in ((2.0, 8), (1.05, 64)):
            found = bound_by_layers(tight, share * best.score_s, most_branches=12, width=width)
            assert found <= best.score_s * SLACK, seed


def test_it_sees_that_a_slow_device_must_take_whole_layers() -> None:
    """Four layers of 10 bytes; the fast device holds three. In fractions a slow second is spread."""
    build = GraphBuilder("four layers")
    saved: list[int] = []
    for at in range(4):
        op = build.op(f"f{at}", group=at)
        if at:
            build.use(saved[-1], op)
        saved.append(build.tensor(op, 10))
    gradient = None
    for at in (3, 2, 1, 0):
        op = build.op(f"b{at}", phase=Phase.BACKWARD, mirror=at, group=at)
        build.use(saved[at], op)
        if gradient is not None:
            build.use(gradient, op)
        gradient = build.tensor(op, 0)
    cluster = cluster_of(
        {(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False), memory=[36, 100], rate=10.0
    )
    problem = problem_of(build.build(), cluster, [[1.0, 5.0]] * 8)
    best = api.plan(problem, algorithm="branch_and_bound", budget="20000x")
    assert best.score_s is not None
    found = bound_by_layers(problem, 2 * best.score_s, most_branches=50)
    assert best.score_s * 0.9 <= found <= best.score_s * SLACK


def test_it_sees_that_gradients_of_weights_cannot_fill_the_forward_pass() -> None:
    """The first layer takes 3 s on one device; all that the other one does comes after it: 8 s."""
    build = GraphBuilder("three layers with weights")
    outputs: list[int] = []
    for at in range(3):
        op = build.op(f"f{at}", group=at)
        if at:
            build.use(outputs[-1], op)
        outputs.append(build.tensor(op, 0))
    gradient = outputs[-1]
    for at in (2, 1, 0):
        parts = ("b", "g") if at else ("b",)
        made = [build.op(f"{part}{at}", phase=Phase.BACKWARD, mirror=at, group=at) for part in parts]
        for op in made:
            build.use(gradient, op)
        gradient = build.tensor(made[0], 0)
    cluster = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 0], on_host=(False,))
    pinned = np.array([1, 0, 0, 0, 0, 0, 0, 1], dtype=np.int32)
    problem = problem_of(
        build.build(), cluster, [[3.0], [1.0], [1.0], [1.0], [2.0], [1.0], [2.0], [0.5]], pinned=pinned
    )
    best = api.plan(problem, algorithm="brute_force", budget="1000000x")
    assert best.score_s == 11.0
    assert bound_by_layers(problem, 20.0, most_branches=50) == pytest.approx(11.0, rel=1e-6)


def test_it_counts_weights_that_both_passes_read() -> None:
    """Four layers of 8 bytes and a weight of 2: without weights all of it would fit on the fast device."""
    build = GraphBuilder("four layers with weights")
    weights = [
        build.tensor(build.op(f"w{at}", phase=Phase.PARAM, group=10 + at, resident_bytes=2), 2)
        for at in range(4)
    ]
    saved: list[int] = []
    for at in range(4):
        op = build.op(f"f{at}", group=at)
        for t in (weights[at], *saved[-1:]):
            build.use(t, op)
        saved.append(build.tensor(op, 8))
    gradient = None
    for at in (3, 2, 1, 0):
        op = build.op(f"b{at}", phase=Phase.BACKWARD, mirror=4 + at, group=at)
        for t in (weights[at], saved[at]) if gradient is None else (weights[at], saved[at], gradient):
            build.use(t, op)
        gradient = build.tensor(op, 0)
    cluster = cluster_of(
        {(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False), memory=[36, 100], rate=100.0
    )
    problem = problem_of(build.build(), cluster, [[0.0, 0.0]] * 4 + [[1.0, 5.0]] * 8)
    best = api.plan(problem, algorithm="branch_and_bound", budget="20000x")
    assert best.score_s is not None
    assert best.score_s > 16.0
    found = bound_by_layers(problem, 2 * best.score_s, most_branches=50)
    assert best.score_s * 0.95 <= found <= best.score_s * SLACK


def test_what_is_light_beside_many_layers_leaves_them_on_the_spine() -> None:
    """Keys of cross-attention: from the first layer, for the last one."""
    build = GraphBuilder("five layers and keys beside them")
    outputs: list[int] = []
    for at in range(6):
        op = build.op(f"f{at}", group=at)
        if at:
            build.use(outputs[-1], op)
        outputs.append(build.tensor(op, 1))
        if at == 0:
            keys = build.op("keys", group=9)
            build.use(outputs[0], keys)
            of_keys = build.tensor(keys, 1)
    build.use(of_keys, op)
    gradient = outputs[-1]
    mirrors = [0, *range(2, 7)]
    for at in range(5, -1, -1):
        op = build.op(f"b{at}", phase=Phase.BACKWARD, mirror=mirrors[at], group=at)
        build.use(gradient, op)
        gradient = build.tensor(op, 1)
    graph = build.build()
    spine = find_spine(graph, np.where(np.arange(graph.num_ops) == keys, 1.0, 2.0))
    assert spine is not None
    assert spine.forward == tuple(mirrors)


def test_units_that_are_tied_across_layers_are_counted_once() -> None:
    """A group of two layers' ops: its work and bytes belong to one device, and to one layer of the spine."""
    problem = odd_step(109)
    spine = find_spine(problem.graph, problem.device_compute_s.min(axis=1))
    assert spine is not None
    groups = [int(problem.graph.group[op]) for op in spine.forward]
    assert len(set(groups)) == len(groups)


def test_it_says_nothing_of_a_step_without_a_backward_pass() -> None:
    problem = two_layers(0)
    forward = replace(problem.graph, phase=np.zeros(6, dtype=np.int8), mirror=np.full(6, -1, dtype=np.int32))
    assert bound_by_layers(replace(problem, graph=forward), 100.0, most_branches=5) == 0.0


def test_a_time_that_every_plan_exceeds_is_all_that_is_proven() -> None:
    problem = two_layers(3)
    assert bound_by_layers(problem, 0.5, most_branches=5) == pytest.approx(0.5, rel=1e-9)
    assert bound_by_layers(problem, 0.5, most_branches=5) <= 0.5

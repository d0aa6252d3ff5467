"""Stretches of the forward order: rows of segments, and steps that gain from a second device."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, Run
from loadmaster.placers.registry import placer
from loadmaster.placers.search.segments import (
    _insert_segment,
    _make_stripes,
    _move_segment,
    _normalize_segments,
)
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests import reference
from tests.builders import graph_of, problem_of, star_cluster

LAYERS = 5


def step(num_bytes: int = 0) -> Graph:
    """Layers in a row: forward, then for each layer the gradient of its input and that of its weight."""
    ops: list[dict[str, object]] = []
    for layer in range(LAYERS):
        ops.append({"group": layer, "uses": [layer - 1] if layer else [], "makes": [num_bytes]})
    for layer in reversed(range(LAYERS)):
        back = {"group": layer, "mirror": layer, "phase": Phase.BACKWARD, "uses": [len(ops) - 1]}
        ops.append({**back, "makes": [num_bytes]})
    for layer in reversed(range(LAYERS)):  # the gradient it needs was made by the layer after it
        after = LAYERS - 1 if layer == LAYERS - 1 else 2 * LAYERS - 2 - layer
        ops.append({"group": layer, "mirror": layer, "phase": Phase.BACKWARD, "uses": [after], "makes": [0]})
    return graph_of(*ops)


def asked(problem: Problem, count: int = 3000, seed: int = 0) -> Placement:
    """The answer under a count budget."""
    simulator = prepare(problem)
    run = Run(
        budget=Budget(count=count),
        rng=np.random.default_rng(seed),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=lower_bound(problem),
    )
    return placer("segments")(problem, run)


def best_by_hand(problem: Problem) -> float:
    """Every layer on every device, in three orders, by the second evaluator."""
    tried = []
    for devices in itertools.product(range(problem.cluster.num_devices), repeat=LAYERS):
        plan = plan_of(np.array(devices * 3, dtype=np.int32)[_layer_of()])
        for priority in (np.arange(3 * LAYERS), np.zeros(3 * LAYERS)):
            ordered = replace(plan, priority=priority.astype(np.int32))
            tried.append(reference.simulate(problem, ordered, dispatch="ready", links="shared").step_s)
    return min(tried)


def _layer_of() -> np.ndarray:
    forth, back = list(range(LAYERS)), list(reversed(range(LAYERS)))
    return np.array(forth + back + back)


class TestStep:
    """Answers."""

    def test_weights_gradients_are_made_while_the_other_device_goes_on(self) -> None:
        problem = problem_of(step(), star_cluster(2), 1.0)
        placement = asked(problem)
        assert placement.score_s is not None
        assert placement.score_s < 3 * LAYERS  # everything on one device
        assert placement.score_s <= best_by_hand(problem) + 1e-9

    def test_slow_links_leave_everything_on_one_device(self) -> None:
        problem = problem_of(step(1000), star_cluster(2), 1.0)
        assert asked(problem).score_s == 3 * LAYERS

    def test_devices_too_small_for_all_share_the_row(self) -> None:
        graph = replace(step(), resident_bytes=np.array([10] * LAYERS + [0] * 2 * LAYERS, dtype=np.int64))
        placement = asked(problem_of(graph, star_cluster(3, memory=20), 1.0))
        assert placement.fits
        assert placement.plan is not None
        assert np.bincount(placement.plan.device[:LAYERS], minlength=3).max() == 2

    def test_the_score_is_what_the_second_evaluator_says(self) -> None:
        problem = problem_of(step(1), star_cluster(3, rate=4.0), 1.0)
        placement = asked(problem)
        assert placement.plan is not None
        again = reference.simulate(problem, placement.plan, dispatch="in_order", links="shared")
        assert again.step_s == placement.score_s

    def test_one_seed_gives_one_plan(self) -> None:
        problem = problem_of(step(1), star_cluster(3, rate=4.0), 1.0)
        first, second = asked(problem, 200), asked(problem, 200)
        assert first.plan is not None
        assert second.plan is not None
        assert first.plan.device.tolist() == second.plan.device.tolist()


def spread(row: tuple[tuple[int, int], ...]) -> list[int]:
    """The device of every unit."""
    begin, devices = 0, []
    for end, device in row:
        devices += [device] * (end - begin)
        begin = end
    return devices


rows = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(
    lambda devices: _normalize_segments([(i + 1, d) for i, d in enumerate(devices)], len(devices))
)


class TestRows:
    """Segments against a plain list of devices."""

    @given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def test_a_tidy_row_says_the_same_and_neighbours_differ(self, devices: list[int]) -> None:
        row = _normalize_segments([(i + 1, d) for i, d in enumerate(devices)], len(devices))
        assert spread(row) == devices
        assert all(a[1] != b[1] for a, b in itertools.pairwise(row))

    @given(rows, st.data())
    def test_a_stretch_laid_over_a_row_changes_that_stretch_alone(self, row, data) -> None:  # type: ignore[no-untyped-def]
        expected = spread(row)
        begin = data.draw(st.integers(0, len(expected) - 1))
        end, device = data.draw(st.integers(begin + 1, len(expected))), data.draw(st.integers(0, 2))
        expected[begin:end] = [device] * (end - begin)
        assert (
            spread(_normalize_segments(_insert_segment(list(row), begin, end, device), len(expected)))
            == expected
        )

    @example(((1, 0), (2, 1), (3, 0)), 6920)  # an end slid beyond the row
    @given(rows, st.integers(0, 2**32 - 1))
    def test_a_moved_row_is_a_row(self, row, seed) -> None:  # type: ignore[no-untyped-def]
        num = row[-1][0]
        moved = _move_segment(row, np.random.default_rng(seed), num, 3)
        assert len(spread(moved)) == num
        assert all(a[0] < b[0] and a[1] != b[1] for a, b in itertools.pairwise(moved))

    def test_stripes_are_spread_evenly(self) -> None:
        assert spread(_make_stripes(12, 0, 1, 2, 0.5)) == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0]

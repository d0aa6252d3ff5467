"""What fits and what cannot: certificates and placements against every plan of tiny problems.

The oracle scores all assignments in all orders with the reference simulator.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from loadmaster import api
from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph, held_bytes
from loadmaster.core.problem import Problem
from loadmaster.placers.placement_units import load_cargo
from loadmaster.placers.registry import placer, why_not
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from tests.builders import graph_of, problem_of, star_cluster
from tests.oracle import assignments, best_of_all
from tests.strategies import graphs, problems
from tests.unit.placers.test_memory_first import tight
from tests.unit.placers.test_repair import by_hand

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPREAD = "kept tensors, and need"  # words of the certificate that counts copies


@st.composite
def kept_problems(draw: st.DrawFn, *, max_ops: int, max_devices: int) -> Problem:
    """Every tensor kept, no workspace, on devices with hardly more memory than everything holds."""
    graph = draw(st.one_of(graphs(max_ops), trees(max_ops)))
    everything, nothing = np.ones(graph.num_tensors, dtype=np.bool_), np.zeros(graph.num_ops, dtype=np.int64)
    graph = replace(graph, keep=everything, workspace_bytes=nothing)
    num = draw(st.integers(2, max_devices))
    share = -(-int(held_bytes(graph).sum()) // num)
    slack = draw(st.sampled_from((0, 0, 1, 2, 4)))
    memory = [max(share + slack + draw(st.sampled_from((0, 0, 0, 1, -1))), 1) for _ in range(num)]
    cluster = replace(star_cluster(num), memory_bytes=np.array(memory))
    return problem_of(graph, cluster, 1.0)


@st.composite
def trees(draw: st.DrawFn, max_ops: int) -> Graph:
    """Every op but the first uses the tensor of one before it, or of two."""
    ops: list[dict[str, Any]] = []
    for op in range(draw(st.integers(2, max_ops))):
        uses = {draw(st.integers(0, op - 1)) for _ in range(draw(st.integers(1, 2)))} if op else set()
        size = draw(st.integers(1, 3))
        ops.append({"resident_bytes": draw(st.integers(0, 4)), "uses": sorted(uses), "makes": [size]})
    return graph_of(*ops)


def some_assignment_fits(problem: Problem, together: list[int] | None = None) -> bool:
    """Where all is kept a device's peak is all that comes to it, in any order: nothing is simulated."""
    usable, unit = problem.cluster.usable_bytes.tolist(), together or list(range(problem.graph.num_ops))
    for device in assignments(problem):
        place = dict(zip(unit, device, strict=True))
        if all(place[u] == d for u, d in zip(unit, device, strict=True)):
            load = by_hand(problem, list(device))
            if all(held <= room for held, room in zip(load, usable, strict=True)):
                return True
    return False


@quick
@given(kept_problems(max_ops=6, max_devices=3))
def test_no_certificate_where_an_assignment_fits(problem: Problem) -> None:
    if lower_bound(problem).infeasible:
        assert not some_assignment_fits(problem)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kept_problems(max_ops=4, max_devices=3))
def test_no_certificate_where_the_oracle_has_a_plan(problem: Problem) -> None:
    if lower_bound(problem).infeasible:
        assert best_of_all(problem).fitting_s is None


def test_the_certificate_of_copies_is_often_the_only_one() -> None:
    """Guards the properties above: problems where it speaks, and where it must not."""
    seen = {"spoke": 0, "fits": 0}

    @settings(max_examples=250, deadline=None, database=None, derandomize=True)
    @given(kept_problems(max_ops=6, max_devices=3))
    def look(problem: Problem) -> None:
        seen["spoke"] += SPREAD in lower_bound(problem).infeasible
        seen["fits"] += some_assignment_fits(problem)

    look()
    assert seen["spoke"] >= 3
    assert seen["fits"] >= 30


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kept_problems(max_ops=6, max_devices=3))
def test_memory_first_finds_a_plan_wherever_everything_is_kept_and_one_fits(problem: Problem) -> None:
    """Parameters ride with their reader, as in all placers: such plans only."""
    unit = load_cargo(problem).of_op
    fits = some_assignment_fits(problem, together=unit.tolist())
    placement = api.plan(problem, algorithm="memory_first", budget="1000x")
    assert placement.fits == fits


@quick
@given(problems(6, 3))
def test_memory_first_is_never_above_memory_and_keeps_every_rule(problem: Problem) -> None:
    if why_not(placer("memory_first"), problem):
        return
    placement = api.plan(problem, algorithm="memory_first", budget="40x")
    if placement.plan is not None:
        assert api.check_plan(problem, placement.plan) == []


@pytest.mark.slow
def test_no_plan_of_layered_300_fits_at_2_percent() -> None:
    """The copies that four parts of at most 1.02 / 4 of the bytes must have take more than there is.

    Give every tensor a length between 0 and 1. In the lengths that are 1 for copied tensors and 0 for the
    rest, ops nearer than 1 to op u are on its device: the sum over all v of bytes(v) x max(0, 1 - distance of
    u and v) is at most that device's memory, for every u. So the least sum of bytes(t) x length(t) under
    these constraints is no more than the bytes copied. With paths in place of distances a constraint is
    linear and still holds; shortest paths find those that are broken.
    """
    problem = tight("layered", 300, 1.02)
    size = held_bytes(problem.graph).astype(np.float64)
    room = float(problem.cluster.usable_bytes[0])
    spare = 4 * room - size.sum()
    assert least_copied(problem, size, room, enough=1.01 * spare) > 1.01 * spare


def least_copied(problem: Problem, size: Floats, room: float, *, enough: float) -> float:
    """Bytes that parts of at most `room` copy at least; stops when that is `enough`."""
    graph = problem.graph
    num, length = graph.num_ops, np.zeros(graph.num_ops)
    used = np.unique(graph.use_tensor)
    op, net = np.append(graph.use_op, used), np.append(graph.use_tensor, used)  # tensor i is made by op i
    price = np.where(np.isin(np.arange(num), used), graph.tensor_bytes, 0) / size.sum()
    rows: list[Floats] = []
    limits: list[float] = []
    for _ in range(120):
        ends = np.append(op, net + num), np.append(net + num, op)
        weights = np.append(length[net] + 1e-9, np.full(len(net), 1e-9))  # into a tensor d, out of it nothing
        away, before = dijkstra(
            csr_array((weights, ends), shape=(2 * num, 2 * num)),
            indices=np.arange(num),
            return_predecessors=True,
        )
        over = (np.maximum(1.0 - away[:, :num], 0.0) * size).sum(axis=1) - room
        for u in np.argsort(-over)[:60]:
            near = np.flatnonzero(away[u, :num] < 1.0)
            passed = np.zeros(num)
            for v in near:
                at = int(v)
                while at != u:
                    if at >= num:
                        passed[at - num] += size[v]
                    at = int(before[u, at])
            rows.append(-passed / size.sum())
            limits.append((room - size[near].sum()) / size.sum())
        found = linprog(price, A_ub=np.array(rows), b_ub=limits, bounds=(0, 1))
        length = np.maximum(found.x, 0.0)
        if found.fun * size.sum() > enough:
            break
    return float(found.fun * size.sum())

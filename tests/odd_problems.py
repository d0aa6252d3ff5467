"""Small problems in which bounds go wrong most easily: joins without time, views, pins, ties, little room.

Drawn by a seed, not by hypothesis, so that a recorded run can name each one and take ten thousand of them.
"""

from typing import Any

import numpy as np

from loadmaster import api
from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Status
from loadmaster.core.problem import FREE, Links, Objective, Problem, Split
from loadmaster.placers.bounds import quick_bound
from loadmaster.simulator.bounds.favourite_children import find_favourites
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step
from loadmaster.simulator.bounds.travel import compute_travel
from tests.builders import cluster_of, graph_of, problem_of

SLACK = 1 + 1e-9
_LINKS = (Links.SHARED, Links.SHARED, Links.PARALLEL, Links.HALF_DUPLEX)


def odd_problem(seed: int, objective: Objective = Objective.STEP) -> Problem:
    """Three to six ops on two or three devices, every feature with every other."""
    rng = np.random.default_rng(seed)
    num, devices = int(rng.integers(3, 7)), int(rng.integers(2, 4))
    devices = 2 if num == 6 else devices
    graph = _graph(rng, num)
    kinds = int(rng.integers(1, devices + 1))
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    links = int(rng.integers(1, 4))
    total = int(graph.resident_bytes.sum() + graph.tensor_bytes.sum())
    tight = [int(rng.integers(total // 3, total + 3)) + 1 for _ in range(devices)]
    cluster = cluster_of(
        {pair: rng.permutation(links)[: int(rng.integers(1, links + 1))].tolist() for pair in pairs},
        kind=[int(rng.integers(0, kinds)) for _ in range(devices)],
        on_host=[False] * kinds,
        engine=list(range(devices)) if rng.random() < 0.8 else [0] * devices,
        memory=tight if rng.random() < 0.5 else UNLIMITED_BYTES,
        rate=[1.0, 2.0, 4.0][:links],
        latency=[0.0, 0.5, 1.0][:links],
    )
    seconds = rng.integers(0, 9, (num, kinds)) / 2.0
    seconds[rng.random(num) < 0.45] = 0.0
    pinned = np.full(num, FREE, dtype=np.int32)
    for op in range(num):
        if rng.random() < 0.25:
            pinned[op] = int(rng.integers(0, devices))
    for label in np.unique(graph.group[graph.group >= 0]):  # ops that are tied are pinned alike
        mates = graph.group == label
        pinned[mates] = pinned[mates].max()
    fields: dict[str, Any] = {"links": _LINKS[int(rng.integers(0, 4))], "pinned": pinned}
    if objective == Objective.THROUGHPUT:
        fields |= {"objective": objective, "split": (Split.FREE, Split.CHAIN)[int(rng.integers(0, 2))]}
    return problem_of(graph, cluster, seconds, **fields)


def _graph(rng: np.random.Generator, num: int) -> Graph:
    """Joins of several inputs; some outputs are views of an input's storage."""
    ops: list[dict[str, Any]] = []
    storage: list[int] = []
    for op in range(num):
        uses = [t for t in range(op) if rng.random() < 0.55]
        bases = [storage[t] for t in uses]
        made: dict[str, Any] = {"num_bytes": int(rng.integers(0, 9)), "keep": bool(rng.random() < 0.15)}
        alone = [base for base in bases if bases.count(base) == 1]
        if alone and rng.random() < 0.3:
            made["storage"] = alone[0]
        storage.append(made.get("storage", op))
        ops.append(
            {
                "uses": uses,
                "makes": [made],
                "resident_bytes": int(rng.integers(0, 6)) if rng.random() < 0.5 else 0,
                "workspace_bytes": int(rng.integers(0, 3)) if rng.random() < 0.3 else 0,
                "group": int(rng.integers(0, 2)) if rng.random() < 0.25 else -1,
            }
        )
    return graph_of(*ops)


def find_false_bound(problem: Problem) -> str:
    """Which bound, or proof that nothing fits, is contradicted by trying every plan; '' where none is."""
    answer = api.plan(problem, algorithm="brute_force", budget="1000000x")
    assert answer.status in (Status.OPTIMAL, Status.INFEASIBLE), "every plan was tried"
    best = answer.score_s
    quick = quick_bound(problem)
    if best is None:
        return ""
    if quick.infeasible:
        return f"proves that nothing fits: {quick.infeasible}"
    bounds = {"quick": quick.seconds}
    if problem.objective == Objective.STEP:
        bounds |= {
            "lower": lower_bound(problem).seconds,
            "travel": compute_travel(problem).bound_s,
            "step programme": solve_relaxed_step(problem).bound_s,
            "small communication": find_favourites(problem).bound_s,
        }
    above = {name: value for name, value in bounds.items() if value > best * SLACK + 1e-12}
    return ", ".join(f"{name} {value} above {best}" for name, value in above.items())

"""From ops to the classes of a chain: what must, or may as well, share a stage (exact.md section 4).

1. Ops of one group are a class; parameters ride with their first reader.
2. A class of backward ops alone stands between its neighbours, the backward order turned, as the rules say.
3. Classes that feed each other in a circle share a stage: strongly connected components are fused.
4. A class that takes no time, has nothing to do with backward ops and exactly one neighbour joins it. Its
   bytes and its time are left out of the model, so that the optimum is not above the problem's.

Riding parameters leave chains out that the rules allow: `MaxLoad.restricted` says so, and such a model's
optimum is no bound.
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Bools, Ints, sorted_unique
from loadmaster.core.check import stage_order
from loadmaster.core.graph import Phase, edges
from loadmaster.core.problem import Problem, allowed_devices
from loadmaster.placers.exact._maxload.model import MaxLoad, make_model, riding_units
from loadmaster.placers.placement_units import Cargo

_NO_TIME_S = 1e-6  # the authors': such classes join their only neighbour


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The model of a chain, and how its classes are made of units."""

    model: MaxLoad
    cargo: Cargo
    class_of_unit: Ints  # [units]


def chain_model(problem: Problem, *, merge: bool = True) -> Chain:
    """The classes of a problem in which every chain of stages is a chain of ideals."""
    cargo, riding = riding_units(problem)
    unit, num = cargo.of_op, cargo.num_units
    before, after = stage_order(problem.graph)
    source, target = _distinct_edges(unit[before], unit[after], num)
    component = _strong_components(source, target, num)
    ends = _distinct_edges(component[source], component[target], int(component.max()) + 1)
    into, absorbed = _absorb_idle_classes(problem, component[unit], *ends)
    class_of_unit = _renumber_labels(into[component] if merge else component)
    model = make_model(problem, class_of_unit[unit], int(class_of_unit.max()) + 1)
    if merge and absorbed.any():
        model = _without_absorbed(problem, model, absorbed[component[unit]])
    reason = "parameters are kept with their first reader" if riding else ""
    order = _distinct_edges(class_of_unit[source], class_of_unit[target], model.num_classes)
    model = replace(model, source=order[0], target=order[1], restricted=reason)
    return Chain(model, cargo, class_of_unit)


def _distinct_edges(source: Ints, target: Ints, num: int) -> tuple[Ints, Ints]:
    """Distinct edges between different ends."""
    pair = sorted_unique(source.astype(np.int64) * num + target)
    pair = pair[pair // num != pair % num]
    return (pair // num).astype(np.int32), (pair % num).astype(np.int32)


def _strong_components(source: Ints, target: Ints, num: int) -> Ints:
    """[num] strongly connected component of each node."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    matrix = csr_array((np.ones(len(source), dtype=np.int8), (source, target)), shape=(num, num))
    _, label = connected_components(matrix, directed=True, connection="strong")
    return np.asarray(label, dtype=np.int32)


def _absorb_idle_classes(problem: Problem, of_op: Ints, source: Ints, target: Ints) -> tuple[Ints, Bools]:
    """[classes] the class each joins, itself if none, and whether it joined: to a fixpoint."""
    graph, num = problem.graph, int(of_op.max()) + 1
    seconds = np.zeros((num, problem.costs.compute_s.shape[1]))
    np.add.at(seconds, of_op, problem.costs.compute_s)
    idle: Bools = np.asarray((seconds < _NO_TIME_S).all(axis=1))
    idle &= np.asarray(allowed_devices(problem, of_op, num).all(axis=1))
    one, other = edges(graph)
    mixed = (graph.phase[one] == Phase.FORWARD) != (graph.phase[other] == Phase.FORWARD)
    mixed &= of_op[one] != of_op[other]
    for end in (one, other):
        idle[of_op[end[mixed]]] = False
    every = _distinct_edges(of_op[one], of_op[other], num)
    return _join_leaves(idle, _neighbours(source, target, num), _neighbours(*every, num))


def _neighbours(source: Ints, target: Ints, num: int) -> list[set[int]]:
    around: list[set[int]] = [set() for _ in range(num)]
    for u, v in zip(source.tolist(), target.tolist(), strict=True):
        around[u].add(v)
        around[v].add(u)
    return around


def _join_leaves(idle: Bools, ordered: list[set[int]], around: list[set[int]]) -> tuple[Ints, Bools]:
    """Idle classes with one ordered neighbour and no other join it, until there are none."""
    num = len(ordered)
    into = np.arange(num, dtype=np.int32)
    waiting = [v for v in range(num - 1, -1, -1) if idle[v]]
    while waiting:
        v = waiting.pop()
        if into[v] != v or len(ordered[v]) != 1 or not around[v] <= ordered[v]:
            continue
        (u,) = ordered[v]
        into[v] = u
        for near in (ordered, around):
            near[u].discard(v)
        if idle[u]:
            waiting.append(u)
    joined = into != np.arange(num)
    while (into[into] != into).any():  # who was joined may have joined another
        into = into[into]
    return into, joined


def _without_absorbed(problem: Problem, model: MaxLoad, absorbed: Bools) -> MaxLoad:
    """The model without the bytes and seconds of absorbed ops."""
    light = make_model(problem, np.where(absorbed, model.num_classes, model.of_op), model.num_classes + 1)
    num_bytes = light.num_bytes[:-1].copy()
    type_of = {d: t for t, alike in enumerate(light.devices) for d in alike}
    pick = [type_of[alike[0]] for alike in model.devices]
    slim = replace(model, seconds=np.ascontiguousarray(light.seconds[:-1, pick]))
    return slim.with_memory(problem, num_bytes, problem.cluster.usable_bytes)


def _renumber_labels(label: Ints) -> Ints:
    """Labels renumbered densely, by the first unit of each."""
    _, first, dense = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return rank[dense.reshape(-1)]

"""Hypothesis strategies: random small problems and plans in which every feature meets every other.

All numbers are small dyadic fractions, so that sums are exact and ties are common; draws are few and flat,
so that an example costs a few milliseconds and shrinks well.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from loadmaster.core.cluster import UNLIMITED_BYTES, Cluster
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase, edges, units
from loadmaster.core.plan import Plan
from loadmaster.core.problem import BY_ROUTE, FREE, Links, Load, Objective, Problem, Split
from loadmaster.graph.build import NO_STORAGE, OWN_STORAGE, GraphBuilder
from tests.builders import cluster_of, plan_on, problem_of

PLAIN, VIEW, UNCOUNTED = range(3)  # how a drawn tensor is stored


def picks(draw: DrawFn, values: Sequence[Any], num: int) -> list[Any]:
    """`num` of `values`, in a single draw that shrinks to the first; repeat a value to see it more often."""
    return [values[code % len(values)] for code in draw(st.binary(min_size=num, max_size=num))]


@st.composite
def graphs(draw: DrawFn, max_ops: int = 8) -> Graph:
    """A random DAG: tensors with several users, views, keep, uncounted ones, parameters, groups."""
    num = min(draw(st.integers(1, 2 * max_ops)), max_ops)  # large ones are the interesting ones
    phase = picks(draw, (Phase.FORWARD, Phase.PARAM, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE), num)
    group = picks(draw, (NO_GROUP, NO_GROUP, NO_GROUP, NO_GROUP, NO_GROUP, NO_GROUP, 0, 1), num)
    resident, workspace = picks(draw, range(4), num), picks(draw, range(4), num)
    forward = [NO_MIRROR, *(op for op in range(num) if phase[op] == Phase.FORWARD)]
    mirror = picks(draw, forward, num)
    prefix = draw(st.sampled_from(("op", "<b>\n\x00é")))  # names may hold anything
    builder = GraphBuilder("drawn")
    for op in range(num):
        builder.op(
            f"{prefix}{op}",
            phase=phase[op],
            group=group[op],
            mirror=mirror[op] if phase[op] == Phase.BACKWARD and mirror[op] < op else NO_MIRROR,
            flops=float(workspace[op]),
            resident_bytes=resident[op],
            workspace_bytes=workspace[op],
        )
    _wire(draw, builder, phase)
    return builder.build()


def _wire(draw: DrawFn, builder: GraphBuilder, phase: list[Phase]) -> None:
    """Give every op up to three inputs (a parameter none) and up to two outputs."""
    reach = picks(draw, (1, 0, 2, 3, 0, 4, 5, 6), 3 * len(phase))  # tensors back to an input, 0 = no input
    num_outputs = picks(draw, (1, 0, 1, 2), len(phase))
    total = sum(num_outputs)
    num_bytes, keep = picks(draw, range(5), total), picks(draw, (False, False, False, True), total)
    stored = picks(draw, (PLAIN, PLAIN, PLAIN, VIEW, VIEW, UNCOUNTED), total)
    storage: list[int] = []  # of each tensor made so far
    for op in range(len(phase)):
        backs = {min(back, len(storage)) for back in reach[3 * op : 3 * op + 3]} - {0}
        used = [len(storage) - back for back in sorted(backs)] if phase[op] != Phase.PARAM else []
        for tensor in used:
            builder.use(tensor, op)
        viewed = _viewed(used, storage)
        for _ in range(num_outputs[op]):
            tensor = len(storage)
            own = NO_STORAGE if stored[tensor] == UNCOUNTED else OWN_STORAGE
            chosen = viewed if stored[tensor] == VIEW and viewed is not None else own
            builder.tensor(op, num_bytes[tensor], storage=chosen, keep=keep[tensor])
            storage.append(tensor if chosen == OWN_STORAGE else chosen)


def _viewed(used: list[int], storage: list[int]) -> int | None:
    """The storage of the first input that can be viewed: counted, and the op's only input of it."""
    bases = [storage[tensor] for tensor in used if storage[tensor] != NO_STORAGE]
    return next((base for base in bases if bases.count(base) == 1), None)


@st.composite
def clusters(draw: DrawFn, max_devices: int = 4, *, with_host: bool = False) -> Cluster:
    """Unequal kinds, some on the host, shared engines, routes of one to three links that share links."""
    num = min(draw(st.integers(1, max_devices + 3)), max_devices)
    kinds = draw(st.integers(1, 3))
    kind = picks(draw, range(kinds), num)
    on_host = picks(draw, (False, False, True), kinds)
    if with_host:
        on_host[kind[draw(st.integers(0, num - 1))]] = True
    num_links = draw(st.integers(1, 4))
    choices = [route for hops in (1, 2, 3) for route in itertools.permutations(range(num_links), hops)]
    pairs = list(itertools.permutations(range(num), 2))
    return cluster_of(
        dict(zip(pairs, picks(draw, choices, len(pairs)), strict=True)),
        kind=kind,
        on_host=on_host,
        engine=list(range(num)) if draw(st.booleans()) else picks(draw, range(num), num),
        memory=picks(draw, (UNLIMITED_BYTES, 5, 10, 20), num),
        reserve=picks(draw, (0, 0, 1), num),
        rate=picks(draw, (1.0, 2.0, 4.0), num_links),
        latency=picks(draw, (0.0, 0.0, 0.5, 1.0), num_links),
    )


@st.composite
def problems(
    draw: DrawFn,
    max_ops: int = 8,
    max_devices: int = 4,
    *,
    links: Links | None = None,
    issue: bool = True,
    objective: Objective = Objective.STEP,
    split: Split = Split.FREE,
) -> Problem:
    """A valid problem; simulate it under its own `links` (drawn unless given).

    Under links 'host' there is a device on a host, or every transfer time is given.
    """
    chosen = draw(st.sampled_from(Links)) if links is None else links
    graph = draw(graphs(max_ops))
    all_given = draw(st.booleans()) if chosen == Links.HOST else False
    cluster = draw(clusters(max_devices, with_host=chosen == Links.HOST and not all_given))
    pinned = _pins(graph, draw(st.sampled_from((FREE, FREE, *range(cluster.num_devices)))))
    given = (0.0, 1.0, 2.0)
    times = picks(draw, given if all_given else (BY_ROUTE, BY_ROUTE, BY_ROUTE, *given), graph.num_tensors)
    return problem_of(
        graph,
        cluster,
        draw(_compute_s(graph, cluster, pinned)),
        issue_s=picks(draw, (0.0, 0.5, 1.0), graph.num_ops) if issue and draw(st.booleans()) else 0.0,
        transfer_s=times,
        links=chosen,
        objective=objective,
        split=split,
        load=draw(st.sampled_from(Load)),
        pinned=pinned,
    )


def _pins(graph: Graph, device: int) -> list[int]:
    """The last op pinned to `device`, with its group (FREE: none pinned)."""
    unit, _ = units(graph)
    return [device if own == unit[-1] else FREE for own in unit]


@st.composite
def _compute_s(draw: DrawFn, graph: Graph, cluster: Cluster, pinned: list[int]) -> np.ndarray[Any, Any]:
    """[N, K] seconds; a parameter takes none, and some ops cannot run on some kind.

    Every op can run on the kind of the first device and of the device it is pinned to, so that every
    group has a place.
    """
    kinds = len(cluster.kind_name)
    cells = picks(draw, (1.0, 0.0, 2.0, 3.0, 0.5, np.inf), graph.num_ops * kinds)
    seconds = np.array(cells).reshape(graph.num_ops, kinds)
    for op in range(graph.num_ops):
        for device in (0, pinned[op]):
            if device != FREE and np.isinf(seconds[op, cluster.kind[device]]):
                seconds[op, cluster.kind[device]] = 2.0
    seconds[(graph.phase == Phase.PARAM)[:, None] & np.isfinite(seconds)] = 0.0
    return seconds


@st.composite
def plans(draw: DrawFn, problem: Problem, *, may_deadlock: bool = False) -> Plan:
    """Devices that respect groups, pins and support, and a random order that cannot deadlock.

    The order is topological, coarsened to pairs, or all equal; with `may_deadlock` any numbers at all.
    """
    graph = problem.graph
    unit, num_units = units(graph)
    allowed = [np.ones(problem.cluster.num_devices, dtype=np.bool_) for _ in range(num_units)]
    can_run = np.isfinite(problem.device_compute_s)
    for op in range(graph.num_ops):
        allowed[unit[op]] &= can_run[op]
        if problem.pinned[op] != FREE:
            allowed[unit[op]] &= np.arange(problem.cluster.num_devices) == problem.pinned[op]
    choices = [np.flatnonzero(devices).tolist() for devices in allowed]
    codes = picks(draw, range(256), num_units)
    # The simplest draw is round robin, so that transfers are common.
    place = [choices[own][(codes[own] + own) % len(choices[own])] for own in range(num_units)]
    keys = picks(draw, range(graph.num_ops), graph.num_ops)
    if not may_deadlock:
        coarse = draw(st.sampled_from((graph.num_ops, 1, 2)))
        keys = [position // coarse for position in _topological(graph, keys)]
    return plan_on([place[own] for own in unit], keys)


def _topological(graph: Graph, keys: list[int]) -> list[int]:
    """The position of each op in the topological order that runs the lowest key first."""
    source, target = (side.tolist() for side in edges(graph))
    waiting = np.bincount(target, minlength=graph.num_ops).tolist()
    ready = [(keys[op], op) for op in range(graph.num_ops) if waiting[op] == 0]
    heapq.heapify(ready)
    position = [0] * graph.num_ops
    for place in range(graph.num_ops):
        _, op = heapq.heappop(ready)
        position[op] = place
        for producer, user in zip(source, target, strict=True):
            if producer == op:
                waiting[user] -= 1
                if waiting[user] == 0:
                    heapq.heappush(ready, (keys[user], user))
    return position


@st.composite
def placed_problems(
    draw: DrawFn, /, max_ops: int = 8, max_devices: int = 4, *, may_deadlock: bool = False, **choices: Any
) -> tuple[Problem, Plan]:
    """A problem with a plan for it; `choices` are those of `problems`."""
    problem = draw(problems(max_ops, max_devices, **choices))
    return problem, draw(plans(problem, may_deadlock=may_deadlock))

"""Training steps drawn at random, with whatever a bound over layers could get wrong.

Branches, joins, views, tied weights, gradients that are summed, tensors that skip layers, pins, shared
engines, like devices, every link model. Of each a plan is drawn, and the memory is what that plan needs to
the byte: so a bound that is above its time is wrong.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import Graph, Phase, units
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import FREE, Links, Problem, allowed_devices
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.events.engine import prepare
from tests.builders import cluster_of, problem_of

_LINKS = (Links.SHARED, Links.SHARED, Links.SHARED, Links.PARALLEL, Links.HALF_DUPLEX, Links.HOST)


def odd_step(seed: int, *, most_layers: int = 9) -> Problem:
    """Layers, their backward ops and updates, on two to four devices with all the memory there is."""
    rng = np.random.default_rng(seed)
    graph = _draw_graph(rng, int(rng.integers(2, most_layers + 1)))
    devices = int(rng.integers(2, 5))
    kinds = int(rng.integers(1, devices + 1))
    links = _LINKS[int(rng.integers(0, len(_LINKS)))]
    kind_of = [int(rng.integers(0, kinds)) for _ in range(devices)]
    kind_of[-1] = kinds - 1
    seconds = np.outer(rng.integers(0, 9, graph.num_ops) / 2.0, rng.integers(1, 4, kinds))
    if rng.random() < 0.5:
        seconds = np.where(rng.random(seconds.shape) < 0.2, rng.integers(0, 9, seconds.shape) / 2.0, seconds)
    seconds[(graph.phase == Phase.PARAM)] = 0.0
    pinned = np.where(rng.random(graph.num_ops) < 0.04, rng.integers(0, devices, graph.num_ops), FREE)
    unit, num = units(graph)
    for u in range(num):
        pinned[unit == u] = pinned[unit == u].max()
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    num_links = int(rng.integers(1, 4))
    fields: dict[str, Any] = {"links": links, "pinned": pinned.astype(np.int32)}
    if rng.random() < 0.15:
        fields["transfer_s"] = rng.integers(0, 9, graph.num_tensors) / 2.0
    if rng.random() < 0.1:
        fields["issue_s"] = rng.integers(0, 3, graph.num_ops) / 2.0
    cluster = cluster_of(
        {pair: rng.permutation(num_links)[: int(rng.integers(1, num_links + 1))].tolist() for pair in pairs},
        kind=kind_of,
        on_host=[links == Links.HOST and kind == kinds - 1 for kind in range(kinds)],
        engine=list(range(devices)) if rng.random() < 0.8 else rng.integers(0, 2, devices).tolist(),
        rate=rng.choice([0.5, 1.0, 4.0, 100.0], num_links).tolist(),
        latency=rng.choice([0.0, 0.0, 0.5], num_links).tolist(),
    )
    return problem_of(graph, cluster, seconds, **fields)


def _draw_graph(rng: np.random.Generator, layers: int) -> Graph:
    """Forward ops of which each takes what came just before or, now and then, longer ago."""
    build = GraphBuilder(f"{layers} odd layers")
    weights: list[tuple[int, int]] = []  # op and tensor
    for at in range(int(rng.integers(0, 3))):
        weight = build.op(f"w{at}", phase=Phase.PARAM, group=100 + at, resident_bytes=int(rng.integers(0, 6)))
        weights.append((weight, build.tensor(weight, int(rng.integers(1, 4)))))
    forward, outputs, storage, reads = list[int](), list[int](), list[int](), list[list[int]]()
    groups: list[int] = []
    for at in range(layers):
        recent = [o for o in range(max(0, at - 3), at) if rng.random() < (0.9 if o == at - 1 else 0.3)]
        if at and not recent:
            recent = [at - 1]
        groups.append(at if rng.random() < 0.9 else int(rng.integers(0, at + 1)))
        op = build.op(
            f"f{at}",
            group=groups[-1],
            workspace_bytes=int(rng.integers(0, 4)) if rng.random() < 0.3 else 0,
            resident_bytes=int(rng.integers(0, 4)) if rng.random() < 0.2 else 0,
        )
        taken = [outputs[o] for o in recent]
        if weights and rng.random() < 0.6:
            taken.append(weights[int(rng.integers(0, len(weights)))][1])
        for t in taken:
            build.use(t, op)
        view = bool(recent) and rng.random() < 0.2
        base = storage[recent[-1]] if view else -1
        made = {"storage": base} if view else {}
        tensor = build.tensor(op, int(rng.integers(0, 12)), keep=bool(rng.random() < 0.1), **made)
        forward.append(op)
        outputs.append(tensor)
        storage.append(base if view else tensor)
        reads.append(taken)
    _draw_backward(rng, build, list(zip(forward, groups, strict=True)), outputs, reads, weights)
    return build.build()


def _draw_backward(
    rng: np.random.Generator,
    build: GraphBuilder,
    forward: list[tuple[int, int]],
    outputs: list[int],
    reads: list[list[int]],
    weights: list[tuple[int, int]],
) -> None:
    """Gradients the other way, each of the unit of its forward op; gradients of weights and their updates."""
    gradient: dict[int, list[int]] = {}
    of_weight: dict[int, list[int]] = {}
    for at in range(len(forward) - 1, -1, -1):
        mirror, group = forward[at]
        given = gradient.get(outputs[at], [outputs[at]] if at == len(forward) - 1 else [])
        if not given:
            continue
        if len(given) > 1 and rng.random() < 0.7:
            total = build.op(f"sum{at}", phase=Phase.BACKWARD, mirror=mirror, group=group)
            for t in given:
                build.use(t, total)
            given = [build.tensor(total, int(rng.integers(0, 12)))]
        saved = [t for t in (*reads[at], outputs[at]) if rng.random() < 0.6]
        inputs = build.op(f"b{at}", phase=Phase.BACKWARD, mirror=mirror, group=group)
        for t in dict.fromkeys([*given, *saved]):
            build.use(t, inputs)
        for t in reads[at]:
            if t in outputs:
                gradient.setdefault(t, []).append(build.tensor(inputs, int(rng.integers(0, 12))))
                continue
            apart = build.op(f"g{at}w{t}", phase=Phase.BACKWARD, mirror=mirror, group=group)
            for used in dict.fromkeys([*given, *(s for s in reads[at] if rng.random() < 0.8)]):
                build.use(used, apart)
            of_weight.setdefault(t, []).append(
                build.tensor(apart, int(rng.integers(0, 4)), keep=bool(rng.random() < 0.5))
            )
    for at, (_, t) in enumerate(weights):
        if t in of_weight:
            update = build.op(f"u{at}", phase=Phase.UPDATE, group=100 + at)
            for used in (t, *of_weight[t]):
                build.use(used, update)


def draw_plan(problem: Problem, rng: np.random.Generator) -> Plan:
    """Devices that now and then change along the ops, by unit, within the rules; any order."""
    unit, num = units(problem.graph)
    allowed = allowed_devices(problem, unit, num)
    change, device = rng.random() * rng.random(), np.zeros(num, dtype=np.int32)
    now = int(rng.integers(0, allowed.shape[1]))
    for u in range(num):
        if rng.random() < change:
            now = int(rng.integers(0, allowed.shape[1]))
        device[u] = now if allowed[u, now] else rng.choice(np.flatnonzero(allowed[u]))
    priority: Ints = rng.permutation(problem.graph.num_ops).astype(np.int32)
    if rng.random() < 0.5:
        priority = np.zeros(problem.graph.num_ops, dtype=np.int32)
    return replace(plan_of(device[unit]), priority=priority)


def fit_memory(problem: Problem, plan: Plan) -> tuple[Problem, float]:
    """The problem with as much memory as a plan takes, to the byte, and the plan's seconds."""
    score = prepare(problem).order_and_score(plan)[1]
    memory = np.maximum(np.array(score.peak_bytes, dtype=np.int64), 1)
    return replace(problem, cluster=replace(problem.cluster, memory_bytes=memory)), score.time_s

"""Pipelines by their definition: an evaluator and a brute force that share nothing with placers or simulator.

Written from "Pipelines of micro-batches" in docs/simulator.md, in plain loops. The peak of one pass is the
reference simulator's.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np

from loadmaster.core.graph import NO_GROUP, NO_STORAGE, Phase
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import FREE, Links, Load, Objective, Problem, Split
from loadmaster.graph.build import GraphBuilder
from tests import reference
from tests.builders import cluster_of, problem_of
from tests.maxload import joined, stage_pairs

INF = float("inf")
LATER = (Phase.BACKWARD, Phase.UPDATE)


def in_flight(asked: str, stages: int) -> list[int]:
    """Micro-batches that each of so many stages holds."""
    name, count = asked.split(":")
    return [int(count) if name == "gpipe" else min(stages - s, int(count)) for s in range(stages)]


def loads(problem: Problem, device: Any, recomputed: set[int]) -> list[float]:
    """Seconds of every device; `recomputed` devices run their mirrored forward ops twice."""
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    rerun = {int(m) for m in graph.mirror if m >= 0}
    users: dict[int, set[int]] = {}
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        users.setdefault(tensor, set()).add(int(device[op]))
    found = []
    for d in range(cluster.num_devices):
        kind, compute, reads, writes = int(cluster.kind[d]), 0.0, 0.0, 0.0
        for op in range(graph.num_ops):
            if device[op] == d:
                compute += float(costs.compute_s[op, kind]) * (2 if d in recomputed and op in rerun else 1)
        for tensor, devices in users.items():
            home = int(device[graph.tensor_op[tensor]])
            reads += float(costs.transfer_s[tensor]) * (home != d and d in devices)
            writes += float(costs.transfer_s[tensor]) * (home == d and bool(devices - {d}))
        found.append(float(joined(problem.load, compute, reads, writes)))
    return found


@dataclass(frozen=True)
class Kept:
    """Bytes of one device."""

    settled: int
    each: int
    once: int
    only_again: int


def kept(problem: Problem, device: Any, d: int, *, recomputed: bool) -> Kept:
    """What a device holds, of every micro-batch and once."""
    graph = problem.graph
    phase = [Phase(int(p)) for p in graph.phase]
    rerun = {int(m) for m in graph.mirror if m >= 0 and phase[int(m)] == Phase.FORWARD}
    settled = sum(int(graph.resident_bytes[op]) for op in range(graph.num_ops) if device[op] == d)
    each = once = only_again = 0
    for root in range(graph.num_tensors):
        if graph.tensor_storage[root] != root:
            continue
        alike = [t for t in range(graph.num_tensors) if graph.tensor_storage[t] == root]
        lasting = any(bool(graph.keep[t]) for t in alike)
        maker, size = int(graph.tensor_op[root]), int(graph.tensor_bytes[root])
        at_home = int(device[maker]) == d
        users = [
            op
            for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)
            if t in alike and device[op] == d
        ]
        saved = any(phase[op] in LATER for op in users)
        if phase[maker] == Phase.PARAM:
            once += size * (saved and not at_home)
        elif phase[maker] in LATER:
            settled += size * (lasting and at_home)
            once += size * (lasting and saved and not at_home)
        else:
            saved = saved or (lasting and (at_home or bool(users)))
            again = recomputed and any(op in rerun for op in users)
            if recomputed and at_home and maker in rerun and not lasting:
                once += size * saved
            else:
                each += size * (saved or again)
                only_again += size * (again and not saved)
    return Kept(settled, each, once, only_again)


def one_pass(problem: Problem, device: Any) -> list[int]:
    """Peak bytes of a single micro-batch whose gradients were there before."""
    graph = problem.graph
    resident, storage = graph.resident_bytes.copy(), graph.tensor_storage.copy()
    for root in range(graph.num_tensors):
        alike = [t for t in range(graph.num_tensors) if graph.tensor_storage[t] == root]
        if graph.phase[graph.tensor_op[root]] in LATER and any(bool(graph.keep[t]) for t in alike):
            resident[graph.tensor_op[root]] += graph.tensor_bytes[root]
            storage[alike] = NO_STORAGE
    changed = replace(
        problem, graph=replace(graph, resident_bytes=resident, tensor_storage=storage), pipeline=""
    )
    plan = plan_of(np.array(device, dtype=np.int32))
    result = reference.simulate(changed, plan, dispatch="ready", links=problem.links.value)
    return [int(peak) for peak in result.peak_bytes]


def peaks(
    problem: Problem, device: Any, order: list[int], recomputed: set[int], alone: list[int]
) -> list[int]:
    """Peak bytes of every device; stage s is on `order[s]`, a single micro-batch peaks at `alone`."""
    holds = dict(zip(order, in_flight(problem.pipeline, len(order)), strict=True))
    found = []
    for d in range(problem.cluster.num_devices):
        have, y = kept(problem, device, d, recomputed=d in recomputed), holds.get(d, 1)
        running = alone[d] + (y - 1) * have.each + have.only_again
        found.append(max(running, have.settled + y * have.each + have.once))
    return found


def judged(problem: Problem, plan: Plan) -> tuple[float, list[int]]:
    """Seconds of the busiest device and peak bytes of a plan."""
    assert plan.pipeline is not None
    device = plan.device.tolist()
    order = [device[plan.pipeline.stage.tolist().index(s)] for s in range(len(plan.pipeline.replicas))]
    recomputed = {device[op] for op in np.flatnonzero(plan.recompute).tolist()}
    return max(loads(problem, device, recomputed)), peaks(
        problem, device, order, recomputed, one_pass(problem, device)
    )


def splits(problem: Problem) -> Iterator[list[int]]:
    """Every device of every op that pins, groups and support allow."""
    graph, cluster = problem.graph, problem.cluster
    keys = [("g", int(g)) if g != NO_GROUP else ("o", op) for op, g in enumerate(graph.group.tolist())]
    units = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    for choice in itertools.product(range(cluster.num_devices), repeat=len(units)):
        device = [choice[units[key]] for key in keys]
        if all(
            problem.pinned[op] in (FREE, d) and np.isfinite(problem.costs.compute_s[op, cluster.kind[d]])
            for op, d in enumerate(device)
        ):
            yield device


def every_pipeline(problem: Problem) -> float:
    """The least busiest load over all splits, orders of stages and choices to recompute; inf: none fits."""
    best, usable = INF, problem.cluster.usable_bytes.tolist()
    for device in splits(problem):
        if max(loads(problem, device, set())) >= best:
            continue
        follows = nx.DiGraph()
        follows.add_nodes_from(set(device))
        follows.add_edges_from(
            (device[a], device[b]) for a, b in stage_pairs(problem) if device[a] != device[b]
        )
        if not nx.is_directed_acyclic_graph(follows):
            continue
        alone = one_pass(problem, device)
        for order in nx.all_topological_sorts(follows):
            for again in itertools.product((False, True), repeat=len(order)):
                recomputed = {d for d, chosen in zip(order, again, strict=True) if chosen}
                peak = peaks(problem, device, order, recomputed, alone)
                if all(need <= have for need, have in zip(peak, usable, strict=True)):
                    best = min(best, max(loads(problem, device, recomputed)))
    return best


def random_pipeline(seed: int) -> Problem:
    """A few ops forward and backward on two or three devices, memory from ample to too little."""
    die = random.Random(seed)
    builder = GraphBuilder(f"pipeline {seed}")
    num = die.randint(2, 5)
    group = [die.randint(0, 1) if die.random() < 0.15 else 10 + op for op in range(num)]
    for op in range(num):
        builder.op(f"f{op}", group=group[op], resident_bytes=die.randint(0, 2))
    mirrored = [die.random() < 0.85 for _ in range(num)]
    back = {}
    for op in reversed(range(num)):
        mirror = {"mirror": op} if mirrored[op] else {}
        back[op] = builder.op(f"b{op}", phase=Phase.BACKWARD, group=group[op], **mirror)
    for op in range(num):
        users = [j for j in range(op + 1, num) if die.random() < 0.5]
        output = builder.tensor(op, die.randint(0, 4), keep=die.random() < 0.05)
        builder.use(output, *users, *(back[j] for j in users if die.random() < 0.6))
        if die.random() < 0.6:
            builder.use(builder.tensor(op, die.randint(1, 6)), back[op])
        if die.random() < 0.2:
            builder.use(builder.tensor(op, die.randint(0, 3), storage=output), back[die.randint(0, op)])
        for user in users:
            builder.use(builder.tensor(back[user], die.randint(0, 2)), back[op])
        if die.random() < 0.4:
            builder.tensor(back[op], die.randint(1, 2), keep=True)
        builder.use(output, back[op]) if die.random() < 0.3 else None
    graph = builder.build()
    devices, unequal = die.randint(2, 3), die.random() < 0.4
    kind = list(range(devices)) if unequal else [0] * devices
    most = int(graph.resident_bytes.sum() + graph.tensor_bytes.sum()) + 1
    rooms = [die.choice((3 * most, most, most // 2 + 1, most // 3 + 1)) for _ in range(devices)]
    routes = {(i, j): [0] for i in range(devices) for j in range(devices) if i != j}
    cluster = cluster_of(
        routes, kind=kind, on_host=[False] * len(set(kind)), memory=rooms if unequal else rooms[0], rate=[1.0]
    )
    seconds = [[die.choice((0, 1, 2, 2.5, 3)) for _ in set(kind)] for _ in range(graph.num_ops)]
    return problem_of(
        graph,
        cluster,
        seconds,
        transfer_s=[die.choice((0.0, 0.25, 1.0)) for _ in range(graph.num_tensors)],
        objective=Objective.THROUGHPUT,
        links=Links.HOST,
        split=Split.CHAIN,
        load=die.choice((Load.SUM, Load.MAX2, Load.MAX3)),
        pipeline=f"{die.choice(('1f1b', 'gpipe'))}:{die.randint(1, 5)}",
    )

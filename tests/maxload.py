"""Max-load by its definition: an evaluator and a brute force that share nothing with placers or simulator.

Problem T of Tarnawski et al. (NeurIPS 2020) under `Links.HOST` with given transfer times: an accelerator pays
compute, one transfer for every outside tensor that it uses and one for every own tensor that others use; a
device on the host pays compute. Plain loops, written from docs/simulator.md.
"""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from loadmaster.core.graph import NO_GROUP, NO_STORAGE, Phase
from loadmaster.core.problem import FREE, Links, Load, Objective, Problem, Split
from loadmaster.graph.build import GraphBuilder
from tests.builders import cluster_of, problem_of

INF = float("inf")


def max_load(problem: Problem, device: Any) -> float:
    """Seconds of the busiest device."""
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    where = [int(d) for d in device]
    users: dict[int, set[int]] = {}
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        users.setdefault(tensor, set()).add(where[op])
    busiest = 0.0
    for d in range(cluster.num_devices):
        kind = int(cluster.kind[d])
        compute = sum(float(costs.compute_s[op, kind]) for op in range(graph.num_ops) if where[op] == d)
        reads = writes = 0.0
        for tensor, devices in users.items():
            home = where[int(graph.tensor_op[tensor])]
            hop = float(costs.transfer_s[tensor])
            assert hop >= 0, "this evaluator needs given transfer times"
            if home != d and d in devices:
                reads += hop
            if home == d and devices - {d}:
                writes += hop
        if cluster.on_host[kind]:
            reads = writes = 0.0
        busiest = max(busiest, joined(problem.load, compute, reads, writes))
    return busiest


def joined(load: Load, compute: Any, reads: Any, writes: Any) -> Any:
    """How the three add up."""
    if load == Load.SUM:
        return compute + reads + writes
    if load == Load.MAX2:
        return np.maximum(compute, reads + writes)
    return np.maximum(compute, np.maximum(reads, writes))


def broken(problem: Problem, device: Any) -> str:
    """The rule that a split breaks, '' if none: pins, groups, support, memory, and its shape."""
    graph, cluster = problem.graph, problem.cluster
    where = [int(d) for d in device]
    groups: dict[int, int] = {}
    for op, d in enumerate(where):
        if problem.pinned[op] not in (FREE, d):
            return "pin"
        if graph.group[op] != NO_GROUP and groups.setdefault(int(graph.group[op]), d) != d:
            return "group"
        if problem.costs.compute_s[op, cluster.kind[d]] == INF:
            return "support"
    for d in range(cluster.num_devices):
        held = sum(int(graph.resident_bytes[op]) for op in range(graph.num_ops) if where[op] == d)
        if held > int(cluster.memory_bytes[d]) - int(cluster.reserve_bytes[d]):
            return "memory"
    if problem.split == Split.CHAIN and not nx.is_directed_acyclic_graph(device_graph(problem, where)):
        return "chain"
    return ""


def device_graph(problem: Problem, where: list[int]) -> Any:
    """Which device stands before which."""
    found = nx.DiGraph()
    for first, then in stage_pairs(problem):
        if where[first] != where[then]:
            found.add_edge(where[first], where[then])
    return found


def stage_pairs(problem: Problem) -> list[tuple[int, int]]:
    """Ops of which the second is in no earlier stage: forward edges; and backward edges, turned, with an end
    whose class has no forward op (exact.md, section 4.3).
    """
    graph, pairs = problem.graph, []
    key = [("g", int(g)) if g != NO_GROUP else ("o", op) for op, g in enumerate(graph.group.tolist())]
    phase = [Phase(int(p)) for p in graph.phase]
    with_forward = {key[op] for op in range(graph.num_ops) if phase[op] == Phase.FORWARD}
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        maker = int(graph.tensor_op[tensor])
        if phase[maker] == phase[op] == Phase.FORWARD:
            pairs.append((maker, op))
        elif phase[maker] == phase[op] == Phase.BACKWARD and not {key[maker], key[op]} <= with_forward:
            pairs.append((op, maker))
    return pairs


@dataclass(frozen=True)
class Best:
    """The least max-load over all splits (inf: none is allowed) and how many are allowed."""

    value: float
    allowed: int


def every_split(problem: Problem, *, forward_only: bool = False) -> Best:
    """All splits at once, as columns; small problems only. `forward_only`: chains of forward ops alone."""
    graph, cluster = problem.graph, problem.cluster
    num, devices = graph.num_ops, cluster.num_devices
    keys = [("g", int(g)) if g != NO_GROUP else ("o", op) for op, g in enumerate(graph.group.tolist())]
    units = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    table = np.array(list(itertools.product(range(devices), repeat=len(units))), dtype=np.int64)
    where = table[:, [units[key] for key in keys]]  # [splits, ops]
    allowed = np.ones(len(where), dtype=bool)
    for op in range(num):
        if problem.pinned[op] != FREE:
            allowed &= where[:, op] == problem.pinned[op]
        allowed &= np.isfinite(problem.costs.compute_s[op, cluster.kind[where[:, op]]])
    busiest = np.zeros(len(where))
    for d in range(devices):
        here = where == d
        held = here @ graph.resident_bytes
        allowed &= held <= cluster.memory_bytes[d] - cluster.reserve_bytes[d]
        seconds = problem.costs.compute_s[:, cluster.kind[d]]
        compute = here @ np.where(np.isfinite(seconds), seconds, 0.0)
        reads, writes = np.zeros(len(where)), np.zeros(len(where))
        for tensor in range(graph.num_tensors):
            used = here[:, graph.use_op[graph.use_tensor == tensor]]
            home = here[:, graph.tensor_op[tensor]]
            hop = 0.0 if cluster.on_host[cluster.kind[d]] else problem.costs.transfer_s[tensor]
            reads += hop * (~home & used.any(axis=1))
            writes += hop * (home & ~used.all(axis=1))
        busiest = np.maximum(busiest, joined(problem.load, compute, reads, writes))
    if problem.split == Split.CHAIN:
        allowed &= _acyclic(problem, where, forward_only=forward_only)
    value = float(busiest[allowed].min()) if allowed.any() else INF
    return Best(value, int(allowed.sum()))


def _acyclic(problem: Problem, where: Any, *, forward_only: bool) -> Any:
    devices = problem.cluster.num_devices
    feeds = np.zeros((len(where), devices, devices), dtype=bool)
    rows = np.arange(len(where))
    for first, then in stage_pairs(problem):
        if forward_only and problem.graph.phase[first] != Phase.FORWARD:
            continue
        feeds[rows, where[:, first], where[:, then]] = True
    feeds[:, range(devices), range(devices)] = False
    for _ in range(devices):
        feeds |= (feeds[:, :, :, None] & feeds[:, None, :, :]).any(axis=2)
    return ~feeds[:, range(devices), range(devices)].any(axis=1)


def random_problem(
    seed: int, *, split: Split = Split.CHAIN, training: bool = False, orphans: bool = False
) -> Problem:
    """A few ops on two to four devices, equal or not, memory ample, tight or too little.

    `orphans`: some backward ops are classes of their own.
    """
    die = random.Random(seed)
    builder = GraphBuilder(f"random {seed}")
    num = die.randint(2, 4 if orphans else 6)
    sizes = [die.choice((0, 0, 1, 2, 3)) for _ in range(num)]
    grouped = die.random() < 0.3
    group = [die.randint(0, num) if grouped and die.random() < 0.5 else op + 10 for op in range(num)]
    for op in range(num):
        builder.op(f"f{op}", group=group[op], resident_bytes=sizes[op])
    edges = [(i, j) for i in range(num) for j in range(i + 1, num) if die.random() < 0.4]
    _tensors(builder, die, edges, num)
    ops = num
    if training:
        for op in reversed(range(num)):
            own = 100 + op if orphans and die.random() < 0.6 else group[op]
            builder.op(f"b{op}", group=own, phase=Phase.BACKWARD, resident_bytes=die.randint(0, 1))
        turned = [(num + num - 1 - j, num + num - 1 - i) for i, j in edges]
        saved = [(i, num + num - 1 - i) for i in range(num) if die.random() < 0.3]
        _tensors(builder, die, turned + saved, 2 * num)
        ops = 2 * num
    graph = builder.build()
    accelerators, cpus = die.randint(1, 3), die.randint(0, 1)
    unequal = die.random() < 0.4
    kinds = accelerators if unequal else 1
    kind = [d if unequal else 0 for d in range(accelerators)] + [kinds] * cpus
    devices = accelerators + cpus
    room = int(graph.resident_bytes.sum())
    memory = [max(die.choice((room, room, room // 2 + 1, room // 3 + 1)), 1) for _ in range(devices)]
    if not unequal:
        memory[:accelerators] = [memory[0]] * accelerators
    routes = {(i, j): [0] for i in range(devices) for j in range(devices) if i != j}
    cluster = cluster_of(
        routes,
        kind=kind,
        on_host=[False] * kinds + [True] * bool(cpus),
        memory=[*memory[:accelerators], *[max(room, 1)] * cpus],
        rate=[1.0],
    )
    seconds = [
        [die.choice((0, 1, 2, 2.5, 3, 5)) for _ in range(kinds)] + [die.choice((0, 5, 9))] * bool(cpus)
        for _ in range(ops)
    ]
    for row in seconds:
        if die.random() < 0.1 and len(row) > 1:
            row[die.randrange(len(row))] = INF
    hops = [die.choice((0.0, 0.25, 0.5, 1.0, 3.0)) for _ in range(graph.num_tensors)]
    return problem_of(
        graph,
        cluster,
        seconds,
        transfer_s=hops,
        objective=Objective.THROUGHPUT,
        links=Links.HOST,
        split=split,
        load=die.choice((Load.SUM, Load.SUM, Load.MAX2, Load.MAX3)),
    )


def _tensors(builder: GraphBuilder, die: random.Random, edges: list[tuple[int, int]], num: int) -> None:
    """One tensor for the users of an op, or two that share them."""
    for source in range(num):
        users = [j for i, j in edges if i == source]
        parts = [users] if die.random() < 0.7 else [users[::2], users[1::2]]
        for part in parts:
            if part:
                builder.use(builder.tensor(source, 1, storage=NO_STORAGE), *part)

"""Tiny named instances: graphs, clusters, problems and plans small enough to check by hand.

The clusters move one byte in one second without latency unless told otherwise, so that a tensor of three
bytes takes three seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadmaster.core.cluster import NO_LINK, UNLIMITED_BYTES, Cluster, star
from loadmaster.core.graph import Dtype, Graph
from loadmaster.core.plan import Plan
from loadmaster.core.problem import BY_ROUTE, FREE, Costs, Links, Load, Objective, Origin, Problem, Split
from loadmaster.graph.build import GraphBuilder


def two_ops(num_bytes: int = 2) -> Graph:
    """a -> b."""
    return chain(2, num_bytes)


def chain(num_ops: int, num_bytes: int = 2) -> Graph:
    """op0 -> op1 -> ... -> op(n-1), one tensor of `num_bytes` between neighbours."""
    builder = GraphBuilder(f"chain of {num_ops}")
    for op in range(num_ops):
        builder.op(f"op{op}")
        if op:
            builder.use(builder.tensor(op - 1, num_bytes), op)
    return builder.build()


def diamond(num_bytes: int = 2) -> Graph:
    """top -> left and right -> bottom; `top` makes one tensor for both."""
    builder = GraphBuilder("diamond")
    top, left, right, bottom = (builder.op(name) for name in ("top", "left", "right", "bottom"))
    builder.use(builder.tensor(top, num_bytes), left, right)
    for side in (left, right):
        builder.use(builder.tensor(side, num_bytes), bottom)
    return builder.build()


def fan_out(num_users: int, num_bytes: int = 2) -> Graph:
    """One op whose single tensor is used by `num_users` others."""
    builder = GraphBuilder(f"fan out to {num_users}")
    source = builder.op("source")
    tensor = builder.tensor(source, num_bytes)
    for user in range(num_users):
        builder.use(tensor, builder.op(f"user{user}"))
    return builder.build()


def loose_ops(num_ops: int) -> Graph:
    """Ops that have nothing to do with each other."""
    builder = GraphBuilder(f"{num_ops} loose ops")
    for op in range(num_ops):
        builder.op(f"op{op}")
    return builder.build()


def graph_of(*ops: dict[str, Any]) -> Graph:
    """Ops in order, each the fields of `GraphBuilder.op`, the tensors it `uses` and those it `makes`.

    What it makes is given in bytes, or as fields of `GraphBuilder.tensor`; tensors are numbered in order.
    """
    builder = GraphBuilder("by hand")
    for number, fields in enumerate(ops):
        own = {key: value for key, value in fields.items() if key not in ("uses", "makes")}
        op = builder.op(f"op{number}", **own)
        for tensor in fields.get("uses", ()):
            builder.use(tensor, op)
        for made in fields.get("makes", ()):
            builder.tensor(op, **({"num_bytes": made} if isinstance(made, int) else made))
    return builder.build()


def star_cluster(
    num_devices: int, *, memory: int = UNLIMITED_BYTES, rate: float = 1.0, latency: float = 0.0
) -> Cluster:
    """Equal devices, each with one port out and one port in."""
    return star("star", memory_bytes=[memory] * num_devices, bytes_per_s=rate, latency_s=latency)


def cluster_of(
    routes: Mapping[tuple[int, int], Sequence[int]],
    *,
    kind: Sequence[int],
    on_host: Sequence[bool] = (False,),
    engine: Sequence[int] | None = None,
    memory: Sequence[int] | int = UNLIMITED_BYTES,
    reserve: Sequence[int] | int = 0,
    rate: Sequence[float] | float = 1.0,
    latency: Sequence[float] | float = 0.0,
) -> Cluster:
    """Any cluster: `routes` lists the links from one device to another, `kind` the kind of each device."""
    num, kinds = len(kind), len(on_host)
    hops = max((len(route) for route in routes.values()), default=0)
    used_links = 1 + max((link for route in routes.values() for link in route), default=-1)
    num_links = len(rate) if isinstance(rate, Sequence) else used_links
    table = np.full((num, num, hops), NO_LINK, dtype=np.int32)
    for (source, target), route in routes.items():
        table[source, target, : len(route)] = route
    return Cluster(
        name="built",
        device_name=tuple(f"d{d}" for d in range(num)),
        kind=np.asarray(kind, dtype=np.int32),
        kind_name=tuple(f"kind{k}" for k in range(kinds)),
        host=np.zeros(num, dtype=np.int32),
        engine=_column(range(num) if engine is None else engine, num, np.int32),
        memory_bytes=_column(memory, num, np.int64),
        reserve_bytes=_column(reserve, num, np.int64),
        flops_per_s=np.full((kinds, len(Dtype)), 1e12),
        memory_bytes_per_s=np.full(kinds, 1e12),
        overhead_s=np.zeros(kinds),
        on_host=np.asarray(on_host, dtype=np.bool_),
        route=table,
        link_name=tuple(f"link{link}" for link in range(num_links)),
        link_bytes_per_s=_column(rate, num_links, np.float64),
        link_latency_s=_column(latency, num_links, np.float64),
    )


def host_cluster(num_accelerators: int, num_cpus: int = 1, *, rate: float = 1.0) -> Cluster:
    """Accelerators (kind 0) first, then CPUs (kind 1, on the host); a link of its own for every pair."""
    num = num_accelerators + num_cpus
    pairs = [(i, j) for i in range(num) for j in range(num) if i != j]
    return cluster_of(
        {pair: [link] for link, pair in enumerate(pairs)},
        kind=[0] * num_accelerators + [1] * num_cpus,
        on_host=(False, True),
        rate=rate,
    )


def _column(values: Any, num: int, dtype: type) -> np.ndarray[Any, Any]:
    """`num` values from as many, or from one for all."""
    return np.array(np.broadcast_to(np.asarray(values, dtype=dtype), num))


def costs_of(
    graph: Graph,
    times: Any,
    *,
    kinds: int = 1,
    issue_s: Any = 0.0,
    transfer_s: Any = BY_ROUTE,
) -> Costs:
    """Costs from seconds [N] (the same on every kind) or [N, K]; one number means all of them."""
    num = graph.num_ops
    seconds = np.asarray(times, dtype=np.float64)
    if seconds.ndim < 2:
        seconds = np.repeat(_column(times, num, np.float64)[:, None], kinds, axis=1)
    return Costs(
        compute_s=seconds,
        issue_s=_column(issue_s, num, np.float64),
        transfer_s=_column(transfer_s, graph.num_tensors, np.float64),
        origin=np.full(num, Origin.GIVEN, dtype=np.int8),
        rel_error=np.zeros(num),
    )


def problem_of(
    graph: Graph,
    cluster: Cluster,
    times: Any,
    *,
    issue_s: Any = 0.0,
    transfer_s: Any = BY_ROUTE,
    **overrides: Any,
) -> Problem:
    """A step problem with seconds [N] or [N, K]; `overrides` are fields of `Problem`."""
    kinds = len(cluster.kind_name)
    fields: dict[str, Any] = {
        "objective": Objective.STEP,
        "links": Links.SHARED,
        "split": Split.FREE,
        "load": Load.SUM,
        "pinned": np.full(graph.num_ops, FREE, dtype=np.int32),
    }
    costs = costs_of(graph, times, kinds=kinds, issue_s=issue_s, transfer_s=transfer_s)
    return Problem(graph=graph, cluster=cluster, costs=costs, **(fields | overrides))


def arrows(
    times: Any,
    edges: Mapping[tuple[int, int], float],
    cluster: Cluster,
    *,
    held_bytes: Sequence[int] | None = None,
    links: Links = Links.PARALLEL,
) -> Problem:
    """Ops with seconds [N] or [N, K] and a tensor of no bytes for every edge, whose transfer takes so long.

    A graph numbers its ops topologically: where that differs, times and bytes go with the names op0, op1 ...
    """
    builder = GraphBuilder("arrows")
    for op in range(len(times)):
        builder.op(f"op{op}", resident_bytes=0 if held_bytes is None else held_bytes[op])
    for source, target in edges:
        builder.use(builder.tensor(source, 0), target)
    graph = builder.build()
    seconds = np.asarray(times, dtype=np.float64)[[int(name[2:]) for name in graph.op_name]]
    return problem_of(graph, cluster, seconds, transfer_s=list(edges.values()), links=links)


def instance_a() -> Problem:
    """Six ops whose bytes just fill two devices. The best step takes 9 s, and 8 s were memory free."""
    edges = {(0, 1): 1.0, (0, 4): 1.0, (1, 2): 1.0, (2, 3): 1.0, (4, 5): 1.0, (5, 3): 1.0}
    return arrows([1, 3, 3, 1, 3, 1], edges, star_cluster(2, memory=4), held_bytes=[1, 2, 2, 1, 1, 1])


def instance_b() -> Problem:
    """The best step takes 13 s: the device of op 1 stays idle until op 2, its favourite, can start there."""
    return arrows([5, 4, 7, 4], {(0, 2): 1.0, (1, 2): 3.0, (1, 3): 1.0}, star_cluster(2))


def instance_c() -> Problem:
    """The published m-SCT takes 24 s, plain list scheduling 22 s, which is the best."""
    edges = {(0, 2): 2.0, (1, 2): 3.0, (1, 3): 1.0, (4, 5): 3.0}
    return arrows([9, 9, 8, 5, 6, 4], edges, star_cluster(2))


def instance_d(num_devices: int = 3) -> Problem:
    """The best step takes 29 s on three devices and 26 s on four."""
    sides = {(0, 2): 1.0, (0, 3): 5.0, (0, 4): 2.0, (1, 2): 1.0, (1, 3): 1.0, (1, 4): 1.0}
    ends = {(2, 5): 5.0, (2, 6): 3.0, (3, 5): 4.0, (3, 6): 1.0, (3, 7): 5.0, (4, 8): 1.0}
    return arrows([6, 7, 9, 8, 10, 6, 6, 10, 6], sides | ends, star_cluster(num_devices))


def tpds_example() -> Problem:
    """The worked example of the HEFT paper (IEEE TPDS 2002): ten tasks on three unlike processors.

    Published: upward ranks 108 for the first task to 14.667 for the last, HEFT 80, CPOP 86.
    """
    times = [[14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10]]
    times += [[13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16]]
    edges = {(0, 1): 18.0, (0, 2): 12.0, (0, 3): 9.0, (0, 4): 11.0, (0, 5): 14.0, (1, 7): 19.0, (1, 8): 16.0}
    edges |= {(2, 6): 23.0, (3, 7): 27.0, (3, 8): 23.0, (4, 8): 13.0, (5, 7): 15.0}
    edges |= {(6, 9): 17.0, (7, 9): 11.0, (8, 9): 13.0}
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    cluster = cluster_of({pair: [0] for pair in pairs}, kind=[0, 1, 2], on_host=(False, False, False))
    return arrows(times, edges, cluster)


def plan_on(device: Sequence[int], priority: Sequence[int] | None = None) -> Plan:
    """Op i on `device[i]`; all priorities equal unless given."""
    num = len(device)
    return Plan(
        device=np.asarray(device, dtype=np.int32),
        priority=np.zeros(num, dtype=np.int32) if priority is None else np.asarray(priority, dtype=np.int32),
        recompute=np.zeros(num, dtype=np.bool_),
        pipeline=None,
    )

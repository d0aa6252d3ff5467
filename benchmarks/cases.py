"""The cases of plan quality: a generated graph on a cluster under a link setting.

Links, each at the published 0.0001754 us a byte and 134 us a transfer:

* free: transfers never wait for each other.
* port: every device sends one tensor at a time and receives one at a time; a middle that never blocks.
* shared: the devices of a host share one bus, which carries one tensor at a time, whoever sends it.

Two hosts are joined by one link out of and one into each, a quarter as fast as a device's port, with twice
the latency from end to end.
"""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.cluster import NO_LINK, Cluster, star
from loadmaster.core.graph import Graph, held_bytes
from loadmaster.core.problem import BY_ROUTE, FREE, Costs, Links, Load, Objective, Problem, Split
from loadmaster.graph.generate import (
    FAMILIES,
    FLOPS_PER_US,
    MEMORY_FACTOR,
    US_PER_BYTE,
    US_PER_TRANSFER,
    with_benchmark_cluster,
)

GENERATORS = ("fork_join", "rnn_grid", "layered", "many_source")
SIZES = (1_000, 5_000, 10_000)
EQUAL, TWO_SPEEDS, TWO_HOSTS = "4 equal", "2 fast + 2 slow", "8 on two hosts"
CLUSTERS = (EQUAL, TWO_SPEEDS, TWO_HOSTS)
LINK_SETTINGS = ("free", "port", "shared")
SLOWER = 2.0  # a slow device, over a fast one
FARTHER = 4.0  # a byte between hosts, over a byte within one
BYTES_PER_S = 1e6 / US_PER_BYTE
LATENCY_S = US_PER_TRANSFER * 1e-6


def budget_s() -> float:
    """Seconds that `auto` may take: BENCH_BUDGET_S, or 10."""
    return float(os.environ.get("BENCH_BUDGET_S", "10"))


def sizes() -> tuple[int, ...]:
    """Ops asked for in the cases of plan quality: BENCH_SIZES, or all."""
    given = os.environ.get("BENCH_SIZES", "")
    return tuple(int(size) for size in given.split(",")) if given else SIZES


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the quality tables."""

    generator: str
    num_ops: int  # as asked for
    cluster: str
    links: str

    def __str__(self) -> str:
        """As figures name it."""
        return f"{self.generator} {self.num_ops:,}, {self.cluster}, {self.links}"


def every_case(wanted: tuple[int, ...] = SIZES) -> Iterator[Case]:
    """All of them, the cheap ones first."""
    for num_ops, cluster, links, generator in itertools.product(wanted, CLUSTERS, LINK_SETTINGS, GENERATORS):
        yield Case(generator, num_ops, cluster, links)


def problem_of(case: Case) -> Problem:
    """The problem of a case; all devices together have twice the memory that everything needs."""
    graph = FAMILIES[case.generator](case.num_ops, 0)
    brings = with_benchmark_cluster(graph)
    assert brings.cluster is not None
    assert brings.costs is not None
    cluster, costs = brings.cluster, brings.costs
    if case.cluster == TWO_SPEEDS:
        cluster, costs = _two_speeds(cluster), _at_two_speeds(costs)
    if case.cluster == TWO_HOSTS:
        cluster = _hosts(_memory(graph, 8), num_hosts=2, bus=case.links == "shared")
        costs = replace(costs, transfer_s=np.full(graph.num_tensors, BY_ROUTE))
    elif case.links == "shared":
        wired = _hosts(cluster.memory_bytes.tolist(), num_hosts=1, bus=True)
        cluster = replace(
            cluster,
            route=wired.route,
            link_name=wired.link_name,
            link_bytes_per_s=wired.link_bytes_per_s,
            link_latency_s=wired.link_latency_s,
        )
    return _asked(graph, cluster, costs, Links.PARALLEL if case.links == "free" else Links.SHARED)


def never_freed(generator: str, num_ops: int, factor: float) -> Problem:
    """A generated graph on 4 devices behind one port each that share `factor` times what it holds."""
    graph = FAMILIES[generator](num_ops, 0)
    each = math.floor(factor * int(held_bytes(graph).sum()) / 4)
    cluster = star("tight", memory_bytes=[each] * 4, bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S)
    costs = with_benchmark_cluster(graph).costs
    assert costs is not None
    return _asked(graph, cluster, costs, Links.SHARED)


def _asked(graph: Graph, cluster: Cluster, costs: Costs, links: Links) -> Problem:
    return Problem(
        graph=graph,
        cluster=cluster,
        costs=costs,
        objective=Objective.STEP,
        links=links,
        split=Split.FREE,
        load=Load.SUM,
        pinned=np.full(graph.num_ops, FREE, dtype=np.int32),
    )


def _memory(graph: Graph, num_devices: int) -> list[int]:
    return [math.floor(MEMORY_FACTOR * int(held_bytes(graph).sum()) / num_devices)] * num_devices


def _two_speeds(cluster: Cluster) -> Cluster:
    """The same four devices, the last two slower."""
    rate = np.concatenate([cluster.flops_per_s, cluster.flops_per_s / SLOWER])
    return replace(
        cluster,
        name=TWO_SPEEDS,
        device_name=("fast0", "fast1", "slow0", "slow1"),
        kind=np.array([0, 0, 1, 1], dtype=np.int32),
        kind_name=("fast", "slow"),
        flops_per_s=rate,
        memory_bytes_per_s=np.repeat(cluster.memory_bytes_per_s, 2),
        overhead_s=np.repeat(cluster.overhead_s, 2),
        on_host=np.repeat(cluster.on_host, 2),
    )


def _at_two_speeds(costs: Costs) -> Costs:
    return replace(costs, compute_s=np.concatenate([costs.compute_s, SLOWER * costs.compute_s], axis=1))


def _hosts(memory_bytes: list[int], *, num_hosts: int, bus: bool) -> Cluster:
    """Equal devices on equal hosts, on a bus or behind a port each; one link out of and into each host."""
    num = len(memory_bytes)
    plain = star(
        f"{num} on {num_hosts}",
        memory_bytes=memory_bytes,
        bytes_per_s=BYTES_PER_S,
        latency_s=LATENCY_S,
        flops_per_s=1e6 * FLOPS_PER_US,
    )
    host = (np.arange(num) * num_hosts // num).astype(np.int32)
    inner = num_hosts if bus else 2 * num
    names = [f"bus{h}" for h in range(num_hosts)] if bus else list(plain.link_name)
    names += [f"host{h} {way}" for way in ("out", "in") for h in range(num_hosts)]
    # A bus is one link within a host and two between hosts: latencies agree with those of ports.
    latency = [LATENCY_S if bus else LATENCY_S / 2] * inner + [0.0 if bus else LATENCY_S / 2] * 2 * num_hosts
    return replace(
        plain,
        host=host,
        route=_routes(host, num_hosts=num_hosts, bus=bus),
        link_name=tuple(names),
        link_bytes_per_s=np.array([BYTES_PER_S] * inner + [BYTES_PER_S / FARTHER] * 2 * num_hosts),
        link_latency_s=np.array(latency),
    )


def _routes(host: Ints, *, num_hosts: int, bus: bool) -> Ints:
    """[D, D, 4] links in the order of `_hosts`."""
    num = len(host)
    inner = num_hosts if bus else 2 * num
    route = np.full((num, num, 4), NO_LINK, dtype=np.int32)
    for i, j in itertools.permutations(range(num), 2):
        first, last = (host[i], host[j]) if bus else (i, num + j)
        if host[i] != host[j]:
            route[i, j] = (first, inner + host[i], inner + num_hosts + host[j], last)
        elif bus:
            route[i, j, 0] = first
        else:
            route[i, j, :2] = (first, last)
    return route

"""Problems to learn from, drawn by seed: generated graphs on clusters of drawn speeds, links and memory.

No published and no captured graph is among them, so every one of those is held out. Graph family, size,
devices, kind of links, the ratio of transfers to work and the room for memory are drawn for every problem.
"""

from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.cluster import Cluster, star
from loadmaster.core.graph import Graph, held_bytes, home_bytes
from loadmaster.core.problem import BY_ROUTE, FREE, Costs, Links, Load, Objective, Origin, Problem, Split
from loadmaster.graph.generate import chain, diamond, fork_join, layered, many_source, rnn_grid

FAMILIES = (fork_join, rnn_grid, layered, many_source, diamond, chain)
_SIZES = {Objective.STEP: (14, 40, 80, 140, 300), Objective.THROUGHPUT: (14, 40, 80, 140)}
_STEP_LINKS = (Links.SHARED, Links.HOST, Links.PARALLEL)
_MOST_DEVICES = (6, 14)  # of most problems of a step, and of a quarter of them
_TINY = 9  # ops of a problem whose every plan can be ruled out


def draw_problem(seed: int, objective: Objective) -> Problem:
    """The problem of a seed."""
    rng = np.random.default_rng([seed, 20, objective == Objective.STEP])
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    tiny = rng.random() < 0.25
    size = _TINY if tiny else int(rng.choice(_SIZES[objective]) * rng.uniform(0.6, 1.3))
    graph = family(size, int(rng.integers(2**31)))
    if objective == Objective.STEP:
        most = 2 if tiny else _MOST_DEVICES[int(rng.random() < 0.25)]
        return _step_problem(graph, rng, most=most)
    return _throughput_problem(graph, rng)


def _step_problem(graph: Graph, rng: np.random.Generator, *, most: int) -> Problem:
    num = int(rng.integers(2, most + 1))
    kinds = int(rng.integers(1, min(3, num) + 1))
    base_s = _draw_seconds(graph, rng)
    speed = np.concatenate([[1.0], rng.uniform(0.1, 1.0, kinds - 1)])
    compute_s = base_s[:, None] / speed[None] * np.exp(rng.normal(0.0, 0.15, (graph.num_ops, kinds)))
    kind = np.concatenate([np.arange(kinds), rng.integers(0, kinds, num - kinds)])
    mean_bytes = max(float(graph.tensor_bytes.mean()), 1.0) if graph.num_tensors else 1.0
    wait_s = float(base_s.mean()) * 10 ** rng.uniform(-1.5, 0.7)
    cluster = star(
        "drawn",
        memory_bytes=_draw_memory(graph, rng, num),
        bytes_per_s=mean_bytes / max(0.8 * wait_s, 1e-12),
        latency_s=0.2 * wait_s,
    )
    links = _STEP_LINKS[int(rng.integers(len(_STEP_LINKS)))] if kinds > 1 else Links.SHARED
    on_host = np.zeros(kinds, dtype=np.bool_)
    on_host[-1] = links == Links.HOST  # which go through the memory of a host
    cluster = _with_kinds(cluster, kind, on_host)
    return _make_problem(graph, cluster, compute_s, Objective.STEP, links, Split.FREE)


def _throughput_problem(graph: Graph, rng: np.random.Generator) -> Problem:
    """Accelerators and a CPU around host memory, given transfer times, as in the published throughput set."""
    accelerators = int(rng.integers(2, 7))
    base_s = _draw_seconds(graph, rng)
    slow = rng.uniform(5.0, 25.0)
    compute_s = np.stack([base_s, slow * base_s], axis=1)
    memory = [*_draw_memory(graph, rng, accelerators), 2**50]
    cluster = star("drawn", memory_bytes=memory, bytes_per_s=1e9, latency_s=0.0)
    kind = np.array([0] * accelerators + [1])
    cluster = _with_kinds(cluster, kind, np.array([False, True]))
    wait_s = float(base_s.mean()) * 10 ** rng.uniform(-1.5, 0.5)
    given = wait_s * np.exp(rng.normal(0.0, 0.6, graph.num_tensors))
    problem = _make_problem(graph, cluster, compute_s, Objective.THROUGHPUT, Links.HOST, Split.CHAIN)
    return replace(problem, costs=replace(problem.costs, transfer_s=given))


def _draw_seconds(graph: Graph, rng: np.random.Generator) -> Floats:
    """[N] seconds as generated, more or less unequal."""
    flops = np.maximum(graph.flops, 1e-3 * max(float(graph.flops.max()), 1.0))
    return np.asarray((flops / flops.mean()) ** rng.uniform(0.3, 1.2) * 1e-3)


def _draw_memory(graph: Graph, rng: np.random.Generator, num: int) -> list[int]:
    """Room for everything on each device, or little more in all than there is to hold."""
    need = float(held_bytes(graph).sum() + home_bytes(graph).sum())
    if rng.random() < 0.5:
        return [int(2 * need)] * num
    largest = float(held_bytes(graph).max()) * 2
    share = need / num * rng.uniform(1.3, 3.0)
    return [int(max(share * rng.uniform(0.8, 1.2), largest)) for _ in range(num)]


def _with_kinds(
    cluster: Cluster, kind: "np.typing.NDArray[np.int64]", on_host: "np.typing.NDArray[np.bool_]"
) -> Cluster:
    kinds = len(on_host)
    return replace(
        cluster,
        kind=kind.astype(np.int32),
        kind_name=tuple(f"kind{k}" for k in range(kinds)),
        flops_per_s=np.repeat(cluster.flops_per_s, kinds, axis=0),
        memory_bytes_per_s=np.repeat(cluster.memory_bytes_per_s, kinds),
        overhead_s=np.zeros(kinds),
        on_host=on_host,
    )


def _make_problem(
    graph: Graph, cluster: Cluster, compute_s: Floats, objective: Objective, links: Links, split: Split
) -> Problem:
    num = graph.num_ops
    costs = Costs(
        compute_s=compute_s,
        issue_s=np.zeros(num),
        transfer_s=np.full(graph.num_tensors, BY_ROUTE),
        origin=np.full(num, Origin.GIVEN, dtype=np.int8),
        rel_error=np.zeros(num),
    )
    pinned = np.full(num, FREE, dtype=np.int32)
    return Problem(graph, cluster, costs, objective, links, split, Load.SUM, pinned)

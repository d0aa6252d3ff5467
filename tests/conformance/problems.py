"""The problems every algorithm must answer: small, each with one thing that trips a careless one."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from loadmaster import api
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import NO_STORAGE, Graph, Phase
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.transformer import transformer
from tests.builders import (
    chain,
    cluster_of,
    diamond,
    graph_of,
    host_cluster,
    loose_ops,
    problem_of,
    star_cluster,
)

INF = float("inf")


def unequal_cluster(memory: list[int] | int = 1000) -> Cluster:
    """A fast and a slow device, a link of its own each way."""
    return cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, False), memory=memory)


def tiny_chain() -> Problem:
    """Nothing to gain from a second device."""
    return problem_of(chain(4), star_cluster(2), [1, 2, 3, 4])


def small_diamond() -> Problem:
    """Two branches that may run at once, on unequal devices."""
    return problem_of(diamond(1), unequal_cluster(), [[1, 2], [4, 5], [4, 5], [1, 2]])


def fork_join() -> Problem:
    """112 ops on the four devices of the published benchmark, memory at twice the need."""
    return api.problem("gen:fork_join:100")


def zero_time_op() -> Problem:
    """The same with an op of no time, which published placers take for 'not yet known' (R1)."""
    problem = fork_join()
    seconds = problem.costs.compute_s.copy()
    seconds[1] = 0.0
    return replace(problem, costs=replace(problem.costs, compute_s=seconds))


def one_layer() -> Problem:
    """A transformer's training step with groups, parameters, updates and a tied embedding."""
    graph = transformer(num_layers=1, width=64, num_heads=2, seq=32, batch=2, vocab=100)
    return api.problem(graph, "V100-16GB, T4, cpu-64GB", optimizer="adam")


def msr_graph() -> Graph:
    """Four forward ops, each with its backward op in one group; the memory of tensors is in the ops."""
    builder = GraphBuilder("msr-like")
    forward = [builder.op(f"f{at}", group=at, resident_bytes=3) for at in range(4)]
    backward = [
        builder.op(f"b{at}", group=at, phase=Phase.BACKWARD, mirror=forward[at], resident_bytes=1)
        for at in reversed(range(4))
    ]
    ops = forward + backward
    for source, target in itertools.pairwise(ops):
        tensor = builder.tensor(source, 8, storage=NO_STORAGE)
        builder.use(tensor, target)
        if source in forward[:2]:  # a residual
            builder.use(tensor, forward[3])
    return builder.build()


def pipeline(split: Split) -> Problem:
    """Two accelerators and a CPU around host memory, as in the msr files."""
    graph = msr_graph()
    seconds = [[3, 30], [1, 10], [2, 20], [2, 20], [4, 40], [4, 40], [2, 20], [6, 60]]
    return problem_of(
        graph,
        host_cluster(2),
        seconds,
        transfer_s=0.5,
        objective=Objective.THROUGHPUT,
        links=Links.HOST,
        split=split,
    )


def pinned_ops() -> Problem:
    """A chain whose middle must be on the slow device."""
    seconds = [[1, 3]] * 6
    return problem_of(chain(6, 1), unequal_cluster(), seconds, pinned=[-1, -1, 1, 1, -1, -1])


def pinned_chain() -> Problem:
    """A pipeline whose first op must be on the second device."""
    seconds = [[1, 3]] * 6
    return problem_of(
        chain(6, 1),
        unequal_cluster(),
        seconds,
        pinned=[1, -1, -1, -1, -1, -1],
        objective=Objective.THROUGHPUT,
        split=Split.CHAIN,
    )


def tight_memory() -> Problem:
    """Five ops of 10 bytes; the fast device holds two of them, the slow one three."""
    graph = graph_of(*({"resident_bytes": 10} for _ in range(5)))
    return problem_of(graph, unequal_cluster([20, 30]), [[1, 2]] * 5)


def tight_activations() -> Problem:
    """A training step in miniature: what fills the device is gone at the end of the step."""
    forward = [{"uses": [at - 1] if at else [], "makes": [10]} for at in range(4)]
    backward = [
        {"uses": [3 - at] + ([3 + at] if at else []), "makes": [1], "phase": Phase.BACKWARD}
        for at in range(4)
    ]
    return problem_of(graph_of(*forward, *backward), unequal_cluster([33, 33]), [[1, 1]] * 8)


def unsupported_ops() -> Problem:
    """The fast kind cannot run every third op."""
    seconds = [[INF, 2] if at % 3 == 1 else [1, 3] for at in range(7)]
    return problem_of(chain(7, 1), unequal_cluster(), seconds)


def issued_ops() -> Problem:
    """Launching takes as long as computing."""
    return problem_of(diamond(0), unequal_cluster(), [[1, 2]] * 4, issue_s=1.0)


def shared_engine() -> Problem:
    """Two logical devices of one chip, and a third."""
    cluster = cluster_of(
        {(i, j): [0] for i in range(3) for j in range(3) if i != j},
        kind=[0, 0, 0],
        engine=[0, 0, 1],
        memory=50,
    )
    return problem_of(loose_ops(5), cluster, [3, 1, 4, 1, 5])


def too_large() -> Problem:
    """One op needs 30 bytes, the largest device has 25."""
    graph = graph_of({"resident_bytes": 30}, {"resident_bytes": 5})
    return problem_of(graph, unequal_cluster([20, 25]), [[1, 2]] * 2)


def too_much() -> Problem:
    """Each op fits, all together do not."""
    graph = graph_of(*({"resident_bytes": 10} for _ in range(5)))
    return problem_of(graph, unequal_cluster([20, 25]), [[1, 2]] * 5)


def untold() -> Problem:
    """Three tensors of 8 bytes, used in pairs: all three must be there at once, which no op alone tells."""
    makers = [{"makes": [8]} for _ in range(3)]
    users = [{"uses": pair} for pair in ([0, 1], [1, 2], [0, 2])]
    return problem_of(graph_of(*makers, *users), star_cluster(1, memory=20), 1.0)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "tiny chain": tiny_chain,
    "diamond": small_diamond,
    "fork_join": fork_join,
    "zero time": zero_time_op,
    "one layer": one_layer,
    "pipeline, free": lambda: pipeline(Split.FREE),
    "pipeline, chain": lambda: pipeline(Split.CHAIN),
    "pipeline, convex": lambda: pipeline(Split.CONVEX),
    "pinned": pinned_ops,
    "pinned chain": pinned_chain,
    "tight memory": tight_memory,
    "tight activations": tight_activations,
    "unsupported": unsupported_ops,
    "issued": issued_ops,
    "shared engine": shared_engine,
    "too large": too_large,
    "too much": too_much,
    "untold": untold,
}
INFEASIBLE = {"too large", "too much", "untold"}


def total_shortfall(problem: Problem, peak_bytes: list[int]) -> list[int]:
    """Bytes lacking on each device."""
    usable = (problem.cluster.memory_bytes - problem.cluster.reserve_bytes).tolist()
    return [max(peak - room, 0) for peak, room in zip(peak_bytes, usable, strict=True)]


def all_columns(problem: Problem) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """Every array of a problem."""
    nouns = (problem.graph, problem.cluster, problem.costs, problem)
    fields = [getattr(noun, field) for noun in nouns for field in noun.__slots__]
    return [value for value in fields if isinstance(value, np.ndarray)]

"""A published or corrected cluster as tables: the completion time of every (job, block), and what a degree
occupies.

Sections 2.3 to 2.5 and 5 of PAC-ML's rules. With the published rules a job's footprint is the union of the
first free block over the distinct splits of its ops; without the leak it is the block alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.blocks import DEGREES, MAX_DEGREE, Blocks, all_blocks
from loadmaster.advisor.environments.profile import JobGraph
from loadmaster.advisor.environments.rules import Rules
from loadmaster.advisor.environments.timing import completion_time, split_counts, time_step
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """Tables of M models on B blocks of K degrees; times in the published unit."""

    name: str
    models: tuple[str, ...]
    rules: Rules
    jct: NDArray[np.float64]  # [M, B]
    sequential: NDArray[np.float64]  # [M]
    needs: NDArray[np.bool_]  # [M, K, K] which first-fit blocks a degree occupies
    blocks: Blocks
    conflict: NDArray[np.int64]  # [B, K] blocks of each degree that share a server with a block

    @property
    def nominal(self) -> NDArray[np.float64]:
        """[M, K] completion time on the first shape of each degree."""
        return np.ascontiguousarray(self.jct[:, self.blocks.first[:-1]])


def build_world(graphs: tuple[JobGraph, ...], rules: Rules, name: str = "") -> World:
    """Time every model on every shape."""
    if not graphs:
        raise InputError("a world needs at least one job graph")
    blocks = all_blocks()
    jct = np.empty((len(graphs), len(blocks.mask)))
    needs = np.zeros((len(graphs), len(DEGREES), len(DEGREES)), dtype=np.bool_)
    for m, graph in enumerate(graphs):
        for k, degree in enumerate(DEGREES):
            counts = split_counts(graph, degree)
            needs[m, k, k] = True
            if rules.leak:
                needs[m, k, [DEGREES.index(int(c)) for c in np.unique(counts)]] = True
            jct[m, blocks.first[k] : blocks.first[k + 1]] = _times_of(graph, k, counts, rules, blocks)
        jct[m, : blocks.first[1]] = graph.sequential_ms
        if rules.tick_overshoot and graph.name == "resnet18":
            jct[m, : blocks.first[1]] = np.nextafter(graph.sequential_ms, np.inf)
    return World(
        name=name or ("compat" if rules.ms_read_as_s else "fixed"),
        models=tuple(graph.name for graph in graphs),
        rules=rules,
        jct=jct,
        sequential=np.array([graph.sequential_ms for graph in graphs]),
        needs=needs,
        blocks=blocks,
        conflict=_conflicts(blocks),
    )


def _times_of(
    graph: JobGraph, k: int, counts: NDArray[np.int64], rules: Rules, blocks: Blocks
) -> NDArray[np.float64]:
    """Completion times on the blocks of one degree: one for each shape, or one for all (defect J1)."""
    members = range(int(blocks.first[k]), int(blocks.first[k + 1]))
    shapes = blocks.shape[list(members)]
    times: dict[int, float] = {}
    for block, shape in zip(members, shapes, strict=True):
        if shape not in times:
            if rules.jct_without_block and times:
                times[shape] = next(iter(times.values()))
            else:
                times[shape] = completion_time(
                    time_step(graph, counts, _servers_of(counts, block, rules, blocks), rules)
                )
    return np.array([times[shape] for shape in shapes])


def _servers_of(counts: NDArray[np.int64], block: int, rules: Rules, blocks: Blocks) -> NDArray[np.int64]:
    """The server of every sub-op of a job on a block of an otherwise empty cluster."""
    own = blocks.degree[block]
    rows = np.full((len(counts), MAX_DEGREE), -1, dtype=np.int64)
    for op, count in enumerate(counts):
        k = DEGREES.index(int(count)) if rules.leak else int(own)
        source = block if k == own else int(blocks.first[k])
        rows[op, :count] = blocks.servers[source, :count]
    return rows


def _conflicts(blocks: Blocks) -> NDArray[np.int64]:
    shares = (blocks.mask[:, None] & blocks.mask[None, :]) != 0
    return np.stack(
        [shares[:, a:b].sum(axis=1) for a, b in zip(blocks.first[:-1], blocks.first[1:], strict=True)], axis=1
    )

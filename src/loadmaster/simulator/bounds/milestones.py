"""Milestones: ops of the longest path that most of the work comes before or after.

What comes before a milestone has ended when it starts, what comes after it starts when it has ended. So the
longest path and the work of every engine are tied to the same few moments.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.graph import Graph, edges
from loadmaster.simulator.bounds.skeleton import Skeleton


@dataclass(frozen=True, slots=True, eq=False)
class Milestone:
    """An op, and which of N ops come before and after it in every run."""

    op: int
    before: Bools  # [N]
    after: Bools  # [N]

    @property
    def around(self) -> tuple[Bools, Bools]:
        """[N] what has begun while the op runs, and what has not ended: the op itself is both."""
        itself = np.arange(len(self.before)) == self.op
        return self.before | itself, self.after | itself


def find_milestones(graph: Graph, frame: Skeleton, num: int) -> list[Milestone]:
    """The best of each of `num` parts of the longest path, in its order."""
    source, target = edges(graph)
    seconds = np.where(np.isfinite(frame.op_s), frame.op_s, np.inf).min(axis=1)
    path = _find_longest_path(source, target, seconds)
    ahead, behind = (
        _find_reachable(graph.num_ops, source, target),
        _find_reachable(graph.num_ops, target, source),
    )
    chosen: list[Milestone] = []
    for part in np.array_split(np.array(path, dtype=np.int64), num):
        marks = [
            Milestone(op, _bits_to_array(behind[op], graph.num_ops), _bits_to_array(ahead[op], graph.num_ops))
            for op in part
        ]
        if marks:
            chosen.append(max(marks, key=lambda mark: float(seconds @ (mark.before | mark.after))))
    return chosen


def _find_longest_path(source: Ints, target: Ints, seconds: Floats) -> list[int]:
    """Timed ops of the path with most time of its own, each op at its least: transfers would favour stubs."""
    rest, after = seconds.copy(), np.full(len(seconds), -1, dtype=np.int64)
    order = np.argsort(source, kind="stable")[::-1]  # ops are in topological order
    for u, v in zip(source[order].tolist(), target[order].tolist(), strict=True):
        if seconds[u] + rest[v] > rest[u] or after[u] < 0:
            rest[u], after[u] = seconds[u] + rest[v], v
    path = [int(rest.argmax())]
    while after[path[-1]] >= 0:
        path.append(int(after[path[-1]]))
    return [op for op in path if seconds[op] > 0]


def _find_reachable(num: int, source: Ints, target: Ints) -> list[int]:
    """By op the set of ops that it reaches, as bits."""
    forward = bool(len(source) == 0 or source[0] < target[0])
    order = np.argsort(source, kind="stable")
    order = order[::-1] if forward else order
    reached = [0] * num
    for u, v in zip(source[order].tolist(), target[order].tolist(), strict=True):
        reached[u] |= reached[v] | (1 << v)
    return reached


def _bits_to_array(chosen: int, num: int) -> Bools:
    """[num] a set of bits as an array."""
    raw = np.frombuffer(chosen.to_bytes((num + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, bitorder="little")[:num].astype(np.bool_)

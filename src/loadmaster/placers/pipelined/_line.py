"""Line: a training graph as a row of segments, between which it may be cut into stages.

Classes of ops that must share a stage (`exact/_maxload/contract.py`) stand in the order of the forward pass.
Neighbours are joined into segments until few are left: in each share of the time, the border stays over which
least is sent. Seconds and bytes of any run of segments are then differences of sums.
"""

import heapq
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.in_flight import find_kept
from loadmaster.core.problem import BY_ROUTE, Problem, allowed_devices
from loadmaster.placers.exact._maxload.contract import chain_model
from loadmaster.simulator.pipelines.stage_facts import StageFacts, find_facts

T = TypeVar("T", bound=np.generic)
MOST_SEGMENTS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """P segments; sums are over the segments before each border [P + 1]."""

    problem: Problem
    segment: Ints  # [N] of each op
    forward_s: Floats  # [P + 1, K]
    backward_s: Floats  # [P + 1, K]
    weight_s: Floats  # [P + 1, K]
    update_s: Floats  # [P + 1, K]
    refused: Ints  # [P + 1, D] segments that a device may not run
    resident_bytes: Longs  # [P + 1]
    stash_bytes: Longs  # [P + 1]
    gradient_bytes: Longs  # [P + 1]
    forward_bytes: Longs  # [P + 1] sent over each border
    backward_bytes: Longs  # [P + 1]
    forward_given_s: Floats  # [P + 1] transfer times where they are given, else BY_ROUTE
    backward_given_s: Floats  # [P + 1]

    @property
    def num(self) -> int:
        """P."""
        return len(self.forward_s) - 1


def make_line(problem: Problem, most: int = MOST_SEGMENTS) -> Line:
    """The line of a problem, of at most so many segments."""
    model = chain_model(problem, merge=False).model
    position = _sort_classes(problem, model.of_op, model.num_classes, model.source, model.target)
    place = position[model.of_op]
    none = np.zeros(problem.graph.num_ops, dtype=np.bool_)
    whole = find_facts(problem, place, none, model.num_classes)
    segment = _join(whole, model.num_classes, most)[place]
    return _sum_up(problem, segment)


def _sort_classes(problem: Problem, of_op: Ints, num: int, source: Ints, target: Ints) -> Ints:
    """[classes] places in an order that the chain allows, near that of the forward pass."""
    graph = problem.graph
    first = np.full(num, graph.num_ops, dtype=np.int64)
    forward = np.flatnonzero(graph.phase == Phase.FORWARD)
    np.minimum.at(first, of_op[forward], forward)
    waiting = np.bincount(target, minlength=num)
    followers: list[list[int]] = [[] for _ in range(num)]
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        followers[one].append(other)
    # A class without forward ops (a shared weight) goes before the first that follows it, not earlier.
    for c in np.flatnonzero(first == graph.num_ops).tolist():
        first[c] = min((first[f] for f in followers[c]), default=graph.num_ops)
    ready = [(int(first[c]), c) for c in range(num) if waiting[c] == 0]
    heapq.heapify(ready)
    position = np.zeros(num, dtype=np.int32)
    for at in range(num):
        _, c = heapq.heappop(ready)
        position[c] = at
        for f in followers[c]:
            waiting[f] -= 1
            if waiting[f] == 0:
                heapq.heappush(ready, (int(first[f]), f))
    return position


def _join(whole: StageFacts, num: int, most: int) -> Ints:
    """[classes in order] segments: in each share of time and of bytes, the cheapest border stays."""
    seconds = (whole.forward_s + whole.backward_s).min(axis=1)
    seconds = np.where(np.isfinite(seconds), seconds, 0.0)
    load = seconds / max(seconds.sum(), 1e-300)
    held = whole.resident_bytes + whole.stash_bytes
    load = load + 0.25 * held / max(held.sum(), 1) + 1e-9
    done = np.cumsum(load)[:-1]
    cost = (whole.forward_bytes + np.roll(whole.backward_bytes, -1))[:-1]
    bucket = np.minimum((done / max(np.cumsum(load)[-1], 1e-300) * most).astype(np.int64), most - 1)
    order = np.lexsort((np.arange(num - 1), cost, bucket))
    _, keep = np.unique(bucket[order], return_index=True)
    cut = np.zeros(num, dtype=np.int32)
    cut[order[keep] + 1] = 1
    if keep.size:
        cut[0] = 0
    return np.cumsum(cut).astype(np.int32)


def _sum_up(problem: Problem, segment: Ints) -> Line:
    graph, num = problem.graph, int(segment.max()) + 1
    none = np.zeros(graph.num_ops, dtype=np.bool_)
    facts = find_facts(problem, segment, none, num)
    allowed = allowed_devices(problem, segment, num)
    finite = [np.where(np.isfinite(x), x, 0.0) for x in (facts.forward_s, facts.backward_s, facts.weight_s)]
    return Line(
        problem=problem,
        segment=segment,
        forward_s=_sums(finite[0]),
        backward_s=_sums(finite[1]),
        weight_s=_sums(finite[2]),
        update_s=_sums(np.where(np.isfinite(facts.update_s), facts.update_s, 0.0)),
        refused=_sums((~allowed).astype(np.int64)).astype(np.int32),
        resident_bytes=_sums(facts.resident_bytes),
        stash_bytes=_sums(_stash_once(problem, segment, num)),
        gradient_bytes=_sums(facts.gradient_bytes),
        forward_bytes=_borders(facts.forward_bytes, 0),
        backward_bytes=_borders(np.roll(facts.backward_bytes, -1), 0),
        forward_given_s=_borders(facts.forward_transfer_s, BY_ROUTE),
        backward_given_s=_borders(np.roll(facts.backward_transfer_s, -1), BY_ROUTE),
    )


def _sums(column: NDArray[T]) -> NDArray[T]:
    """Sums over all rows before each border."""
    start = np.zeros((1, *column.shape[1:]), dtype=column.dtype)
    return np.concatenate([start, np.cumsum(column, axis=0, dtype=column.dtype)])


def _borders(after: NDArray[T], ends: float) -> NDArray[T]:
    """What goes over the border after each segment, by border; nothing over both ends."""
    found = np.full(len(after) + 1, ends, dtype=after.dtype)
    found[1:-1] = after[:-1]
    return found


def _stash_once(problem: Problem, segment: Ints, num: int) -> Longs:
    """[P] bytes kept for the backward pass, a storage that several segments need in the first of them."""
    graph = problem.graph
    none: Bools = np.zeros(graph.num_ops, dtype=np.bool_)
    found = find_kept(graph, segment, none, num)
    tensor, at = found.pair // num, found.pair % num
    first = np.ones(len(tensor), dtype=np.bool_)
    first[1:] = tensor[1:] != tensor[:-1]  # pairs are sorted by storage, then segment
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, at[first], graph.tensor_bytes[tensor[first]])
    return total

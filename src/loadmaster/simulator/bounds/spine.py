"""The spine of a training step: forward ops in a row, and a backward op of each in the other order.

    m_0 -> m_1 -> ... -> m_K      forward ops, each comes after the one before it in every run
    B_K -> ... -> B_1 -> B_0      B_k is a backward op of the unit of m_k

Between two neighbours lie *windows*: the ops that come after the one and before the other in every run.
Ops in no window (updates, gradients of weights, branches that run beside the spine) are left out, which
only relaxes.

It is taken from the longest forward path. Where a branch beside it is short, the part of the path beside
the branch is given up, so that both branches are in one window.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.graph import Graph, Phase, edges, units

_TINY = 2e-4  # of the path's time: what is shorter does not decide where the path is cut
_DETOUR = 8  # steps of the path beside one tensor
_WIDEST = 24  # timed ops of the path that are given up for a branch beside them
_LIGHT = 4.0  # times as long as a branch beside it: then the path stays as it is


@dataclass(frozen=True, slots=True, eq=False)
class Spine:
    """K + 1 forward ops with their backward ops, and who comes before and after whom, as bits by op."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    before: list[int]
    after: list[int]

    def between(self, first: int, last: int) -> list[int]:
        """Ops that come after one op and before another in every run, in the graph's order."""
        return _list_bits(self.after[first] & self.before[last])


def find_spine(graph: Graph, least_s: Floats) -> Spine | None:
    """The spine by the least seconds of every op, or None where no backward pass mirrors a forward one."""
    source, target = edges(graph)
    order = np.argsort(source, kind="stable")
    after = _find_reachable(graph.num_ops, source[order][::-1], target[order][::-1])
    by_target = np.argsort(target, kind="stable")
    before = _find_reachable(graph.num_ops, target[by_target], source[by_target])
    unit, _ = units(graph)
    backward: dict[int, list[int]] = {}
    for op in np.flatnonzero(graph.phase == Phase.BACKWARD).tolist():
        backward.setdefault(int(unit[op]), []).append(op)
    path = [op for op in _longest_path(graph, least_s, source, target) if int(unit[op]) in backward]
    if not path:
        return None
    path = _leave_detours(graph, _one_of_each_unit(path, unit, least_s), least_s)
    path = _give_way(graph, path, least_s, before, after)
    pairs = _pair_up(path, [backward[int(unit[op])] for op in path], least_s, after)
    if len(pairs) < 2:
        return None
    return Spine(tuple(f for f, _ in pairs), tuple(b for _, b in pairs), before, after)


def _longest_path(graph: Graph, least_s: Floats, source: Ints, target: Ints) -> list[int]:
    """Timed forward ops of the longest path over forward ops."""
    is_forward = graph.phase == Phase.FORWARD
    rest = np.where(is_forward, least_s, 0.0)
    after = np.full(graph.num_ops, -1, dtype=np.int64)
    order = np.argsort(source, kind="stable")[::-1]
    for u, v in zip(source[order].tolist(), target[order].tolist(), strict=True):
        if is_forward[u] and is_forward[v] and (least_s[u] + rest[v] > rest[u] or after[u] < 0):
            rest[u], after[u] = least_s[u] + rest[v], v
    path = [int(np.where(is_forward, rest, -1.0).argmax())]
    while after[path[-1]] >= 0:
        path.append(int(after[path[-1]]))
    return [op for op in path if least_s[op] > 0 and is_forward[op]]


def _one_of_each_unit(path: list[int], unit: Ints, least_s: Floats) -> list[int]:
    """The path with the longest op of every unit: a unit is decided in one place."""
    longest: dict[int, int] = {}
    for op in path:
        known = longest.setdefault(int(unit[op]), op)
        if least_s[op] > least_s[known]:
            longest[int(unit[op])] = op
    return [op for op in path if longest[int(unit[op])] == op]


def _leave_detours(graph: Graph, path: list[int], least_s: Floats) -> list[int]:
    """The path without what lies beside a tensor that is larger than what passes there: a norm's mean.

    Else the path would change devices at the small tensor, and nobody would pay for the large one.
    """
    place = {op: at for at, op in enumerate(path)}
    largest = np.zeros(graph.num_ops, dtype=np.int64)
    np.maximum.at(largest, graph.tensor_op, graph.tensor_bytes)
    kept = [True] * len(path)
    timed = np.arange(graph.num_ops)  # an op without time stands for the one that it looks at
    for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        if least_s[op] == 0 and graph.tensor_bytes[t] == largest[op]:
            timed[op] = timed[
                graph.tensor_op[t]
            ]  # uses of earlier ops may come later; then it stays as it is
    for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        first, last = place.get(int(timed[graph.tensor_op[t]])), place.get(op)
        if first is None or last is None or not 1 < last - first <= _DETOUR:
            continue
        if largest[path[first + 1 : last]].min() * 2 < graph.tensor_bytes[t]:
            kept[first + 1 : last] = [False] * (last - first - 1)
    return [op for at, op in enumerate(path) if kept[at]]


def _give_way(
    graph: Graph, path: list[int], least_s: Floats, before: list[int], after: list[int]
) -> list[int]:
    """The path without its parts beside branches that are short and not light: keys and values, a second arm.

    What is light beside many layers, as cross-attention's keys, is no reason to give those layers up.
    """
    tiny = _TINY * float(least_s[path].sum())
    beside: dict[tuple[int, int], float] = {}
    on_path = set(path)
    for op in np.flatnonzero((graph.phase == Phase.FORWARD) & (least_s > tiny)).tolist():
        if op not in on_path:
            ends = _neighbours(path, op, before, after)
            beside[ends] = beside.get(ends, 0.0) + float(least_s[op])
    kept = [True] * len(path)
    for (first, last), seconds in beside.items():
        between = path[first + 1 : last]
        is_light = float(least_s[between].sum()) > _LIGHT * seconds
        if first >= 0 and last < len(path) and len(between) <= _WIDEST and not is_light:
            kept[first + 1 : last] = [False] * len(between)
    return [op for at, op in enumerate(path) if kept[at]]


def _neighbours(path: list[int], op: int, before: list[int], after: list[int]) -> tuple[int, int]:
    """Places on the path of the last op that comes before `op`, -1 = none, and of the first one after it."""
    first, last = -1, len(path)
    for at, one in enumerate(path):
        if before[op] >> one & 1:
            first = at
        if after[op] >> one & 1:
            last = at
            break
    return first, last


def _pair_up(
    path: list[int], backward: list[list[int]], least_s: Floats, after: list[int]
) -> list[tuple[int, int]]:
    """Ops of the path with backward ops that follow each other the other way; as much time as possible."""
    table: dict[tuple[int, int], tuple[float, tuple[int, int] | None]] = {}
    for at in range(len(path) - 1, -1, -1):
        for op in backward[at]:
            weight, follower = 0.0, None
            for later, other in table:  # nearer to the loss: its backward op comes before this one
                if later > at and table[later, other][0] > weight and after[other] >> op & 1:
                    weight, follower = table[later, other][0], (later, other)
            if not after[path[at]] >> op & 1:
                continue
            table[at, op] = (weight + float(least_s[op] + least_s[path[at]]) + 1e-12, follower)
    if not table:
        return []
    now: tuple[int, int] | None = max(table, key=lambda key: (table[key][0], -key[0]))
    pairs = []
    while now is not None:
        pairs.append((path[now[0]], now[1]))
        now = table[now][1]
    return pairs


def _find_reachable(num: int, source: Ints, target: Ints) -> list[int]:
    """By op the set of ops that it reaches, as bits; what an op leads to is complete when it is read."""
    reached = [0] * num
    for u, v in zip(source.tolist(), target.tolist(), strict=True):
        reached[u] |= reached[v] | (1 << v)
    return reached


def _list_bits(chosen: int) -> list[int]:
    found = []
    while chosen:
        low = chosen & -chosen
        found.append(low.bit_length() - 1)
        chosen ^= low
    return found

"""Scenes: a problem as a network sees it, without units of time or bytes and without numbers of nodes.

Nodes are ops for a step and classes of a chain for throughput. Every feature is a ratio, a share or a
logarithm of one, so that a policy trained on some graphs can be asked about others: a problem with all times
scaled, its nodes permuted or its equal devices renamed is the same scene. O(nodes + edges), plus devices.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bools, Floats, Ints, offsets
from loadmaster.core.graph import Phase, edges, held_bytes
from loadmaster.core.problem import Problem
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.heuristic._lists import Lists

NODE, DEVICE, PAIR, EDGE = 22, 6, 3, 3  # features of each
HEAD, TAIL, TAIL_C, STEP = 6, 7, 10, 21  # columns of nodes that a network starts from
_TINY, _MOST = 1e-12, 8.0
Column = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """N nodes, E edges of a directed acyclic graph, D devices."""

    node: Column  # [N, NODE]
    device: Column  # [D, DEVICE]
    pair: Column  # [N, D, PAIR]
    allowed: Bools  # [N, D]
    source: Ints  # [E]
    target: Ints  # [E]
    edge: Column  # [E, EDGE]

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.node)


@dataclass(frozen=True, slots=True, eq=False)
class _Raw:
    """What both objectives bring, with units."""

    seconds: Floats  # [N, D] inf = not allowed
    num_bytes: Floats  # [N]
    source: Ints
    target: Ints
    edge_s: Floats  # [E] of a transfer
    backward: Floats  # [N] share of backward work
    size: Floats  # [N] ops in a node
    room: Floats  # [D]
    link_s: Floats  # [D] mean transfer to and from a device
    on_host: Bools  # [D]
    step: bool
    free: bool


def scene_of_step(problem: Problem, lists: Lists) -> Scene:
    """Ops and what is sent between them."""
    graph = problem.graph
    source, target = edges(graph)
    key = source.astype(np.int64) * graph.num_ops + target
    pair = graph.tensor_op[graph.use_tensor].astype(np.int64) * graph.num_ops + graph.use_op
    edge_s = np.zeros(len(key))
    np.add.at(edge_s, np.searchsorted(key, pair), lists.transfer_s[graph.use_tensor])
    allowed = lists.cargo.fits[lists.cargo.of_op]
    raw = _Raw(
        seconds=np.where(allowed, problem.device_compute_s, np.inf),
        num_bytes=held_bytes(graph).astype(np.float64),
        source=source,
        target=target,
        edge_s=edge_s,
        backward=(graph.phase == Phase.BACKWARD).astype(np.float64),
        size=np.bincount(lists.cargo.of_op)[lists.cargo.of_op].astype(np.float64),
        room=problem.cluster.usable_bytes.astype(np.float64),
        link_s=_link_seconds(problem),
        on_host=problem.cluster.on_host[problem.cluster.kind],
        step=True,
        free=True,
    )
    return _make_scene(raw)


def scene_of_throughput(problem: Problem, model: MaxLoad) -> Scene:
    """Classes of a chain and what crosses between them."""
    kind = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    for t, alike in enumerate(model.devices):
        kind[list(alike)] = t
    nets, num = model.nets, model.num_classes
    of_use = np.repeat(np.arange(nets.num), np.diff(nets.ptr))
    cost = 0.5 * (nets.read_s.mean(axis=0) + nets.write_s.mean(axis=0))
    home, user = nets.home[of_use].astype(np.int64), nets.user.astype(np.int64)
    known = model.source.astype(np.int64) * num + model.target
    order = np.argsort(known, kind="stable")
    edge_s = np.zeros(len(known))
    for one, other in ((home, user), (user, home)):
        asked = one * num + other
        at = np.searchsorted(known[order], asked)
        there = at < len(known)
        there[there] = known[order][at[there]] == asked[there]
        np.add.at(edge_s, order[at[there]], cost[of_use][there])
    phase = problem.graph.phase == Phase.BACKWARD
    size = np.bincount(model.of_op, minlength=num).astype(np.float64)
    raw = _Raw(
        seconds=model.seconds[:, kind],
        num_bytes=model.num_bytes.astype(np.float64),
        source=model.source,
        target=model.target,
        edge_s=edge_s,
        backward=np.bincount(model.of_op, phase, num) / np.maximum(size, 1.0),
        size=size,
        room=problem.cluster.usable_bytes.astype(np.float64),
        link_s=_link_seconds(problem),
        on_host=problem.cluster.on_host[problem.cluster.kind],
        step=False,
        free=problem.split == "free",
    )
    return _make_scene(raw)


def _link_seconds(problem: Problem) -> Floats:
    """[D] seconds for the mean tensor to and from each device."""
    from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s

    cluster, num = problem.cluster, problem.cluster.num_devices
    if num == 1 or problem.graph.num_tensors == 0:
        return np.zeros(num)
    mean_bytes = float(problem.graph.tensor_bytes.mean())
    seconds = route_latency_s(cluster) + mean_bytes / np.maximum(route_bytes_per_s(cluster), _TINY)
    np.fill_diagonal(seconds, 0.0)
    return np.asarray((seconds.sum(axis=0) + seconds.sum(axis=1)) / (2 * (num - 1)))


def _make_scene(raw: _Raw) -> Scene:
    num, devices = raw.seconds.shape
    allowed = np.isfinite(raw.seconds)
    known = np.where(allowed, raw.seconds, 0.0)
    mean_s = known.sum(axis=1) / np.maximum(allowed.sum(axis=1), 1)
    least_s = np.where(allowed, raw.seconds, np.inf).min(axis=1)
    most_s = known.max(axis=1)
    total_s = max(float(mean_s.sum()), _TINY)
    typical_s = total_s / num
    head, tail, depth, height = longest_ways(num, raw.source, raw.target, mean_s, 0 * raw.edge_s)
    head_c, tail_c, _, _ = longest_ways(num, raw.source, raw.target, mean_s, raw.edge_s)
    longest, longest_c = max(float((head + tail).max()), _TINY), max(float((head_c + tail_c).max()), _TINY)
    deep = max(float((depth + height).max()), 1.0)
    sent, got = np.bincount(raw.source, raw.edge_s, num), np.bincount(raw.target, raw.edge_s, num)
    fan_in, fan_out = np.bincount(raw.target, minlength=num), np.bincount(raw.source, minlength=num)
    room = max(float(np.minimum(raw.room, raw.num_bytes.sum() + 1.0).sum()), 1.0)
    held = raw.num_bytes / room
    full = float(np.clip(raw.num_bytes.sum() / max(float(raw.room.sum()), 1.0), 0.0, 4.0))
    traffic = float(raw.edge_s.sum()) / total_s
    same = np.ones(num)
    node = np.stack(
        [
            _log(mean_s / typical_s),
            np.minimum(mean_s / typical_s, _MOST),
            _log(most_s / np.maximum(least_s, _TINY * typical_s)),
            np.minimum(held * num, _MOST),
            _log((sent + _TINY) / (mean_s + 0.01 * typical_s)),
            _log((got + _TINY) / (mean_s + 0.01 * typical_s)),
            head / longest,
            tail / longest,
            1.0 - (head + tail - mean_s) / longest,
            head_c / longest_c,
            tail_c / longest_c,
            depth / deep,
            height / deep,
            np.log1p(fan_in),
            np.log1p(fan_out),
            np.log1p(raw.size),
            raw.backward,
            same * np.log(devices),
            same * full,
            same * _log(np.array([traffic]))[0],
            same * longest / total_s * devices / _MOST,
            same * (1.0 if raw.step else 0.0) + same * (0.5 if raw.free else 0.0),
        ],
        axis=1,
    )
    per_device = np.where(allowed, raw.seconds / np.maximum(mean_s, _TINY * typical_s)[:, None], 1.0)
    seconds = known.sum(axis=0) / total_s
    mean_link = max(float(raw.link_s.mean()), 1e-300)
    roomy = np.minimum(raw.room, raw.num_bytes.sum() + 1.0) / room * devices
    device = np.stack(
        [
            _log(seconds),
            np.minimum(seconds, _MOST),
            roomy,
            (raw.room >= raw.num_bytes.sum()).astype(np.float64),
            raw.on_host.astype(np.float64),
            np.minimum(raw.link_s / mean_link, _MOST),
        ],
        axis=1,
    )
    pair = np.stack(
        [
            _log(per_device),
            allowed.astype(np.float64),
            np.minimum(held[:, None] * room / np.maximum(raw.room, 1.0)[None], 2.0),
        ],
        axis=2,
    )
    made = np.minimum(raw.edge_s / typical_s, _MOST)
    edge = np.stack(
        [
            _log(raw.edge_s / typical_s),
            made,
            (head[raw.source] + tail[raw.target]) / longest,
        ],
        axis=1,
    )
    return Scene(
        node=node.astype(np.float32),
        device=device.astype(np.float32),
        pair=pair.astype(np.float32),
        allowed=allowed,
        source=raw.source,
        target=raw.target,
        edge=edge.astype(np.float32),
    )


def _log(ratio: Floats) -> Floats:
    """Logarithms within bounds."""
    return np.asarray(np.clip(np.log(np.maximum(ratio, 1e-6)), -_MOST, _MOST))


def longest_ways(
    num: int, source: Ints, target: Ints, node_s: Floats, edge_s: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """[N] longest way to the end of a node and from its start, and both in numbers of edges."""
    order = _topological_order(num, source, target)
    place = np.empty(num, dtype=np.int64)
    place[order] = np.arange(num)
    seconds, gap = node_s.tolist(), edge_s.tolist()
    head, tail, depth, height = list(seconds), list(seconds), [0.0] * num, [0.0] * num
    sources, targets = source.tolist(), target.tolist()
    for e in np.argsort(place[source], kind="stable").tolist():
        u, v = sources[e], targets[e]
        head[v] = max(head[v], head[u] + gap[e] + seconds[v])
        depth[v] = max(depth[v], depth[u] + 1.0)
    for e in np.argsort(-place[target], kind="stable").tolist():
        u, v = sources[e], targets[e]
        tail[u] = max(tail[u], tail[v] + gap[e] + seconds[u])
        height[u] = max(height[u], height[v] + 1.0)
    return np.array(head), np.array(tail), np.array(depth), np.array(height)


def _topological_order(num: int, source: Ints, target: Ints) -> list[int]:
    if (source < target).all():
        return list(range(num))
    heads = target[np.argsort(source, kind="stable")].tolist()
    pointer = offsets(source, num).tolist()
    waiting = np.bincount(target, minlength=num).tolist()
    ready = [u for u in range(num) if waiting[u] == 0]
    for u in ready:
        for v in heads[pointer[u] : pointer[u + 1]]:
            waiting[v] -= 1
            if waiting[v] == 0:
                ready.append(v)
    return ready

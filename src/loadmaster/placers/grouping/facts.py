"""What of a problem matters to grouping: order, times, sizes, and who follows whom."""

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.graph import NO_MIRROR, NO_STORAGE, Graph, Phase, home_bytes
from loadmaster.core.problem import BY_ROUTE, FREE, Problem, allowed_devices
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.placers.grouping.net import NONE, Limit, Net, Ties, count_epochs, make_net, tie_pairs

__all__: list[str] = []

_RANK = np.array([1, 2, 3, 0], dtype=np.int32)  # of Phase: a parameter comes first, an update last


def build_net(problem: Problem) -> Net:
    """What comes before what: producers before consumers, and a base before its views."""
    graph = problem.graph
    view = np.flatnonzero(graph.tensor_storage != NO_STORAGE)
    base_op, view_op = graph.tensor_op[graph.tensor_storage[view]], graph.tensor_op[view]
    apart = base_op != view_op
    tail = np.concatenate([graph.tensor_op[graph.use_tensor], base_op[apart]])
    head = np.concatenate([graph.use_op, view_op[apart]])
    cost_s = np.concatenate(
        [_least_transfer_s(problem)[graph.use_tensor], np.zeros(len(head) - graph.num_uses)]
    )
    return make_net(graph.num_ops, tail, head, cost_s, np.zeros(len(head), dtype=np.bool_))


def restrict_net(net: Net, ops: Longs, kind: Ints) -> Net:
    """The net of some ops, renumbered, with the edges between ops of one kind."""
    number = np.full(len(kind), NONE, dtype=np.int32)
    number[ops] = np.arange(len(ops), dtype=np.int32)
    inside = (number[net.tail] != NONE) & (number[net.head] != NONE) & (kind[net.tail] == kind[net.head])
    columns = (number[net.tail[inside]], number[net.head[inside]], net.cost_s[inside], net.firm[inside])
    return make_net(len(ops), *columns)


def _least_transfer_s(problem: Problem) -> Floats:
    """[T] seconds to another device: as given, or over the best route there is."""
    cluster, graph = problem.cluster, problem.graph
    apart = ~np.eye(cluster.num_devices, dtype=np.bool_)
    latency, rate = route_latency_s(cluster)[apart], route_bytes_per_s(cluster)[apart]
    least = np.full(graph.num_tensors, np.inf)
    best_rate = 0.0
    for at in np.lexsort((-rate, latency)):
        if rate[at] > best_rate:  # slower to start, so of use only if it is faster then
            best_rate = rate[at]
            np.minimum(least, latency[at] + graph.tensor_bytes / rate[at], out=least)
    given = problem.costs.transfer_s
    return np.where(given == BY_ROUTE, least, given)


def fastest_s(problem: Problem) -> Floats:
    """[N] seconds on the fastest device, or on the one an op is pinned to."""
    costs, cluster = problem.costs, problem.cluster
    fastest: Floats = costs.compute_s[:, np.unique(cluster.kind)].min(axis=1)
    pinned = np.flatnonzero(problem.pinned != FREE)
    fastest[pinned] = costs.compute_s[pinned, cluster.kind[problem.pinned[pinned]]]
    return fastest


def limit_of(problem: Problem, seconds: Floats, bound_s: float, *, time_share: int, byte_share: int) -> Limit:
    """How much may be tied together."""
    return Limit(
        seconds=max(float(seconds.max()), bound_s / (time_share * num_engines(problem))),
        num_bytes=float(problem.cluster.usable_bytes.min()) / byte_share,
    )


def num_engines(problem: Problem) -> int:
    """How many ops can run at a time."""
    return len(np.unique(problem.cluster.engine))


def kinds_of(graph: Graph, net: Net) -> Ints:
    """[N] numbers that never fall along an edge, different for different phases.

    Ops that merge within one kind close no circle with ops of another.
    """
    rank = _RANK[graph.phase]
    falls = (rank[net.tail] > rank[net.head]).any()
    epoch = count_epochs(net.ptr, net.head, rank) if falls else np.zeros(graph.num_ops, dtype=np.int32)
    kind: Ints = epoch * np.int32(len(Phase)) + rank
    return kind


def ops_under_rules(graph: Graph) -> Bools:
    """[N] ops that merge by the rules: forward, and others where nothing says whom they follow."""
    ruled: Bools = graph.phase == Phase.FORWARD
    if not (graph.mirror != NO_MIRROR).any():
        ruled |= graph.phase == Phase.BACKWARD
    if not (graph.phase == Phase.PARAM).any():
        ruled |= graph.phase == Phase.UPDATE
    return ruled


def homes_of(graph: Graph, unit: Ints, ruled: Bools) -> Ints:
    """[N] the op each of the others follows: what it mirrors, its first reader, its parameter's."""
    home = np.where(ruled, np.int32(NONE), graph.mirror)
    maker = graph.tensor_op[graph.use_tensor]
    reads = np.flatnonzero((graph.phase[maker] == Phase.PARAM) & ruled[graph.use_op])
    reads = reads[np.argsort(graph.use_op[reads], kind="stable")[::-1]]  # the first reader is written last
    home[maker[reads]] = graph.use_op[reads]
    params = np.flatnonzero((graph.phase == Phase.PARAM) & (home != NONE))[::-1]
    of_unit = np.full(int(unit.max()) + 1, NONE, dtype=np.int32)
    of_unit[unit[params]] = home[params]
    updates = np.flatnonzero((graph.phase == Phase.UPDATE) & ~ruled)
    home[updates] = of_unit[unit[updates]]
    return home


def ties_of(problem: Problem, unit: Ints, num_units: int, seconds: Floats, home: Ints) -> Ties:
    """Units as they are, mirrors tied; what follows an op of another unit counts there too."""
    graph = problem.graph
    op_bytes = _lasting_bytes(graph)
    ties = Ties(
        np.arange(num_units, dtype=np.int32),
        np.bincount(unit, seconds, num_units),
        np.bincount(unit, op_bytes, num_units),
        _device_masks(problem, unit, num_units),
    )
    back = np.flatnonzero(graph.mirror != NO_MIRROR)
    tie_pairs(ties, unit[back], unit[graph.mirror[back]])
    root = roots_of(ties.up)
    rides = np.flatnonzero(home != NONE)
    rides = rides[root[unit[rides]] != root[unit[home[rides]]]]
    onto = root[unit[home[rides]]]
    np.add.at(ties.seconds, onto, seconds[rides])
    np.add.at(ties.held, onto, op_bytes[rides])
    return ties


def _lasting_bytes(graph: Graph) -> Floats:
    """[N] bytes of an op that outlive its group: resident, kept, or read in another phase."""
    lasts = graph.keep.copy()
    base = graph.tensor_storage[graph.use_tensor]
    other = (base != NO_STORAGE) & (graph.phase[graph.tensor_op[base]] != graph.phase[graph.use_op])
    lasts[base[other]] = True
    lasting = graph.resident_bytes.astype(np.float64)
    np.add.at(lasting, graph.tensor_op[lasts], home_bytes(graph)[lasts].astype(np.float64))
    return lasting


def _device_masks(problem: Problem, unit: Ints, num_units: int) -> NDArray[np.uint8]:
    """[units, words] bits of the devices allowed; no words where all may go everywhere."""
    runs = np.isfinite(problem.costs.compute_s[:, np.unique(problem.cluster.kind)])
    if (problem.pinned == FREE).all() and runs.all():
        return np.zeros((num_units, 0), dtype=np.uint8)
    return np.packbits(allowed_devices(problem, unit, num_units), axis=1)


def roots_of(up: Ints) -> Ints:
    """The root of every unit; a unit stands after the one it is tied to."""
    while True:
        above = up[up]
        if (above == up).all():
            return up
        up = above

"""Collectives: which bytes go over which edge, and how long that takes, from the links a cluster has.

A schedule is a list of rounds; the edges of a round run at the same time, each over the links of its
route, and the next round starts when all are done. A ring of n devices is one round in which every edge
carries 2 (n - 1) / n of the tensor: its 2 (n - 1) turns run in step, so that only their latencies are
added.

    ring        2 (n - 1) / n of the bytes on every edge        Patarasuk and Yuan, 2009
    tree        all bytes on every edge, 2 log2 n rounds: few latencies
    two-level   rings inside of hosts, a ring of one device of each host, then chains inside of hosts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from loadmaster.core.cluster import NO_LINK, Cluster
from loadmaster.core.errors import PlanError
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s

Edge = tuple[int, int, int]  # source, target, bytes


@dataclass(frozen=True, slots=True)
class Round:
    """Edges that run at the same time, after `latency_s` more than one hop has of itself."""

    edges: tuple[Edge, ...]
    latency_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective in rounds."""

    name: str
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Wires:
    """What collectives need of a cluster, looked up once."""

    latency_s: tuple[tuple[float, ...], ...]  # [D][D]
    bytes_per_s: tuple[tuple[float, ...], ...]  # [D][D]
    route: tuple[tuple[tuple[int, ...], ...], ...]  # [D][D] links
    host: tuple[int, ...]  # [D]

    @classmethod
    def of(cls, cluster: Cluster) -> "Wires":
        """Those of a cluster."""
        route = tuple(
            tuple(tuple(link for link in row if link != NO_LINK) for row in rows)
            for rows in cluster.route.tolist()
        )
        rate = route_bytes_per_s(cluster)
        return cls(
            tuple(map(tuple, route_latency_s(cluster).tolist())),
            tuple(map(tuple, rate.tolist())),
            route,
            tuple(cluster.host.tolist()),
        )

    def order(self, devices: Sequence[int]) -> list[int]:
        """Devices host by host, so that a ring leaves each host once."""
        return sorted(devices, key=lambda d: (self.host[d], d))

    def seconds(self, schedule: Schedule) -> float:
        """How long a schedule takes when nothing else is under way."""
        total = 0.0
        for step in schedule.rounds:
            load: dict[int, float] = {}
            longest = 0.0
            for source, target, size in step.edges:
                alone = self.latency_s[source][target] + size / self.bytes_per_s[source][target]
                longest = max(longest, alone)
                for link in self.route[source][target]:
                    load[link] = load.get(link, 0.0) + alone
            total += step.latency_s + max([longest, *load.values()])
        return total

    def link_bytes(self, schedule: Schedule) -> dict[int, int]:
        """Bytes that go over every link."""
        found: dict[int, int] = {}
        for step in schedule.rounds:
            for source, target, size in step.edges:
                for link in self.route[source][target]:
                    found[link] = found.get(link, 0) + size
        return found


def ring_sum(wires: Wires, devices: Sequence[int], size: int) -> Schedule:
    """An all-reduce in a ring."""
    members = wires.order(devices)
    num = len(members)
    edges = _ring_edges(members, -(-2 * (num - 1) * size // num))
    return Schedule("ring", (Round(edges, _more(wires, edges, 2 * (num - 1) - 1)),))


def tree_sum(wires: Wires, devices: Sequence[int], size: int) -> Schedule:
    """A sum up a binary tree and the result down again."""
    members = wires.order(devices)
    up: list[Round] = []
    stride = 1
    while stride < len(members):
        pairs = range(0, len(members) - stride, 2 * stride)
        up.append(Round(tuple((members[i + stride], members[i], size) for i in pairs), 0.0))
        stride *= 2
    down = [Round(tuple((b, a, n) for a, b, n in step.edges), 0.0) for step in reversed(up)]
    return Schedule("tree", (*up, *down))


def two_level_sum(wires: Wires, devices: Sequence[int], size: int) -> Schedule | None:
    """Rings inside of hosts, then one over hosts, then back; None where that is no other than a ring."""
    hosts: dict[int, list[int]] = {}
    for device in wires.order(devices):
        hosts.setdefault(wires.host[device], []).append(device)
    wide = [members for members in hosts.values() if len(members) > 1]
    if len(hosts) < 2 or not wide:
        return None
    inner = [ring_sum(wires, members, size).rounds[0] for members in wide]
    first = Round(tuple(e for r in inner for e in r.edges), max(r.latency_s for r in inner))
    middle = ring_sum(wires, [members[0] for members in hosts.values()], size).rounds[0]
    chains = tuple((a, b, size) for members in wide for a, b in pairwise(members))
    last = Round(chains, _more(wires, chains, max(map(len, wide)) - 2))
    return Schedule("two-level", (first, middle, last))


def cheapest_sum(wires: Wires, devices: Sequence[int], size: int) -> Schedule:
    """The quickest of the three for this many bytes."""
    _require_several(devices)
    found = (make(wires, devices, size) for make in (ring_sum, tree_sum, two_level_sum))
    return min((s for s in found if s is not None), key=partial(Wires.seconds, wires))


def gather(wires: Wires, devices: Sequence[int], parts: Sequence[int]) -> Schedule:
    """An all-gather in a ring: every edge carries all parts but its target's; parts go with `devices`."""
    _require_several(devices)
    size = dict(zip(devices, parts, strict=True))
    members = wires.order(devices)
    total = sum(parts)
    edges = tuple((a, b, total - size[b]) for a, b in _around(members))
    return Schedule("gather", (Round(edges, _more(wires, edges, len(members) - 2)),))


def push(wires: Wires, devices: Sequence[int], server: int, size: int) -> Schedule:
    """Every replica's gradients to the server."""
    edges = tuple((d, server, size) for d in wires.order(devices) if d != server)
    return Schedule("push", (Round(edges, 0.0),))


def pull(wires: Wires, devices: Sequence[int], server: int, size: int) -> Schedule:
    """New weights from the server."""
    edges = tuple((server, d, size) for d in wires.order(devices) if d != server)
    return Schedule("pull", (Round(edges, 0.0),))


def _ring_edges(members: Sequence[int], size: int) -> tuple[Edge, ...]:
    return tuple((a, b, size) for a, b in _around(members))


def _around(members: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(members, [*members[1:], members[0]], strict=True))


def _more(wires: Wires, edges: Sequence[Edge], turns: int) -> float:
    """Latencies of further turns, each as slow as the slowest edge."""
    return max(turns, 0) * max((wires.latency_s[a][b] for a, b, _ in edges), default=0.0)


def _require_several(devices: Sequence[int]) -> None:
    if len(set(devices)) < 2 or len(set(devices)) != len(devices):
        raise PlanError(f"a collective over devices {list(devices)}; it needs two or more, each once")

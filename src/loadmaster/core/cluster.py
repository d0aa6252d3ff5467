"""Cluster: what there is to compute on, as devices of a few kinds joined by directed links.

A route is the list of directed links from one device to another; two routes that share a link
contend for it. That is how a PCIe switch, one NIC per host, or one port per device are said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import (
    Bools,
    Floats,
    Ints,
    Longs,
    content_digest,
    require_finite,
    require_range,
    require_unique,
    set_column,
    set_names,
)
from loadmaster.core.errors import ClusterError
from loadmaster.core.graph import Dtype

CHANNEL = "channel"  # the kind of what is no device: `is_channel`
NO_LINK = -1
UNLIMITED_BYTES = 2**62
SOCKET_LATENCY_S, SOCKET_BYTES_PER_S = 150e-6, 2e9  # between processes of a host, as gloo sends on CPUs


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """D devices of K kinds, connected by L directed links; a route has at most H links."""

    name: str
    device_name: tuple[str, ...]  # [D] unique
    kind: Ints  # [D] row of kind_name
    kind_name: tuple[str, ...]  # [K]
    host: Ints  # [D]
    engine: Ints  # [D] devices with an equal value run one op at a time between them
    memory_bytes: Longs  # [D]
    reserve_bytes: Longs  # [D] kept free off the top
    flops_per_s: Floats  # [K, Dtype]
    memory_bytes_per_s: Floats  # [K]
    overhead_s: Floats  # [K] added to every op (kernel launch)
    on_host: Bools  # [K] ops of this kind run on the thread that issues all ops
    route: Ints  # [D, D, H] links taken by i -> j in order, padded with NO_LINK
    link_name: tuple[str, ...]  # [L]
    link_bytes_per_s: Floats  # [L]
    link_latency_s: Floats  # [L]

    def __post_init__(self) -> None:
        """Check every invariant once."""
        num, kinds = len(self.device_name), len(self.kind_name)
        if num == 0:
            raise ClusterError(f"cluster {self.name!r} has zero devices; name at least one")
        set_names(self, "device_name", num, ClusterError)
        set_names(self, "kind_name", kinds, ClusterError)
        set_names(self, "link_name", len(self.link_bytes_per_s), ClusterError)
        for field in ("kind", "host", "engine"):
            set_column(self, field, np.int32, (num,), ClusterError)
        for field in ("memory_bytes", "reserve_bytes"):
            set_column(self, field, np.int64, (num,), ClusterError)
        set_column(self, "flops_per_s", np.float64, (kinds, len(Dtype)), ClusterError)
        for field in ("memory_bytes_per_s", "overhead_s"):
            set_column(self, field, np.float64, (kinds,), ClusterError)
        set_column(self, "on_host", np.bool_, (kinds,), ClusterError)
        set_column(self, "route", np.int32, (num, num, -1), ClusterError)
        for field in ("link_bytes_per_s", "link_latency_s"):
            set_column(self, field, np.float64, (self.num_links,), ClusterError)
        self._check_devices(kinds)
        self._check_links()

    def _check_devices(self, kinds: int) -> None:
        require_unique(self.device_name, "device", ClusterError)
        require_range(self.kind, 0, kinds, "Cluster.kind", ClusterError)
        for field, at in (("memory_bytes", 1), ("reserve_bytes", 0)):
            values: Longs = getattr(self, field)
            if values.min() < at:
                name = self.device_name[int(values.argmin())]
                raise ClusterError(f"device {name!r}: {field} is {values.min()}, needs >= {at}")
        if (self.reserve_bytes >= self.memory_bytes).any():
            d = int(np.flatnonzero(self.reserve_bytes >= self.memory_bytes)[0])
            raise ClusterError(
                f"device {self.device_name[d]!r}: reserve of {self.reserve_bytes[d]} bytes leaves"
                f" nothing of its {self.memory_bytes[d]} bytes; reserve less"
            )
        require_finite(self.flops_per_s, "Cluster.flops_per_s", ClusterError, least=1e-30)
        require_finite(self.memory_bytes_per_s, "Cluster.memory_bytes_per_s", ClusterError, least=1e-30)
        require_finite(self.overhead_s, "Cluster.overhead_s", ClusterError)

    def _check_links(self) -> None:
        require_range(self.route, NO_LINK, self.num_links, "Cluster.route", ClusterError)
        require_finite(self.link_bytes_per_s, "Cluster.link_bytes_per_s", ClusterError, least=1e-30)
        require_finite(self.link_latency_s, "Cluster.link_latency_s", ClusterError)
        reached = (self.route != NO_LINK).any(axis=2) if self.route.shape[2] else self._none()
        lost = ~(reached | np.eye(self.num_devices, dtype=np.bool_))
        if lost.any():
            i, j = (int(axis[0]) for axis in np.nonzero(lost))
            raise ClusterError(
                f"no route from device {self.device_name[i]!r} to {self.device_name[j]!r};"
                " add a link between them or through a host or switch"
            )

    def _none(self) -> Bools:
        return np.zeros((self.num_devices, self.num_devices), dtype=np.bool_)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.device_name)

    @property
    def num_links(self) -> int:
        """L."""
        return len(self.link_name)

    @property
    def is_channel(self) -> Bools:
        """[D] what stands for a communicator: it carries sums of gradients beside the devices."""
        kinds = [at for at, name in enumerate(self.kind_name) if name == CHANNEL]
        found: Bools = np.isin(self.kind, kinds)
        return found

    def find_ends(self, source: int, target: int) -> tuple[int, int]:
        """The devices between which a transfer goes, which an edge of a channel has in its name."""
        channels = self.is_channel
        if not channels[target]:
            return source, target
        ends = self.device_name[target].rpartition(": ")[2]
        real = np.flatnonzero(~channels).tolist()
        pairs = {f"{self.device_name[i]} to {self.device_name[j]}": (i, j) for i in real for j in real}
        return pairs.get(ends, (source, target))

    @property
    def usable_bytes(self) -> Longs:
        """[D] memory less reserve."""
        return self.memory_bytes - self.reserve_bytes

    def __repr__(self) -> str:
        """One line; the columns may be long."""
        more = ", ..." if self.num_devices > 8 else ""
        return f"<Cluster {self.name!r}: {', '.join(self.device_name[:8])}{more}>"

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content, the name left out."""
        return content_digest(self)


def process_engines(cluster: Cluster) -> Ints:
    """[D] engines where each device has a process of its own: then CPU devices of a host run side by side."""
    engine = cluster.engine.copy()
    own = np.flatnonzero(cluster.on_host[cluster.kind])
    engine[own] = engine.max() + 1 + np.arange(len(own), dtype=np.int32)
    return engine


def process_cluster(cluster: Cluster) -> Cluster:
    """The cluster where each device has a process of its own.

    CPU devices of a host run side by side, and what they send each other goes through sockets of the host:
    links that only they use are no faster than that.
    """
    engine = process_engines(cluster)
    own = cluster.host[cluster.on_host[cluster.kind]]
    if len(np.unique(own)) == len(own):  # no host has two
        return replace(cluster, engine=engine)
    host = np.where(cluster.on_host[cluster.kind], cluster.host, -1 - np.arange(cluster.num_devices))
    inside = (host[:, None] == host[None, :]) & ~np.eye(cluster.num_devices, dtype=np.bool_)
    links = np.setdiff1d(cluster.route[inside], cluster.route[~inside])
    links = links[links != NO_LINK]
    rate, latency = cluster.link_bytes_per_s.copy(), cluster.link_latency_s.copy()
    rate[links] = np.minimum(rate[links], SOCKET_BYTES_PER_S)
    latency[links] = np.maximum(latency[links], SOCKET_LATENCY_S)
    return replace(cluster, engine=engine, link_bytes_per_s=rate, link_latency_s=latency)


def star(
    name: str,
    *,
    memory_bytes: Sequence[int],
    bytes_per_s: float,
    latency_s: float,
    kind: str = "ref",
    flops_per_s: float = 1e12,
) -> Cluster:
    """Equal devices, each with one port (a link up and a link down) to a middle that never blocks.

    The published one-port model: one send and one receive at a time per device.
    """
    num = len(memory_bytes)
    route = np.full((num, num, 2), NO_LINK, dtype=np.int32)
    for i in range(num):
        for j in range(num):
            if i != j:
                route[i, j] = (i, num + j)
    return Cluster(
        name=name,
        device_name=tuple(f"{kind}{d}" for d in range(num)),
        kind=np.zeros(num, dtype=np.int32),
        kind_name=(kind,),
        host=np.zeros(num, dtype=np.int32),
        engine=np.arange(num, dtype=np.int32),
        memory_bytes=np.asarray(memory_bytes, dtype=np.int64),
        reserve_bytes=np.zeros(num, dtype=np.int64),
        flops_per_s=np.full((1, len(Dtype)), flops_per_s),
        memory_bytes_per_s=np.full(1, 1e15),
        overhead_s=np.zeros(1),
        on_host=np.zeros(1, dtype=np.bool_),
        route=route,
        link_name=tuple(f"{kind}{d} {way}" for way in ("up", "down") for d in range(num)),
        link_bytes_per_s=np.full(2 * num, bytes_per_s),
        link_latency_s=np.full(2 * num, latency_s / 2),
    )

"""Channels: collectives as ops beside those of the devices, with the links they occupy.

Each communicator has a channel, a device of its own that runs one collective after the other and never
makes a compute device wait. An edge of a schedule is a tensor from the channel to a point whose route is
the links between the edge's two devices: so collectives and other transfers share links, and a trace shows
both. Between channels and devices go signals of no bytes over a link that takes no time.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.cluster import CHANNEL, NO_LINK, UNLIMITED_BYTES, Cluster
from loadmaster.strategies.lowering.collectives import Wires

_INSIDE = "inside of devices"
_INSTANT = 1e30  # bytes/s of signals


@dataclass(slots=True)
class Channels:
    """Virtual devices, numbered after those of a cluster in which each device has a process."""

    cluster: Cluster
    wires: Wires
    names: list[str] = field(default_factory=list)
    routes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    known: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def channel(self, name: str) -> int:
        """The device on which a communicator's collectives run in turn."""
        return self._device((name, -1, -1), name)

    def point(self, name: str, source: int, target: int) -> int:
        """Where the bytes of an edge arrive."""
        own = self.cluster.device_name
        key = (name, source, target)
        if key not in self.known:
            channel = self.channel(name)
            made = self._device(key, f"{name}: {own[source]} to {own[target]}")
            self.routes[channel, made] = self.wires.route[source][target]
        return self.known[key]

    def _device(self, key: tuple[str, int, int], name: str) -> int:
        if key not in self.known:
            self.known[key] = self.cluster.num_devices + len(self.names)
            self.names.append(name)
        return self.known[key]

    def extended(self) -> Cluster:
        """The cluster with its channels."""
        base = self.cluster
        real, more = base.num_devices, len(self.names)
        num, kinds = real + more, len(base.kind_name)
        inside = base.num_links
        route = np.full((num, num, max(base.route.shape[2], 1)), NO_LINK, dtype=np.int32)
        route[:, :, 0] = inside
        route[np.arange(num), np.arange(num), 0] = NO_LINK
        route[:real, :real] = NO_LINK
        route[:real, :real, : base.route.shape[2]] = base.route
        for (a, b), links in self.routes.items():
            route[a, b] = NO_LINK
            route[a, b, : len(links)] = links
        return replace(
            base,
            device_name=(*base.device_name, *self.names),
            kind=_longer(base.kind, more, kinds),
            kind_name=(*base.kind_name, CHANNEL),
            host=_longer(base.host, more, 0),
            engine=np.concatenate([base.engine, base.engine.max() + 1 + np.arange(more, dtype=np.int32)]),
            memory_bytes=np.concatenate([base.memory_bytes, np.full(more, UNLIMITED_BYTES)]),
            reserve_bytes=np.concatenate([base.reserve_bytes, np.zeros(more, dtype=np.int64)]),
            flops_per_s=np.vstack([base.flops_per_s, np.ones((1, base.flops_per_s.shape[1]))]),
            memory_bytes_per_s=_one_more(base.memory_bytes_per_s, 1.0),
            overhead_s=_one_more(base.overhead_s, 0.0),
            on_host=np.append(base.on_host, False),
            route=route,
            link_name=(*base.link_name, _INSIDE),
            link_bytes_per_s=_one_more(base.link_bytes_per_s, _INSTANT),
            link_latency_s=_one_more(base.link_latency_s, 0.0),
        )


def _longer(column: Ints, more: int, value: int) -> Ints:
    return np.concatenate([column, np.full(more, value, dtype=np.int32)])


def _one_more(column: Floats, value: float) -> Floats:
    return np.append(column, value)

"""Clusters made of a given one: one of its devices alone, one more, or the devices of one host."""

from dataclasses import replace

import numpy as np

from loadmaster.cluster.presets import KindPreset, find_kind, link_preset
from loadmaster.core.arrays import Ints
from loadmaster.core.cluster import NO_LINK, UNLIMITED_BYTES, Cluster
from loadmaster.core.graph import Dtype


def single_device_cluster(cluster: Cluster, device: int) -> Cluster:
    """The cluster of one of its devices."""
    at, kind = [device], [int(cluster.kind[device])]
    return replace(
        cluster,
        name=cluster.device_name[device],
        device_name=(cluster.device_name[device],),
        kind=np.zeros(1, dtype=np.int32),
        kind_name=(cluster.kind_name[kind[0]],),
        host=cluster.host[at],
        engine=cluster.engine[at],
        memory_bytes=cluster.memory_bytes[at],
        reserve_bytes=cluster.reserve_bytes[at],
        flops_per_s=cluster.flops_per_s[kind],
        memory_bytes_per_s=cluster.memory_bytes_per_s[kind],
        overhead_s=cluster.overhead_s[kind],
        on_host=cluster.on_host[kind],
        route=np.zeros((1, 1, 0), dtype=np.int32),
        link_name=(),
        link_bytes_per_s=np.zeros(0),
        link_latency_s=np.zeros(0),
    )


def hosts_apart(cluster: Cluster) -> list[Cluster]:
    """The devices of each host as a cluster; of hosts with the same devices the first."""
    found: dict[tuple[tuple[int, ...], ...], Cluster] = {}
    for host in dict.fromkeys(cluster.host.tolist()):
        own = np.flatnonzero(cluster.host == host)
        part = replace(
            cluster,
            device_name=tuple(cluster.device_name[d] for d in own.tolist()),
            kind=cluster.kind[own],
            host=cluster.host[own],
            engine=cluster.engine[own],
            memory_bytes=cluster.memory_bytes[own],
            reserve_bytes=cluster.reserve_bytes[own],
            route=cluster.route[np.ix_(own, own)],
        )
        columns = (part.kind, part.engine - part.engine.min(), part.memory_bytes, part.reserve_bytes)
        found.setdefault(tuple(tuple(column.tolist()) for column in columns), part)
    return [cluster] if len(found) == 1 and cluster.num_devices == own.size else list(found.values())


def preset_cluster(preset: KindPreset, *, reserve_bytes: int = 0) -> Cluster:
    """One device of a kind, alone."""
    return Cluster(
        name=preset.name,
        device_name=(preset.name,),
        kind=np.zeros(1, dtype=np.int32),
        kind_name=(preset.name,),
        host=np.zeros(1, dtype=np.int32),
        engine=np.zeros(1, dtype=np.int32),
        memory_bytes=np.array([preset.memory_bytes]),
        reserve_bytes=np.array([reserve_bytes]),
        flops_per_s=np.array([[preset.flops_per_s[dtype] for dtype in Dtype]]),
        memory_bytes_per_s=np.array([preset.memory_bytes_per_s]),
        overhead_s=np.array([preset.overhead_s]),
        on_host=np.array([preset.on_host]),
        route=np.zeros((1, 1, 0), dtype=np.int32),
        link_name=(),
        link_bytes_per_s=np.zeros(0),
        link_latency_s=np.zeros(0),
    )


def with_more(cluster: Cluster, device: int, num: int = 1) -> Cluster:
    """`num` more devices like one of the cluster's, on buses of their own."""
    found = cluster
    for _ in range(num):
        found = _add_device(found, single_device_cluster(cluster, device), bus="pcie4")
    return found


def with_preset(cluster: Cluster, preset: KindPreset) -> Cluster:
    """One device of another kind besides."""
    return _add_device(cluster, preset_cluster(preset), bus="pcie4" if preset.on_host else preset.bus)


def with_devices(cluster: Cluster, extra: Cluster) -> Cluster:
    """All devices of another cluster besides, each on the bus of its kind."""
    found = cluster
    for device in range(extra.num_devices):
        kind = find_kind(extra.kind_name[int(extra.kind[device])])
        bus = kind.bus if kind is not None and not kind.on_host else "pcie4"
        found = _add_device(found, single_device_cluster(extra, device), bus=bus)
    return found


def _add_device(cluster: Cluster, extra: Cluster, *, bus: str) -> Cluster:
    """A device more; everything to and from it crosses its own bus and nothing else."""
    num, link = cluster.num_devices, link_preset(bus)
    up, down = cluster.num_links, cluster.num_links + 1
    route = np.full((num + 1, num + 1, max(cluster.route.shape[2], 1)), NO_LINK, dtype=np.int32)
    route[:num, :num, : cluster.route.shape[2]] = cluster.route
    route[num, :num, 0] = up
    route[:num, num, 0] = down
    name = _make_unused_name(extra.device_name[0], cluster.device_name)
    names = cluster.kind_name
    known = names.index(extra.kind_name[0]) if extra.kind_name[0] in names else len(names)
    new = slice(0, 1 if known == len(names) else 0)  # a kind that is not there yet brings its rates
    return replace(
        cluster,
        name=f"{cluster.name}, {extra.kind_name[0]}",
        device_name=(*cluster.device_name, name),
        kind=_append_value(cluster.kind, known),
        kind_name=(*names, *extra.kind_name[new]),
        host=_append_value(cluster.host, int(cluster.host.min())),
        engine=_append_value(cluster.engine, int(cluster.engine.max()) + 1),
        memory_bytes=np.concatenate([cluster.memory_bytes, extra.memory_bytes]),
        reserve_bytes=np.concatenate([cluster.reserve_bytes, extra.reserve_bytes]),
        flops_per_s=np.concatenate([cluster.flops_per_s, extra.flops_per_s[new]]),
        memory_bytes_per_s=np.concatenate([cluster.memory_bytes_per_s, extra.memory_bytes_per_s[new]]),
        overhead_s=np.concatenate([cluster.overhead_s, extra.overhead_s[new]]),
        on_host=np.concatenate([cluster.on_host, extra.on_host[new]]),
        route=route,
        link_name=(*cluster.link_name, f"{name} up", f"{name} down"),
        link_bytes_per_s=np.concatenate([cluster.link_bytes_per_s, [link.bytes_per_s] * 2]),
        link_latency_s=np.concatenate([cluster.link_latency_s, [link.latency_s] * 2]),
    )


def _append_value(column: Ints, value: int) -> Ints:
    return np.concatenate([column, [value]]).astype(np.int32)


def _make_unused_name(name: str, taken: tuple[str, ...]) -> str:
    """The name, or the name with the first number that is free."""
    if name not in taken:
        return name
    stem = name.rstrip("0123456789") or name
    return next(f"{stem}{at}" for at in range(len(taken) + 1) if f"{stem}{at}" not in taken)


def limit_of(cluster: Cluster, device: int) -> int | None:
    """Bytes that may be used on a device; None: no limit."""
    usable = int(cluster.usable_bytes[device])
    return None if usable >= UNLIMITED_BYTES // 2 else usable

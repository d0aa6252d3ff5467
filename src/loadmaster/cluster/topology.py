"""Topology: devices and undirected links in, a Cluster with routes out.

Endpoints are devices, hosts and switches; the switch `net` is always there. A link between two endpoints
is two directed links, one each way. A route is the cheapest path by latency + 1 MiB / rate over its links
and never passes through a device; where two are equal the one found first wins, which depends on the order
of devices and links alone. What is drawn by default:

    gpu0 ──pcie──┐                         ┌──pcie── gpu2     gpu0 -> gpu1: up one bus, down another
    gpu1 ──pcie──┤                         │                  gpu0 -> gpu2: bus, NIC, NIC, bus
    cpu0 ══════ host0 ──nic── net ──nic── host1 ═════ cpu1    gpu0 -> cpu0: its own bus, nothing else

A CPU's memory *is* its host's memory (═, no link to wait for); two CPU devices of one host copy over one
`ram` link of the host. Logical devices of one chip hang on the host by that chip's one bus.
"""

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadmaster.cluster.presets import KindPreset, LinkPreset, link_preset
from loadmaster.core.arrays import Bools, Floats, Ints, require_unique
from loadmaster.core.cluster import NO_LINK, Cluster
from loadmaster.core.errors import ClusterError
from loadmaster.core.graph import Dtype

NETWORK = "net"
DEFAULT_INTER = "25gbit"
ONE_PLACE = math.inf  # the rate of a "link" whose ends are one place: no route waits for it
MAX_DEVICES = 2048
_WEIGHED_BYTES = 2**20  # routes are compared by the time of a transfer of this size


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device as it is described."""

    name: str
    kind: str  # key of the kinds given to `assemble_cluster`
    host: str
    memory_bytes: int
    reserve_bytes: int = 0
    engine: str = ""  # devices of a host with an equal label run one op at a time between them; '' = its own


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link between two endpoints, the same both ways; from an endpoint to itself: copies inside it."""

    a: str
    b: str
    bytes_per_s: float
    latency_s: float
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """E directed connections between V endpoints: devices first, then hosts and switches."""

    source: Ints  # [E]
    target: Ints  # [E]
    weight_s: Floats  # [E]
    link: Ints  # [E] directed link, or NO_LINK inside one place
    inside: Ints  # [V] directed link for copies inside an endpoint, or NO_LINK


def assemble_cluster(
    name: str,
    devices: Sequence[DeviceSpec],
    kinds: Mapping[str, KindPreset],
    links: Sequence[LinkSpec],
    *,
    switches: Iterable[str] = (),
) -> Cluster:
    """The cluster of these devices, with a route between every two."""
    if not 0 < len(devices) <= MAX_DEVICES:
        amount = len(devices) or "zero"
        raise ClusterError(f"cluster {name!r} has {amount} devices; give 1 to {MAX_DEVICES}")
    if any(device.host == NETWORK for device in devices):
        raise ClusterError(f"a host is named {NETWORK!r}, which is the network; rename it")
    used = {kind: kinds[kind] for kind in dict.fromkeys(device.kind for device in devices)}
    row = {kind: index for index, kind in enumerate(used)}
    host = {host: index for index, host in enumerate(dict.fromkeys(device.host for device in devices))}
    engine = {label: index for index, label in enumerate(dict.fromkeys(map(_engine_of, devices)))}
    place = _number_endpoints(devices, (*host, *group_by_chip(devices, kinds), *switches))
    wires = _list_wires(links, place)
    real = [link for link in links if link.bytes_per_s != ONE_PLACE]
    return Cluster(
        name=name,
        device_name=tuple(device.name for device in devices),
        kind=np.array([row[device.kind] for device in devices], dtype=np.int32),
        kind_name=tuple(kind.name for kind in used.values()),
        host=np.array([host[device.host] for device in devices], dtype=np.int32),
        engine=np.array([engine[_engine_of(device)] for device in devices], dtype=np.int32),
        memory_bytes=np.array([device.memory_bytes for device in devices]),
        reserve_bytes=np.array([device.reserve_bytes for device in devices]),
        flops_per_s=np.array([[kind.flops_per_s[dtype] for dtype in Dtype] for kind in used.values()]),
        memory_bytes_per_s=np.array([kind.memory_bytes_per_s for kind in used.values()]),
        overhead_s=np.array([kind.overhead_s for kind in used.values()]),
        on_host=np.array([kind.on_host for kind in used.values()], dtype=np.bool_),
        route=_find_routes(len(devices), wires),
        link_name=tuple(name for link in real for name in _link_names(link)),
        link_bytes_per_s=np.array(
            [link.bytes_per_s for link in real for _ in _link_names(link)], dtype=float
        ),
        link_latency_s=np.array([link.latency_s for link in real for _ in _link_names(link)], dtype=float),
    )


def add_default_links(
    devices: Sequence[DeviceSpec],
    kinds: Mapping[str, KindPreset],
    links: Sequence[LinkSpec] = (),
    *,
    intra: Mapping[str, LinkPreset] | None = None,
    inter: LinkPreset | None = None,
) -> tuple[LinkSpec, ...]:
    """`links` and what is missing: a bus to the host per chip, a NIC per host (or one circuit per pair).

    `intra` (by host): nvlink joins every two GPUs of the host, ramp every two devices, any other preset
    replaces the GPUs' bus. `inter` is the NIC; ramp joins every two devices of different hosts. A device
    that a given link joins to a host or switch keeps that one; so does a host joined to another or to net.
    """
    net = inter or link_preset(DEFAULT_INTER)
    hosts: dict[str, list[DeviceSpec]] = {}
    for device in devices:
        hosts.setdefault(device.host, []).append(device)
    names = {device.name for device in devices}
    wired = {end for link in links for end in (link.a, link.b) if not {link.a, link.b} <= names}
    joined = {frozenset((link.a, link.b)) for link in links}
    added: list[LinkSpec] = []
    for host, members in hosts.items():
        preset = (intra or {}).get(host)
        everywhere = preset is not None and preset.name == "ramp" and (len(hosts) == 1 or net.name == "ramp")
        if not everywhere:
            loose = [device for device in members if device.name not in wired]
            added += _make_bus_links(host, loose, kinds, preset)
        if preset is not None:
            added += _make_pair_links(members, kinds, preset, joined)
    if len(hosts) > 1 and net.name == "ramp":
        for a, b in itertools.combinations(devices, 2):
            if a.host != b.host and frozenset((a.name, b.name)) not in joined:
                added.append(LinkSpec(a.name, b.name, net.bytes_per_s, net.latency_s, net.name))
    elif len(hosts) > 1:
        for host in _find_isolated_hosts(hosts, [link for link in links if not {link.a, link.b} & names]):
            added.append(LinkSpec(host, NETWORK, net.bytes_per_s, net.latency_s, net.name))
    return (*links, *added)


def group_by_chip(
    devices: Iterable[DeviceSpec], kinds: Mapping[str, KindPreset]
) -> dict[str, list[DeviceSpec]]:
    """Logical devices by the chip they are parts of: two or more GPUs of a host with one engine label."""
    groups: dict[str, list[DeviceSpec]] = {}
    for device in devices:
        if device.engine and not kinds[device.kind].on_host:
            groups.setdefault(f"{device.host}/{device.engine}", []).append(device)
    return {chip: members for chip, members in groups.items() if len(members) > 1}


def _make_bus_links(
    host: str, members: Sequence[DeviceSpec], kinds: Mapping[str, KindPreset], intra: LinkPreset | None
) -> list[LinkSpec]:
    """Every chip of a host on its bus; CPUs in the host's memory."""
    replaced = intra if intra is not None and not _joins_pairs(intra) else None
    shared = group_by_chip(members, kinds)
    chip_of = {device.name: chip for chip, parts in shared.items() for device in parts}
    found: list[LinkSpec] = []
    for device in members:
        kind = kinds[device.kind]
        chip = chip_of.get(device.name)
        if kind.on_host or chip is not None:
            found.append(LinkSpec(device.name, chip or host, ONE_PLACE, 0.0))
        if not kind.on_host and (chip is None or shared[chip][0] is device):
            bus = replaced or link_preset(kind.bus)
            found.append(LinkSpec(chip or device.name, host, bus.bytes_per_s, bus.latency_s, bus.name))
            if chip is not None:  # a copy on the chip reads and writes its memory
                found.append(LinkSpec(chip, chip, kind.memory_bytes_per_s / 2, 0.0, "copy"))
    if sum(kinds[device.kind].on_host for device in members) > 1:
        ram = link_preset("ram")
        found.append(LinkSpec(host, host, ram.bytes_per_s, ram.latency_s, ram.name))
    return found


def _make_pair_links(
    members: Sequence[DeviceSpec],
    kinds: Mapping[str, KindPreset],
    preset: LinkPreset,
    joined: set[frozenset[str]],
) -> list[LinkSpec]:
    """A link of its own for every two GPUs of a host (nvlink) or every two devices (ramp)."""
    if not _joins_pairs(preset):
        return []
    ends = [d for d in members if preset.name == "ramp" or not kinds[d.kind].on_host]
    return [
        LinkSpec(a.name, b.name, preset.bytes_per_s, preset.latency_s, preset.name)
        for a, b in itertools.combinations(ends, 2)
        if frozenset((a.name, b.name)) not in joined
        and (preset.name == "ramp" or not a.engine or a.engine != b.engine)
    ]


def _joins_pairs(preset: LinkPreset) -> bool:
    return preset.name == "ramp" or preset.name.startswith("nvlink")


def _find_isolated_hosts(hosts: Iterable[str], links: Sequence[LinkSpec]) -> list[str]:
    """Hosts that links between hosts and switches join to no other host and not to the network."""
    neighbours: dict[str, list[str]] = {}
    for link in links:
        neighbours.setdefault(link.a, []).append(link.b)
        neighbours.setdefault(link.b, []).append(link.a)
    goals = {*hosts, NETWORK}
    found = []
    for host in hosts:
        seen, ahead = {host}, [host]
        while ahead:
            new = [end for end in neighbours.get(ahead.pop(), ()) if end not in seen]
            seen.update(new)
            ahead += new
        if len(seen & goals) == 1:
            found.append(host)
    return found


def _engine_of(device: DeviceSpec) -> tuple[str, ...]:
    """Equal for devices that share an engine: by label within a host, else by name."""
    return (device.host, device.engine) if device.engine else (device.name,)


def _link_names(link: LinkSpec) -> tuple[str, ...]:
    """The directed links of a link, by name."""
    label = f"{link.name} " if link.name else ""
    if link.a == link.b:
        return (f"{label}{link.a}",)
    return f"{label}{link.a}->{link.b}", f"{label}{link.b}->{link.a}"


def _number_endpoints(devices: Sequence[DeviceSpec], middle: Iterable[str]) -> dict[str, int]:
    """The number of every endpoint: devices first, then hosts, switches and the network."""
    names = tuple(device.name for device in devices)
    require_unique(names, "device", ClusterError)
    place = {name: index for index, name in enumerate(names)}
    for name in dict.fromkeys((*middle, NETWORK)):
        if name in place:
            raise ClusterError(f"{name!r} names a device and a host or switch; rename one")
        place[name] = len(place)
    return place


def _list_wires(links: Sequence[LinkSpec], place: Mapping[str, int]) -> _Wires:
    """Directed connections; of parallel ones the cheapest, then the first."""
    ends: list[tuple[int, int]] = []
    weight: list[float] = []
    number: list[int] = []
    inside = np.full(len(place), NO_LINK, dtype=np.int32)
    num_links = 0
    for link in links:
        a, b = _find_endpoint(link.a, place), _find_endpoint(link.b, place)
        cost = _weight_s(link)
        if a == b:
            inside[a] = num_links
            num_links += 1
            continue
        real = link.bytes_per_s != ONE_PLACE
        ends += [(a, b), (b, a)]
        weight += [cost, cost]
        number += [num_links, num_links + 1] if real else [NO_LINK, NO_LINK]
        num_links += 2 if real else 0
    source, target = np.array(ends, dtype=np.int32).reshape(-1, 2).T
    weight_s, link_index = np.array(weight, dtype=np.float64), np.array(number, dtype=np.int32)
    order = np.lexsort((np.arange(len(source)), weight_s, target, source))
    pair = source[order].astype(np.int64) * len(place) + target[order]
    order = order[np.flatnonzero(np.diff(pair, prepend=-1))]
    return _Wires(source[order], target[order], weight_s[order], link_index[order], inside)


def _find_endpoint(name: str, place: Mapping[str, int]) -> int:
    if name in place:
        return place[name]
    near = difflib.get_close_matches(name, place, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "name a device, a host or a switch of this cluster"
    raise ClusterError(f"link to unknown device {name!r}; {hint}")


def _weight_s(link: LinkSpec) -> float:
    rate, latency = link.bytes_per_s, link.latency_s
    endless = rate == ONE_PLACE and (link.a == link.b or latency > 0)
    if endless or not rate > 0 or not (math.isfinite(latency) and latency >= 0):
        raise ClusterError(
            f"link {link.a!r} - {link.b!r} has {rate:g} bytes/s and {latency:g} s;"
            " it needs a rate above 0 and a finite latency of 0 or more"
        )
    return latency + _WEIGHED_BYTES / rate


def _find_routes(num_devices: int, wires: _Wires) -> Ints:
    """[D, D, H] the cheapest route between every two devices; an unreachable pair has none."""
    last = _find_last_hops(num_devices, wires)
    row = np.arange(num_devices)[:, None]
    at = np.broadcast_to(np.arange(num_devices), (num_devices, num_devices))
    hop = np.where(at == row, NO_LINK, last[row, at])
    hops: list[Ints] = []
    while (hop != NO_LINK).any():  # walk back from every target to every source
        hops.append(np.where(hop == NO_LINK, NO_LINK, wires.link[hop]))
        at = np.where(hop == NO_LINK, row, wires.source[hop])
        hop = np.where(at == row, NO_LINK, last[row, at])
    if not hops:
        return np.full((num_devices, num_devices, 0), NO_LINK, dtype=np.int32)
    route = np.stack(hops[::-1], axis=2)
    route = np.take_along_axis(route, np.argsort(route == NO_LINK, axis=2, kind="stable"), axis=2)
    final = last[:, :num_devices]
    same = (route[:, :, 0] == NO_LINK) & (final != NO_LINK)  # both ends in one place
    route[same, 0] = wires.inside[wires.source[final[same]]]
    used: Bools = (route != NO_LINK).any(axis=(0, 1))
    return route[:, :, : int(used.sum())].astype(np.int32)


def _find_last_hops(num_devices: int, wires: _Wires) -> Ints:
    """[D, V] the last connection of the cheapest path from each device (Bellman-Ford, all sources at once).

    Devices are sources and targets only, so hosts and switches alone are relaxed. One sweep per middle hop.
    """
    num_places = len(wires.inside)
    cost = np.full((num_devices, num_places), np.inf)
    last = np.full((num_devices, num_places), NO_LINK, dtype=np.int32)
    leaving = np.flatnonzero(wires.source < num_devices)
    cost[wires.source[leaving], wires.target[leaving]] = wires.weight_s[leaving]
    last[wires.source[leaving], wires.target[leaving]] = leaving
    cost[np.arange(num_devices), np.arange(num_devices)] = 0.0
    start = np.searchsorted(wires.source, np.arange(num_devices, num_places + 1))
    changed = True
    while changed:
        changed = False
        for middle, (low, high) in enumerate(itertools.pairwise(start.tolist()), num_devices):
            target = wires.target[low:high]
            through = cost[:, middle, None] + wires.weight_s[low:high]
            better = through < cost[:, target]
            if better.any():
                changed = True
                cost[:, target] = np.where(better, through, cost[:, target])
                last[:, target] = np.where(better, np.arange(low, high), last[:, target])
    return last

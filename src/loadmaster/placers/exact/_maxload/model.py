"""MaxLoad: a throughput problem as classes of ops, types of devices and nets between classes.

Section numbers are those of Tarnawski et al., NeurIPS 2020, whose cost model this is: a device's load
depends on its own set alone, so that a set can be priced without knowing the others.

* A *class* moves as one. `free_model` has the problem's units; `chain_model` (see `contract.py`) fewer.
* A *type* is a set of devices that are alike: same times, room, transfer costs and pins.
* A *net* is what leaves a class: its home, the classes that use it, and its cost on each type: read by a
  type that uses it and is not its home, written by its home if anybody else uses it. Once each.

Where links are not `host`, a transfer's time depends on both its ends and the model is an estimate: every
transfer takes the least time it may take. `bounding` says whether the estimate is never above the truth.
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.graph import held_bytes, units
from loadmaster.core.problem import BY_ROUTE, Links, Load, Problem, allowed_devices
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.simulator.events.throughput import hop_s


@dataclass(frozen=True, slots=True, eq=False)
class Nets:
    """E nets over C classes."""

    home: Ints  # [E]
    ptr: Ints  # [E + 1] into user
    user: Ints  # classes that use it, the home not among them
    read_s: Floats  # [T, E] per type
    write_s: Floats  # [T, E]

    @property
    def num(self) -> int:
        """E."""
        return len(self.home)


@dataclass(frozen=True, slots=True, eq=False)
class MaxLoad:
    """C classes on T types of devices."""

    of_op: Ints  # [N]
    seconds: Floats  # [C, T] inf = not allowed
    num_bytes: Longs  # [C] held at the end of the step
    devices: tuple[tuple[int, ...], ...]  # T lists of devices that are alike
    room: Longs  # [T]
    nets: Nets
    source: Ints  # order: class source[i] is on the stage of class target[i] or on an earlier one
    target: Ints
    load: Load
    exact: bool  # the load of a device's set is what the simulator says
    bounding: bool  # it is never above that
    restricted: str  # why a chain may exist that this model does not know, '' = none does

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.num_bytes)

    @property
    def num_types(self) -> int:
        """T."""
        return len(self.devices)

    @property
    def count(self) -> Ints:
        """[T] devices of each type."""
        return np.array([len(alike) for alike in self.devices], dtype=np.int32)

    def with_memory(self, problem: Problem, num_bytes: Longs, room: Longs) -> "MaxLoad":
        """The same classes with other bytes [C] and other room [D]; types are told apart again."""
        column = {d: t for t, alike in enumerate(self.devices) for d in alike}
        type_of = np.array([column[d] for d in range(problem.cluster.num_devices)])
        devices = _group_types(self.seconds[:, type_of], self.nets, type_of, num_bytes, room)
        pick = type_of[[alike[0] for alike in devices]]
        nets = replace(self.nets, read_s=self.nets.read_s[pick], write_s=self.nets.write_s[pick])
        return replace(
            self,
            seconds=self.seconds[:, pick],
            num_bytes=num_bytes,
            devices=devices,
            room=_clip_room(room, num_bytes)[[alike[0] for alike in devices]],
            nets=nets,
        )

    def with_room(self, problem: Problem, num_bytes: Longs, room: Longs) -> "MaxLoad":
        """As `with_memory`, where more than bytes [C] takes room [D]: all of it makes a difference."""
        column = {d: t for t, alike in enumerate(self.devices) for d in alike}
        type_of = np.array([column[d] for d in range(problem.cluster.num_devices)])
        apart = np.full(1, 2**62, dtype=np.int64)
        devices = _group_types(self.seconds[:, type_of], self.nets, type_of, apart, room)
        first = [alike[0] for alike in devices]
        pick = type_of[first]
        nets = replace(self.nets, read_s=self.nets.read_s[pick], write_s=self.nets.write_s[pick])
        seconds = np.ascontiguousarray(self.seconds[:, pick])
        return replace(
            self, seconds=seconds, num_bytes=num_bytes, devices=devices, room=room[first], nets=nets
        )


def free_model(problem: Problem) -> MaxLoad:
    """The units of a problem; nothing is left out, so that its optimum is the problem's."""
    unit, num = units(problem.graph)
    return make_model(problem, unit, num)


def riding_units(problem: Problem) -> tuple[Cargo, bool]:
    """Units in which parameters ride with their first reader, and whether any does."""
    cargo = load_cargo(problem)
    return cargo, cargo.num_units < units(problem.graph)[1]


def make_model(problem: Problem, of_op: Ints, num: int) -> MaxLoad:
    """Classes as given, without an order between them."""
    graph, cluster = problem.graph, problem.cluster
    by_kind = [np.bincount(of_op, seconds, num) for seconds in problem.costs.compute_s.T]
    allowed = allowed_devices(problem, of_op, num)
    seconds = np.where(allowed, np.stack(by_kind, axis=1)[:, cluster.kind], np.inf)
    num_bytes = np.zeros(num, dtype=np.int64)
    np.add.at(num_bytes, of_op, held_bytes(graph))
    read_s, write_s, bounding = _hop_seconds(problem)
    nets = _build_nets(problem, of_op, read_s, write_s)
    every = np.arange(cluster.num_devices)
    devices = _group_types(seconds, nets, every, num_bytes, cluster.usable_bytes)
    pick = np.array([alike[0] for alike in devices])
    alone = len(np.unique(cluster.engine)) == cluster.num_devices
    none = np.zeros(0, dtype=np.int32)
    return MaxLoad(
        of_op=of_op,
        seconds=np.ascontiguousarray(seconds[:, pick]),
        num_bytes=num_bytes,
        devices=devices,
        room=_clip_room(cluster.usable_bytes, num_bytes)[pick],
        nets=replace(nets, read_s=nets.read_s[pick], write_s=nets.write_s[pick]),
        source=none,
        target=none,
        load=_LOAD.get(problem.links, problem.load),
        exact=alone and problem.links in (Links.HOST, Links.PARALLEL),
        bounding=bounding,
        restricted="",
    )


_LOAD = {Links.SHARED: Load.MAX3, Links.HALF_DUPLEX: Load.MAX2, Links.PARALLEL: Load.MAX3}


def _clip_room(room: Longs, num_bytes: Longs) -> Longs:
    """Room beyond all there is makes no difference."""
    most = int(min(int(num_bytes.sum()), 2**62))
    return np.minimum(room, most).astype(np.int64)


def _group_types(
    seconds: Floats, nets: Nets, column: Longs, num_bytes: Longs, room: Longs
) -> tuple[tuple[int, ...], ...]:
    """Devices that are alike in everything, as lists in order of their first; `column`: net costs."""
    room = _clip_room(room, num_bytes)
    alike: dict[tuple[bytes, bytes, bytes, int], list[int]] = {}
    for d in range(seconds.shape[1]):
        reads, writes = nets.read_s[column[d]], nets.write_s[column[d]]
        key = (seconds[:, d].tobytes(), reads.tobytes(), writes.tobytes(), int(room[d]))
        alike.setdefault(key, []).append(d)
    return tuple(tuple(devices) for devices in alike.values())


def _hop_seconds(problem: Problem) -> tuple[Floats, Floats, bool]:
    """[D, T] seconds that a device reads and writes each tensor, and whether no plan does in less."""
    num, tensors = problem.cluster.num_devices, problem.graph.num_tensors
    read_s, write_s = np.zeros((num, tensors)), np.zeros((num, tensors))
    if problem.links == Links.PARALLEL or num == 1:
        return read_s, write_s, True
    every = np.arange(tensors, dtype=np.int32)
    if problem.links == Links.HOST:
        pays = ~problem.cluster.on_host[problem.cluster.kind]
        for d in np.flatnonzero(pays).tolist():
            read_s[d] = hop_s(problem, every, d, to_host=False)
            write_s[d] = hop_s(problem, every, d, to_host=True)
        return read_s, write_s, True
    latency, rate = route_latency_s(problem.cluster), route_bytes_per_s(problem.cluster)
    given = problem.costs.transfer_s
    for d in range(num):
        others = np.delete(np.arange(num), d)
        for table, lat, per_s in (
            (read_s, latency[others, d], rate[others, d]),
            (write_s, latency[d, others], rate[d, others]),
        ):
            routed = (lat[:, None] + problem.graph.tensor_bytes / per_s[:, None]).min(axis=0)
            table[d] = np.where(given == BY_ROUTE, routed, given)
    return read_s, write_s, problem.links == Links.HALF_DUPLEX or _has_one_port(problem)


def _has_one_port(problem: Problem) -> bool:
    """Whether all that a device reads passes one link, and all that it writes."""
    route, num = problem.cluster.route, problem.cluster.num_devices
    for d in range(num):
        for routes in (route[:, d], route[d]):
            sets = [set(routes[j][routes[j] >= 0].tolist()) for j in range(num) if j != d]
            if not set.intersection(*sets):
                return False
    return True


def _build_nets(problem: Problem, of_op: Ints, read_s: Floats, write_s: Floats) -> Nets:
    """One net for all tensors with the same home and users; those that no device pays for are left out."""
    graph, home_of = problem.graph, of_op[problem.graph.tensor_op]
    costs: Bools = np.asarray((read_s + write_s).any(axis=0))
    user_of = of_op[graph.use_op]
    uses: dict[int, set[int]] = {}
    crossing = costs[graph.use_tensor] & (home_of[graph.use_tensor] != user_of)
    for tensor, user in zip(graph.use_tensor[crossing].tolist(), user_of[crossing].tolist(), strict=True):
        uses.setdefault(tensor, set()).add(user)
    tensors: dict[tuple[int, ...], list[int]] = {}
    for tensor in sorted(uses):
        tensors.setdefault((int(home_of[tensor]), *sorted(uses[tensor])), []).append(tensor)
    users = [user for key in tensors for user in key[1:]]
    ptr = np.concatenate([[0], np.cumsum([len(key) - 1 for key in tensors])]).astype(np.int32)
    net_of = np.full(graph.num_tensors, -1, dtype=np.int64)
    for net, group in enumerate(tensors.values()):
        net_of[group] = net
    some = net_of >= 0
    num = len(tensors)
    return Nets(
        home=np.array([key[0] for key in tensors], dtype=np.int32),
        ptr=ptr,
        user=np.array(users, dtype=np.int32),
        read_s=np.stack([np.bincount(net_of[some], row[some], num) for row in read_s]),
        write_s=np.stack([np.bincount(net_of[some], row[some], num) for row in write_s]),
    )


def device_of_ops(model: MaxLoad, device: Ints) -> Ints:
    """[N] device of each op from that of each class."""
    return device[model.of_op].astype(np.int32)


def allowed_types(model: MaxLoad) -> Bools:
    """[C, T] where a class may run and has room on its own."""
    return np.isfinite(model.seconds) & (model.num_bytes[:, None] <= model.room)

"""What the windows between two neighbours of the spine may cost: every way to place their units, tried.

A step of the spine goes from (m_k, B_k) on one device to (m_k-1, B_k-1) on another. Its options are the
devices of both ends and of the *inner* units, a few of those whose ops lie in the windows. An option costs

    forward   from the start of m_k-1 to the start of m_k: the longest path, transfers paid, and no less than
              the work of any engine, and what passes a device's port, in that time
    backward  from the end of B_k to the end of B_k-1, likewise
    work      two rows for each engine: forward, and what it does after B_k ends of ops of these units; or
              what it does of them before m_k starts and after B_k ends
    bytes     on each device, of what stands there (`standing.py`)

Ops of other units are wherever that costs least. Times are whole ticks, rounded down one by one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.simulator.jit import kernel

INFINITE = 1 << 55  # ticks; two of them can be added
TO_END, FROM_END, FIRST_INNER = 0, 1, 2  # slots: m_k-1's unit, m_k's unit, inner units


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Ops between two ops, those two the first and the last; L of them, in the graph's order."""

    slot: Ints  # [L] of an op's unit, -1 = the op may be anywhere
    ticks: Longs  # [L, D] INFINITE = not allowed
    source: Ints  # [E] edges: places of their ops, by target
    target: Ints  # [E]
    tensor: Ints  # [E] row of the transfer times
    tied: Bools  # [E] both ops are of one unit
    net_source: Ints  # [M] nets: what an op of a decided unit makes for others, views looked through
    net_ticks: Longs  # [M, D, D] to cross at the cheapest point
    net_ptr: Ints  # [M + 1] into
    net_end: Ints  # places of the ops that need it

    @property
    def arrays(self) -> tuple[Any, ...]:
        """As a kernel takes them."""
        edges = (self.slot, self.ticks, self.source, self.target, self.tensor, self.tied)
        return (*edges, self.net_source, self.net_ticks, self.net_ptr, self.net_end)


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What a step may cost; O of them."""

    start: Ints  # [O] device of m_k
    end: Ints  # [O] device of m_k-1
    forward: Longs  # [O]
    backward: Longs  # [O]
    work: Longs  # [O, 2 * engines]
    num_bytes: Longs  # [O, D]
    inner: Ints  # [O, n] devices of inner units

    # of two options between the same devices none costs less in every way


def list_options(
    windows: tuple[Window, Window],
    transfer: Longs,
    allowed: Bools,
    work: Longs,
    num_bytes: Longs,
    engine: Ints,
    ports: Bools,
) -> Options:
    """All options of a step, by slot where a unit may be, its work by row and device, and its bytes."""
    num_inner, num_devices = len(allowed) - FIRST_INNER, len(engine)
    places = [np.flatnonzero(row).astype(np.int32) for row in allowed]
    ptr = np.cumsum([0, *(len(p) for p in places)]).astype(np.int32)
    num_engines = int(engine.max()) + 1
    forward, backward = windows
    total = int(np.prod([len(p) for p in places], dtype=np.int64))
    sizes = (ports, num_engines, total, num_devices, num_inner)
    units = (np.concatenate(places), ptr, work, num_bytes, engine)
    given: list[Any] = [*forward.arrays, *backward.arrays, transfer, *units, *sizes]
    found = _try_options(*given)
    kept = _find_undominated(*found)
    device, spans, loads, held = (part[kept] for part in found)
    return Options(
        device[:, FROM_END], device[:, TO_END], spans[:, 0], spans[:, 1], loads, held, device[:, FIRST_INNER:]
    )


@kernel
def _port_ticks(
    slot: Any,
    ticks: Any,
    net_source: Any,
    net_ticks: Any,
    net_ptr: Any,
    net_end: Any,
    device: Any,
    ports: Any,
    end: Any,
) -> Any:
    """What must leave or enter a device in turn: from when the first is made until all is used."""
    num, num_devices = ticks.shape
    longest = 0
    for way in range(2):  # out of, into
        for port in range(num_devices):
            if not ports[way, port]:
                continue
            load, release, tail = 0, INFINITE, INFINITE
            for net in range(len(net_source)):
                source = net_source[net]
                home = device[slot[source]]
                if (home == port) != (way == 0):
                    continue
                rest = INFINITE
                for at in range(net_ptr[net], net_ptr[net + 1]):
                    op = net_end[at]
                    there = device[slot[op]]
                    if there != home and (way == 0 or there == port):
                        rest = min(rest, ticks[op, there] if op < num - 1 else 0)
                if rest >= INFINITE:
                    continue
                least = INFINITE
                for d in range(num_devices):
                    if d != port:
                        least = min(least, net_ticks[net, port, d] if way == 0 else net_ticks[net, d, port])
                load += least
                tail = min(tail, rest)
                release = min(release, end[source, home])
            if load > 0 and release < INFINITE:
                longest = max(longest, release + load + tail)
    return longest


@kernel
def _window_ticks(
    slot: Any,
    ticks: Any,
    source: Any,
    target: Any,
    tensor: Any,
    tied: Any,
    net_source: Any,
    net_ticks: Any,
    net_ptr: Any,
    net_end: Any,
    transfer: Any,
    device: Any,
    engine: Any,
    ports: Any,
    load: Any,
    end: Any,
    skip_first: bool,
) -> Any:
    """The longest path with one end op counted, and no less than any engine's work of it."""
    num, num_devices = ticks.shape
    for op in range(num):
        for d in range(num_devices):
            end[op, d] = 0
    for d in range(num_devices):
        end[0, d] = 0 if d == device[slot[0]] else INFINITE
    edge = 0
    for op in range(1, num):
        while edge < len(target) and target[edge] == op:
            u, t = source[edge], tensor[edge]
            for d in range(num_devices):
                came = INFINITE
                if tied[edge]:
                    came = end[u, d]
                else:
                    for here in range(num_devices):
                        came = min(came, end[u, here] + transfer[t, here, d])
                end[op, d] = max(end[op, d], came)
            edge += 1
        for d in range(num_devices):
            if slot[op] >= 0 and device[slot[op]] != d:
                end[op, d] = INFINITE
            elif op < num - 1:
                end[op, d] = min(end[op, d] + ticks[op, d], INFINITE)
    span = end[num - 1, device[slot[num - 1]]]
    span = max(span, _port_ticks(slot, ticks, net_source, net_ticks, net_ptr, net_end, device, ports, end))
    load[:] = 0
    counted = num - 1 if skip_first else 0
    span += ticks[counted, device[slot[counted]]]
    for op in range(1 if skip_first else 0, num if skip_first else num - 1):
        if slot[op] >= 0:
            d = device[slot[op]]
            load[engine[d]] += ticks[op, d]
    for e in range(len(load)):
        span = max(span, load[e])
    return min(span, INFINITE)


@kernel
def _try_options(
    f_slot: Any,
    f_ticks: Any,
    f_source: Any,
    f_target: Any,
    f_tensor: Any,
    f_tied: Any,
    f_net_source: Any,
    f_net_ticks: Any,
    f_net_ptr: Any,
    f_net_end: Any,
    b_slot: Any,
    b_ticks: Any,
    b_source: Any,
    b_target: Any,
    b_tensor: Any,
    b_tied: Any,
    b_net_source: Any,
    b_net_ticks: Any,
    b_net_ptr: Any,
    b_net_end: Any,
    transfer: Any,
    place: Any,
    ptr: Any,
    work: Any,
    num_bytes: Any,
    engine: Any,
    ports: Any,
    num_engines: int,
    total: int,
    num_devices: int,
    num_inner: int,
) -> Any:
    """Device of every slot, spans, loads and bytes of every option that is possible."""
    slots = num_inner + 2
    device = np.zeros((total, slots), dtype=np.int32)
    spans = np.zeros((total, 2), dtype=np.int64)
    loads = np.zeros((total, 2 * num_engines), dtype=np.int64)
    held = np.zeros((total, num_devices), dtype=np.int64)
    load = np.zeros(num_engines, dtype=np.int64)
    end_f = np.zeros(f_ticks.shape, dtype=np.int64)
    end_b = np.zeros(b_ticks.shape, dtype=np.int64)
    at = np.zeros(slots, dtype=np.int64)
    found = 0
    for _ in range(total):
        now = device[found]
        for s in range(slots):
            now[s] = place[ptr[s] + at[s]]
        s = 0
        while s < slots:
            at[s] += 1
            if at[s] < ptr[s + 1] - ptr[s]:
                break
            at[s] = 0
            s += 1
        forward = _window_ticks(
            f_slot,
            f_ticks,
            f_source,
            f_target,
            f_tensor,
            f_tied,
            f_net_source,
            f_net_ticks,
            f_net_ptr,
            f_net_end,
            transfer,
            now,
            engine,
            ports,
            load,
            end_f,
            False,
        )
        # counted are m_k-1 at its beginning, and B_k-1 at its end
        backward = _window_ticks(
            b_slot,
            b_ticks,
            b_source,
            b_target,
            b_tensor,
            b_tied,
            b_net_source,
            b_net_ticks,
            b_net_ptr,
            b_net_end,
            transfer,
            now,
            engine,
            ports,
            load,
            end_b,
            True,
        )
        if forward >= INFINITE or backward >= INFINITE:
            continue
        spans[found, 0] = forward
        spans[found, 1] = backward
        loads[found, :num_engines] = forward
        loads[found, num_engines:] = 0
        held[found] = 0
        for s in range(slots):
            if s != 1:  # the unit of m_k belongs to the step before
                d = now[s]
                loads[found, engine[d]] += work[s, 0, d]
                loads[found, num_engines + engine[d]] += work[s, 1, d]
                held[found, d] += num_bytes[s]
        found += 1
    return device[:found], spans[:found], loads[:found], held[:found]


@kernel
def _find_undominated(device: Any, spans: Any, loads: Any, held: Any) -> Any:
    """Options of which none between the same devices costs less, or as much, in every way."""
    order = np.argsort(spans[:, 0] + spans[:, 1])
    kept = np.empty(len(order), dtype=np.int64)
    found = 0
    for i in range(len(order)):
        one, worse = order[i], False
        for j in range(found):
            other = kept[j]
            if device[other, 0] != device[one, 0] or device[other, 1] != device[one, 1]:
                continue
            worse = True
            for e in range(loads.shape[1]):
                if loads[other, e] > loads[one, e]:
                    worse = False
                    break
            if worse:
                for d in range(held.shape[1]):
                    if held[other, d] > held[one, d]:
                        worse = False
                        break
            if worse:
                break
        if not worse:
            kept[found] = one
            found += 1
    return kept[:found]

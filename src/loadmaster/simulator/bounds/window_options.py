"""What the windows between two neighbours of the spine may cost: every way to place their units, tried.

A step of the spine goes from (m_k, B_k) on one device to (m_k-1, B_k-1) on another. Its options are the
devices of both ends and of the *inner* units, a few of those whose ops lie in the windows. Where those are
too many to try every device for each, a unit is at the one end, at the other, or elsewhere. An option costs

    forward   from the start of m_k-1 to the start of m_k: the longest path, transfers paid, and no less than
              the work of any engine, and what passes a device's port, in that time
    backward  from the end of B_k to the end of B_k-1, likewise
    work      two rows for each engine: forward, and what it does after B_k ends of ops of these units; or
              what it does of them before m_k starts and after B_k ends
    bytes     on each device, of what stands there (`standing.py`)

Ops of other units are wherever that costs least, and ops of a unit that is elsewhere are on whichever of
those devices costs least; nobody is charged for its work and its bytes. Times are whole ticks, rounded down
one by one. Of options between the same devices those are kept that are not worse than another in every way;
where these are many, all their amounts are rounded down to coarser steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.simulator.jit import kernel

INFINITE = 1 << 55  # ticks; two of them can be added
TO_END, FROM_END, FIRST_INNER = 0, 1, 2  # slots: m_k-1's unit, m_k's unit, inner units
SOMEWHERE = -1  # in the place of a device: one of several
_MOST_STAYING, _MOST_MOVING = 10_240, 20_000  # options tried where devices are not tried one by one
_MOST_KEPT = 300  # of those between two devices, if amounts in fewer parts will do
_PARTS = (256, 128, 64)


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
    inner: Ints  # [O, n] devices of inner units, or SOMEWHERE

    # of two options between the same devices none costs less in every way


def list_options(
    windows: tuple[Window, Window],
    transfer: Longs,
    choices: Longs,
    work: Longs,
    num_bytes: Longs,
    engine: Ints,
    ports: Bools,
    limit: int,
) -> Options:
    """Options of a step by sets of devices [O, slots], as bits; by slot work by row and device, and bytes.

    What alone takes more than `limit` ticks is left out.
    """
    num_engines = int(engine.max()) + 1
    forward, backward = windows
    units = (choices, work, num_bytes, engine)
    given: list[Any] = [*forward.arrays, *backward.arrays, transfer, *units, ports, num_engines]
    device, spans, loads, held = _try_options(*given)
    parts = []
    pair = device[:, FROM_END] * len(engine) + device[:, TO_END]
    least = int(spans.sum(axis=1).min(initial=INFINITE))
    for one in np.unique(pair):
        mine = np.flatnonzero((pair == one) & (spans.sum(axis=1) <= limit))
        parts.append(_keep_best(*(part[mine] for part in (device, spans, loads, held)), least=least))
    device, spans, loads, held = (
        (np.concatenate(rows) for rows in zip(*parts, strict=True)) if parts else (device, spans, loads, held)
    )
    return Options(
        device[:, FROM_END], device[:, TO_END], spans[:, 0], spans[:, 1], loads, held, device[:, FIRST_INNER:]
    )


def _keep_best(
    device: Ints, spans: Longs, loads: Longs, held: Longs, *, least: int
) -> tuple[Ints, Longs, Longs, Longs]:
    """Options between the same devices, none worse than another; `least`: what any of the step takes."""
    device, spans, loads, held = _drop_worse(device, spans, loads, held)
    for parts in _PARTS:
        if len(device) <= _MOST_KEPT:
            break
        time_step = max(least // parts, 1)
        byte_step = max(int(held.sum(axis=1).max()) // parts, 1)
        spans, loads = spans // time_step * time_step, loads // time_step * time_step
        held = held // byte_step * byte_step
        device, spans, loads, held = _drop_worse(device, spans, loads, held)
    return device, spans, loads, held


def _drop_worse(device: Ints, spans: Longs, loads: Longs, held: Longs) -> tuple[Ints, Longs, Longs, Longs]:
    """Options that are not worse than another in every way."""
    span = spans.sum(axis=1)
    order = np.lexsort((held.sum(axis=1), loads.sum(axis=1), span))  # so that who is worse comes later
    kept = _find_undominated(order, span, loads, held)
    return device[kept], spans[kept], loads[kept], held[kept]


def list_choices(allowed: Bools, *, whole: bool) -> Longs:
    """[O, slots] sets of devices, as bits: every device of every slot (`whole`), or fewer.

    Fewer: an inner unit is where one end is, where the other is, or elsewhere. Where the ends differ only
    the first units are decided.
    """
    num_inner, num_devices = len(allowed) - FIRST_INNER, allowed.shape[1]
    bits = (allowed.astype(np.int64) << np.arange(num_devices)).sum(axis=1)
    if whole:
        return _combine([[1 << d for d in np.flatnonzero(row).tolist()] for row in allowed])
    found = []
    num_moving = count_moving_units(num_devices)
    for end in np.flatnonzero(allowed[TO_END]).tolist():
        for start in np.flatnonzero(allowed[FROM_END]).tolist():
            near = {1 << end, 1 << start}
            sets = [*sorted(near), (1 << num_devices) - 1 - sum(near)]
            places = [[1 << end], [1 << start]]
            for at in range(num_inner):
                mine = int(bits[FIRST_INNER + at])
                decided = start == end or at < num_moving
                places.append([mine & some for some in sets if mine & some] if decided else [mine])
            found.append(_combine(places))
    return np.concatenate(found) if found else np.zeros((0, len(allowed)), dtype=np.int64)


def count_staying_units(num_devices: int) -> int:
    """How many inner units are decided where a layer and the next one are on one device."""
    return max(int(np.log2(_MOST_STAYING / num_devices)), 0)


def count_moving_units(num_devices: int) -> int:
    """Likewise where they are on two."""
    pairs = max(num_devices * (num_devices - 1), 1)
    return max(int(np.log(_MOST_MOVING / pairs) / np.log(min(max(num_devices, 2), 3))), 0)


def _combine(places: list[list[int]]) -> Longs:
    """Every way to take one of each list, the first list fastest."""
    if any(not some for some in places):
        return np.zeros((0, len(places)), dtype=np.int64)
    axes = np.meshgrid(*[np.array(some, dtype=np.int64) for some in places[::-1]], indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes[::-1]], axis=1)


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
                if home == SOMEWHERE or (home == port) != (way == 0):
                    continue
                rest = INFINITE
                for at in range(net_ptr[net], net_ptr[net + 1]):
                    op = net_end[at]
                    there = device[slot[op]]
                    if there != SOMEWHERE and there != home and (way == 0 or there == port):
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
    chosen: Any,
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
            if slot[op] >= 0 and not chosen[slot[op]] >> d & 1:
                end[op, d] = INFINITE
            elif op < num - 1:
                end[op, d] = min(end[op, d] + ticks[op, d], INFINITE)
    span = end[num - 1, device[slot[num - 1]]]
    span = max(span, _port_ticks(slot, ticks, net_source, net_ticks, net_ptr, net_end, device, ports, end))
    load[:] = 0
    counted = num - 1 if skip_first else 0
    span += ticks[counted, device[slot[counted]]]
    for op in range(1 if skip_first else 0, num if skip_first else num - 1):
        if slot[op] >= 0 and device[slot[op]] != SOMEWHERE:
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
    choices: Any,
    work: Any,
    num_bytes: Any,
    engine: Any,
    ports: Any,
    num_engines: int,
) -> Any:
    """Device of every slot, spans, loads and bytes of every option that is possible."""
    total, slots = choices.shape
    num_devices = len(engine)
    device = np.zeros((total, slots), dtype=np.int32)
    spans = np.zeros((total, 2), dtype=np.int64)
    loads = np.zeros((total, 2 * num_engines), dtype=np.int64)
    held = np.zeros((total, num_devices), dtype=np.int64)
    load = np.zeros(num_engines, dtype=np.int64)
    end_f = np.zeros(f_ticks.shape, dtype=np.int64)
    end_b = np.zeros(b_ticks.shape, dtype=np.int64)
    found = 0
    for row in range(total):
        now, chosen = device[found], choices[row]
        for s in range(slots):
            now[s] = SOMEWHERE
            for d in range(num_devices):
                if chosen[s] == 1 << d:
                    now[s] = d
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
            chosen,
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
            chosen,
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
            if s != 1 and now[s] != SOMEWHERE:  # the unit of m_k belongs to the step before
                d = now[s]
                loads[found, engine[d]] += work[s, 0, d]
                loads[found, num_engines + engine[d]] += work[s, 1, d]
                held[found, d] += num_bytes[s]
        found += 1
    return device[:found], spans[:found], loads[:found], held[:found]


@kernel
def _find_undominated(order: Any, span: Any, loads: Any, held: Any) -> Any:
    """Options of which none before them in an order costs less, or as much, in every way."""
    kept = np.empty(len(order), dtype=np.int64)
    found = 0
    for i in range(len(order)):
        one, worse = order[i], False
        for j in range(found):
            other = kept[j]
            worse = span[other] <= span[one]
            if worse:
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

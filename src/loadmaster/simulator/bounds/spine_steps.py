"""A training step as steps along its spine, each with all that it may cost: what the diagram searches.

The last layer is m_K with B_K; a step goes from layer k to layer k - 1. Every unit is decided in one step
only.
"""

import math
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.cluster import NO_LINK
from loadmaster.core.graph import Phase, units
from loadmaster.core.problem import Links, Problem, allowed_devices
from loadmaster.simulator.bounds.favourite_children import pair_table
from loadmaster.simulator.bounds.spine import Spine, find_spine
from loadmaster.simulator.bounds.standing import Standing, StandingBytes
from loadmaster.simulator.bounds.travel import compute_travel
from loadmaster.simulator.bounds.window_options import (
    FROM_END,
    INFINITE,
    Options,
    Window,
    count_staying_units,
    list_choices,
    list_options,
)

_TICKS = float(1 << 34)  # of the horizon
_MOST_DEVICES = 62  # a set of them is the bits of one number
_UNIMPORTANT = 1e-4  # of all time and bytes: a unit that is less is not decided
_UNIMPORTANT_BESIDE, _MOST_BESIDE = 5e-4, 200  # likewise beside the spine, and how many are


@dataclass(frozen=True, slots=True, eq=False)
class SpineSteps:
    """K + 1 layers, K steps; times in ticks. Layers count from the input, steps[0] leaves the last layer."""

    tick_s: float
    engine: Ints  # [D]
    room: Longs  # [D] bytes, at the moment that counts
    rest_bytes: int  # held by units that no step decides
    first: Longs  # [D] ticks of the last layer, INFINITE = not allowed
    first_work: Longs  # [D] likewise, and no less than all that the unit does from m_K on
    first_bytes: int
    before: Longs  # [2 * engines, D] ticks before m_0 starts that a row of work does not count
    last: Longs  # [D] ticks before m_0 starts and after B_0 ends
    steps: tuple[Options, ...]
    layer_unit: Ints  # [K + 1] unit of each layer, from the last to the first
    inner_units: tuple[Ints, ...]  # of each step
    truncated: bool  # whether a window has units that are not decided for their number


def build_spine_steps(
    problem: Problem, horizon_s: float, *, most_options: int, coarse: bool = False
) -> SpineSteps | None:
    """The steps of a problem whose steps take about `horizon_s`; None where it has no spine.

    `coarse`: where a step has more options than `most_options`, more units are decided, but not by device.
    """
    least_s = problem.device_compute_s.min(axis=1)
    spine = find_spine(problem.graph, least_s)
    if spine is None or horizon_s <= 0 or problem.cluster.num_devices > _MOST_DEVICES:
        return None
    return _Builder(problem, spine, horizon_s, most_options, coarse).build()


class _Builder:
    """Ticks, units and reachability, while steps are made."""

    def __init__(
        self, problem: Problem, spine: Spine, horizon_s: float, most_options: int, coarse: bool
    ) -> None:
        graph = problem.graph
        self.problem, self.spine, self.graph = problem, spine, graph
        self.tick_s, self.most_options = horizon_s / _TICKS, most_options
        self.unit, self.num_units = units(graph)
        self.allowed = allowed_devices(problem, self.unit, self.num_units)
        self.ticks = self._to_ticks(problem.device_compute_s)
        self.ticks[~self.allowed[self.unit]] = INFINITE
        self.transfer = self._to_ticks(_transfer_s(problem))
        self.engine: Ints = np.unique(problem.cluster.engine, return_inverse=True)[1].astype(np.int32)
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ops)]
        for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            self.inputs[op].append((int(graph.tensor_op[t]), t))
        self.ops_of: list[list[int]] = [[] for _ in range(self.num_units)]
        for op, u in enumerate(self.unit.tolist()):
            self.ops_of[u].append(op)
        self.outputs: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for t, op in enumerate(graph.tensor_op.tolist()):
            self.outputs[op].append(t)
        self.users: list[list[int]] = [[] for _ in range(graph.num_tensors)]
        for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            self.users[t].append(op)
        lone = np.bincount(graph.use_op, minlength=graph.num_ops) == 1
        lone &= np.bincount(self.unit)[self.unit] == 1
        self.is_view: Bools = lone & (self.ticks == 0).all(axis=1)
        self.ports = _find_ports(problem)
        self.known: dict[bytes, Options] = {}
        self.coarse = coarse
        self.truncated = False

    def _to_ticks(self, seconds: Floats) -> Longs:
        whole = np.floor(np.minimum(seconds / self.tick_s, float(INFINITE)))
        return whole.astype(np.int64)

    def build(self) -> SpineSteps:
        """Steps from the loss to the input."""
        spine, num = self.spine, len(self.spine.forward)
        moment = self._fullest_moment()
        taken = {int(self.unit[op]) for op in spine.forward}
        inner = [self._inner_units(k, moment, taken) for k in range(num - 1, 0, -1)]
        decided = np.zeros(self.num_units, dtype=np.bool_)
        decided[[int(self.unit[op]) for op in spine.forward]] = True
        decided[[u for some in inner for u in some]] = True
        beside = self._find_units_beside(moment, taken)
        decided[[u for some in beside.values() for u in some]] = True
        held = moment.charge(decided, self.num_units)
        weights = moment.select_storages(self.is_weight).charge(decided, self.num_units)
        resident = np.bincount(self.unit, self.graph.resident_bytes, self.num_units).astype(np.int64)
        held = np.where(decided, held + resident, 0)
        steps, inner_units, layers = list[Options](), list[list[int]](), [num - 1]
        for k in range(num - 1, 0, -1):
            for u in beside.get(k, []):
                steps.append(self._stay(k, u, int(held[u])))
                inner_units.append([u])
                layers.append(k)
            steps.append(self._step(k, inner[num - 1 - k], held))
            inner_units.append(inner[num - 1 - k])
            layers.append(k - 1)
        first_unit = int(self.unit[spine.forward[-1]])
        first = self._first_layer()
        travel = compute_travel(self.problem)
        before = self._to_ticks(travel.head_s[spine.forward[0]])
        return SpineSteps(
            tick_s=self.tick_s,
            engine=self.engine,
            room=self.problem.cluster.usable_bytes.astype(np.int64),
            rest_bytes=max(int(resident[~decided].sum() - weights.sum()), 0),  # a weight may be at home there
            first=first,
            first_work=np.maximum(first, self._work_from(spine.forward[-1])),
            first_bytes=int(held[first_unit]),
            before=np.repeat([before, np.zeros_like(before)], int(self.engine.max()) + 1, axis=0),
            last=before + self._to_ticks(travel.tail_s[spine.backward[0]]),
            steps=tuple(steps),
            layer_unit=self.unit[[spine.forward[k] for k in layers]],
            truncated=self.truncated,
            inner_units=tuple(np.array(some, dtype=np.int32) for some in inner_units),
        )

    def _fullest_moment(self) -> Standing:
        """The moment at an op of the spine when most stands that units of the spine are charged for."""
        standing = StandingBytes(self.graph, self.unit, self.num_units, weights=True)
        wanted = np.ones(self.num_units, dtype=np.bool_)
        best: tuple[int, Standing] | None = None
        last = self.spine.forward[-1], self.spine.backward[-1]
        for op in (*last, *self.spine.backward[-2::-8], *self.spine.forward[-2::-8]):
            moment = standing.during(op, self._mask(self.spine.before[op]), self._mask(self.spine.after[op]))
            total = int(moment.charge(wanted, self.num_units).sum())
            if best is None or total > best[0]:
                best = total, moment
        assert best is not None
        self.is_weight = standing.is_weight
        return best[1]

    def _mask(self, bits: int) -> Bools:
        num = self.graph.num_ops
        raw = np.frombuffer(bits.to_bytes((num + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(raw, bitorder="little")[:num].astype(np.bool_)

    def _inner_units(self, k: int, moment: Standing, taken: set[int]) -> list[int]:
        """The weightiest units with a forward op between m_k-1 and m_k, none that was taken before."""
        ops = self.spine.between(self.spine.forward[k - 1], self.spine.forward[k])
        candidates = sorted({int(self.unit[op]) for op in ops} - taken)
        if not candidates:
            return []
        weight = self._weigh(moment)
        heavy = [u for u in sorted(candidates, key=lambda u: (-weight[u], u)) if weight[u] >= _UNIMPORTANT]
        count = len(heavy)
        while count and self._num_options(k, heavy[:count]) > self.most_options:
            count -= 1
        if count < len(heavy) and self.coarse:
            count = count_staying_units(self.allowed.shape[1])
        self.truncated |= count < len(heavy)
        taken.update(heavy[:count])
        return heavy[:count]

    def _num_options(self, k: int, inner: list[int]) -> int:
        """Of a step, were all devices of these units tried."""
        return math.prod(int(self.allowed[u].sum()) for u in (self._unit_at(k), self._unit_at(k - 1), *inner))

    def _weigh(self, moment: Standing) -> Floats:
        """[units] shares of all time and of all bytes, together."""
        ticks = np.where(self.ticks < INFINITE, self.ticks, 0).max(axis=1).astype(np.float64)
        time = np.bincount(self.unit, ticks, self.num_units)
        size = np.bincount(moment.unit, moment.num_bytes, self.num_units)
        weight: Floats = time / max(time.sum(), 1.0) + size / max(size.sum(), 1.0)
        return weight

    def _find_units_beside(self, moment: Standing, taken: set[int]) -> dict[int, list[int]]:
        """By layer the weighty units that no step decides and whose forward op comes before that layer's."""
        weight, forward = self._weigh(moment), self.graph.phase == Phase.FORWARD
        found: dict[int, list[int]] = {}
        heavy = [u for u in np.flatnonzero(weight > _UNIMPORTANT_BESIDE).tolist() if u not in taken]
        for u in sorted(heavy, key=lambda u: (-weight[u], u))[:_MOST_BESIDE]:
            ops = [op for op in self.ops_of[u] if forward[op]]
            after = self.spine.after[max(ops, key=lambda op: int(self.ticks[op].min()))] if ops else 0
            k = next((k for k, op in enumerate(self.spine.forward) if after >> op & 1), 0)
            if k > 0:
                found.setdefault(k, []).append(u)
        return found

    def _stay(self, k: int, unit: int, num_bytes: int) -> Options:
        """Layer k stays where it is, and a unit beside the spine goes somewhere: its work and its bytes."""
        places, homes = np.flatnonzero(self.allowed[unit]), np.flatnonzero(self.allowed[self._unit_at(k)])
        home, place = (part.reshape(-1).astype(np.int32) for part in np.meshgrid(homes, places))
        work, rows = self._work_of(unit, k), np.arange(len(home))
        num_engines = int(self.engine.max()) + 1
        loads = np.zeros((len(home), 2 * num_engines), dtype=np.int64)
        loads[rows, self.engine[place]] = work[0, place]
        loads[rows, num_engines + self.engine[place]] = work[1, place]
        held = np.zeros((len(home), len(self.engine)), dtype=np.int64)
        held[rows, place] = num_bytes
        nothing = np.zeros(len(home), dtype=np.int64)
        return Options(home, home, nothing, nothing, loads, held, place[:, None])

    def _unit_at(self, k: int) -> int:
        return int(self.unit[self.spine.forward[k]])

    def _step(self, k: int, inner: list[int], held: Longs) -> Options:
        """From layer k to layer k - 1."""
        spine = self.spine
        slots = [self._unit_at(k - 1), self._unit_at(k), *inner]
        slot_of = {u: s for s, u in reversed(list(enumerate(slots)))}
        first, last = (spine.forward[k - 1], spine.forward[k]), (spine.backward[k], spine.backward[k - 1])
        rows: dict[int, int] = {}
        windows = tuple(self._window(*ends, slot_of, rows) for ends in (first, last))
        transfer = self.transfer[list(rows)] if rows else np.zeros((1, *self.transfer.shape[1:]), np.int64)
        work = np.zeros((len(slots), 2, len(self.engine)), dtype=np.int64)
        for s, u in enumerate(slots):
            if s != FROM_END:
                work[s] = self._work_of(u, k)
        whole = not inner or self._num_options(k, inner) <= self.most_options
        allowed, num_bytes = self.allowed[slots], held[slots]
        parts = (*windows[0].arrays, *windows[1].arrays, transfer, allowed, work, num_bytes)
        key = b"|".join(np.ascontiguousarray(part).tobytes() for part in parts)
        if key not in self.known:
            work = np.where(work >= INFINITE, 0, work)
            choices = list_choices(allowed, whole=whole)
            self.known[key] = list_options(
                (windows[0], windows[1]),
                transfer,
                choices,
                work,
                num_bytes,
                self.engine,
                self.ports,
                int(_TICKS) + 1,  # a plan with such a step is slower than the horizon
            )
        return self.known[key]

    def _work_of(self, unit: int, k: int) -> Longs:
        """[2, D] what a unit does after B_k ends, and that with what it does before m_k starts."""
        later, earlier = self.spine.after[self.spine.backward[k]], self.spine.before[self.spine.forward[k]]
        parts = [[op for op in self.ops_of[unit] if near >> op & 1] for near in (later, later | earlier)]
        found: Longs = np.minimum([self.ticks[ops].sum(axis=0) for ops in parts], INFINITE)
        return found

    def _window(self, first: int, last: int, slot_of: dict[int, int], rows: dict[int, int]) -> Window:
        """Ops between two ops; `rows` collects the tensors that matter."""
        ops = [first, *self.spine.between(first, last), last]
        place = {op: at for at, op in enumerate(ops)}
        edges: list[tuple[int, int, int, bool]] = []
        for at, op in enumerate(ops[1:], 1):
            for maker, t in self.inputs[op]:
                if maker in place:
                    tied = bool(self.unit[maker] == self.unit[op])
                    edges.append((place[maker], at, rows.setdefault(t, len(rows)), tied))
        source, target, tensor, both = zip(*edges, strict=True) if edges else ((), (), (), ())
        slot = [slot_of.get(int(self.unit[op]), -1) for op in ops]
        nets = self._list_nets(ops, place, slot)
        num = self.ticks.shape[1]
        return Window(
            np.array(slot, dtype=np.int32),
            self.ticks[ops],
            np.array(source, dtype=np.int32),
            np.array(target, dtype=np.int32),
            np.array(tensor, dtype=np.int32),
            np.array(both, dtype=np.bool_),
            np.array([source for source, _, _ in nets], dtype=np.int32),
            np.array([ticks for _, ticks, _ in nets], dtype=np.int64).reshape(-1, num, num),
            np.cumsum([0, *(len(ends) for _, _, ends in nets)]).astype(np.int32),
            np.array([op for _, _, ends in nets for op in ends], dtype=np.int32),
        )

    def _list_nets(
        self, ops: list[int], place: dict[int, int], slot: list[int]
    ) -> list[tuple[int, Longs, list[int]]]:
        """Outputs of decided ops: place, [D, D] least ticks to cross, and the decided ops that need it.

        An op without time, with one input and in no group, is looked through: its output may cross instead.
        """
        nets = []
        for at, op in enumerate(ops[:-1]):
            if slot[at] < 0:
                continue
            for t in self.outputs[op]:
                seen, ends, ticks = [t], set[int](), self.transfer[t]
                while seen:
                    tensor = seen.pop()
                    ticks = np.minimum(ticks, self.transfer[tensor])
                    for user in self.users[tensor]:
                        if user in place and slot[place[user]] >= 0:
                            ends.add(place[user])
                        elif user in place and self.is_view[user]:
                            seen += self.outputs[user]
                if ends:
                    nets.append((at, ticks, sorted(ends)))
        return nets

    def _first_layer(self) -> Longs:
        """[D] from the start of m_K to the end of B_K, all of one unit on a device."""
        forward, backward = self.spine.forward[-1], self.spine.backward[-1]
        slot_of, rows = {self._unit_at(-1): 0}, dict[int, int]()
        window = self._window(forward, backward, slot_of, rows)
        transfer = self.transfer[list(rows)]
        num = self.ticks.shape[1]
        found = np.full(num, INFINITE, dtype=np.int64)
        for d in np.flatnonzero(self.allowed[self._unit_at(-1)]).tolist():
            found[d] = _turn_ticks(window, transfer, d)
        return found

    def _work_from(self, op: int) -> Longs:
        """[D] of an op and the ops of its unit that come after it."""
        ops = [one for one in self.ops_of[int(self.unit[op])] if one == op or self.spine.after[op] >> one & 1]
        found: Longs = np.minimum(self.ticks[ops].sum(axis=0), INFINITE)
        return found


def _turn_ticks(window: Window, transfer: Longs, device: int) -> int:
    """From the start of a window's first op to the end of its last, both on one device."""
    num = window.ticks.shape[1]
    ends: list[list[int]] = []
    edges: list[list[tuple[int, int, bool]]] = [[] for _ in window.slot]
    for u, v, t, tied in zip(
        window.source.tolist(),
        window.target.tolist(),
        window.tensor.tolist(),
        window.tied.tolist(),
        strict=True,
    ):
        edges[v].append((u, t, tied))
    for op, slot in enumerate(window.slot.tolist()):
        row = []
        for d in range(num):
            came = 0
            for u, t, tied in edges[op]:
                least = ends[u][d] if tied else min(ends[u][h] + int(transfer[t, h, d]) for h in range(num))
                came = max(came, least)
            away = slot >= 0 and d != device
            row.append(INFINITE if away else min(came + int(window.ticks[op, d]), INFINITE))
        ends.append(row)
    return ends[-1][device]


def _find_ports(problem: Problem) -> Bools:
    """[2, D] whether what leaves, and what enters, a device does so one after the other."""
    cluster, num = problem.cluster, problem.cluster.num_devices
    if problem.links == Links.HALF_DUPLEX:
        return np.ones((2, num), dtype=np.bool_)
    found = np.zeros((2, num), dtype=np.bool_)
    if problem.links != Links.SHARED:
        return found
    for d in range(num):
        others = [x for x in range(num) if x != d]
        for way in range(2):
            routes = [cluster.route[d, x] if way == 0 else cluster.route[x, d] for x in others]
            shared = (
                set.intersection(*(set(route[route != NO_LINK].tolist()) for route in routes))
                if routes
                else set()
            )
            found[way, d] = len(shared) > 0
    return found


def _transfer_s(problem: Problem) -> Floats:
    """[T, D, D] seconds of every tensor between two devices when nothing else is under way."""
    table = pair_table(problem.cluster, problem.links)
    given, size = problem.costs.transfer_s, problem.graph.tensor_bytes.astype(np.float64)
    alone = table[None, :, :, 0] + size[:, None, None] * table[None, :, :, 1]
    seconds: Floats = np.where(given[:, None, None] >= 0, given[:, None, None] * table[None, :, :, 2], alone)
    for d in range(problem.cluster.num_devices):
        seconds[:, d, d] = 0.0
    return seconds

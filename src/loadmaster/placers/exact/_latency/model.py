"""The step as a constraint model: ops and transfers as intervals, in the simulator's own terms.

    x[u, d]    unit u is on device d (exactly one)         S_v, E_v   start and end of op v, in ticks
    x[u, d]  =>  E_v >= S_v + p[v, d]                      ops of one engine do not overlap
    away[t, d]: some user of tensor t is on d, its maker is not; then its copy is under way from TS to TE:
             TS >= E_maker;   x[maker, c] => TE >= TS + seconds(c, d);   x[v, d] => S_v >= TE for users v
             transfers that share a link (or a device's port) do not overlap
    memory: what a unit holds at the end; and, while it is small, every storage as an interval of a cumulative

Relaxed against the simulator, hence a bound: transfers on a link may run in any order (there: as booked), the
thread that issues ops is left out, a view does not prolong its base, an op may be longer than its time by
what rounding took off. A plan is optimal only if the simulator gives it the bound.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadmaster.core.graph import NO_STORAGE, held_bytes, home_bytes, units
from loadmaster.core.problem import Links, Problem, allowed_devices
from loadmaster.placers.exact._latency.symmetry import find_alike_devices
from loadmaster.placers.exact._latency.ticks import Ticks
from loadmaster.simulator.bounds.favourite_children import pair_table
from loadmaster.simulator.bounds.travel import compute_travel

MOST_MOVES = 30_000  # intervals of transfers on links; beyond, transfers do not wait for each other
_MOST_GRAINS = 2**21
MOST_STORAGES = 600  # intervals in memory; beyond, only the end of the step is looked at


@dataclass(slots=True, eq=False)
class Model:
    """A CP-SAT model and its variables."""

    cp: Any
    place: list[dict[int, Any]]  # by unit: literal of each device it may use
    start: list[Any]  # by op
    end: list[Any]
    step: Any
    sent: dict[tuple[int, int], tuple[Any, Any, Any]] = field(default_factory=dict)  # (tensor, device)
    relaxed: list[str] = field(default_factory=list)  # what was left out


class Builder:
    """Writes the model of a problem; `horizon` ticks are enough for some plan."""

    def __init__(self, cp_model: Any, problem: Problem, ticks: Ticks, horizon: int) -> None:
        self.problem, self.ticks, self.horizon = problem, ticks, horizon
        self.unit, self.num_units = units(problem.graph)
        self.allowed = allowed_devices(problem, self.unit, self.num_units)
        self.travel = compute_travel(problem)
        self.cp = cp_model.CpModel()
        self.model: Model

    def build(self) -> Model:
        """All of it."""
        self._places()
        self._ops()
        self._add_transfers()
        self._add_memory_limits()
        self._break_symmetry()
        self.cp.minimize(self.model.step)
        return self.model

    def _places(self) -> None:
        place: list[dict[int, Any]] = []
        for u in range(self.num_units):
            devices = np.flatnonzero(self.allowed[u]).tolist()
            literals = {d: self.cp.new_bool_var(f"x{u},{d}") for d in devices}
            self.cp.add_exactly_one(literals.values())
            place.append(literals)
        step = self.cp.new_int_var(0, self.horizon, "step")
        self.model = Model(self.cp, place, [], [], step)

    def _of(self, op: int) -> dict[int, Any]:
        return self.model.place[int(self.unit[op])]

    def _ops(self) -> None:
        cp, model, problem = self.cp, self.model, self.problem
        op_ticks = self.ticks.down(self.travel.op_s)
        head, tail = self.ticks.down(self.travel.head_s), self.ticks.down(self.travel.tail_s)
        lanes: dict[int, list[Any]] = {}
        load: dict[int, list[Any]] = {}
        for v in range(problem.graph.num_ops):
            start = cp.new_int_var(0, self.horizon, f"s{v}")
            size = cp.new_int_var(0, self.horizon, f"p{v}")
            end = cp.new_int_var(0, self.horizon, f"e{v}")
            model.start.append(start)
            model.end.append(end)
            cp.add(start + size == end)
            cp.add(size >= sum(int(op_ticks[v, d]) * x for d, x in self._of(v).items()))
            cp.add(start >= sum(int(head[v, d]) * x for d, x in self._of(v).items()))
            cp.add(model.step >= end + sum(int(tail[v, d]) * x for d, x in self._of(v).items()))
            for d, x in self._of(v).items():
                if self.travel.op_s[v, d] > 0:
                    engine = int(problem.cluster.engine[d])
                    lanes.setdefault(engine, []).append(
                        cp.new_optional_interval_var(start, size, end, x, f"o{v},{d}")
                    )
                    load.setdefault(engine, []).append(int(op_ticks[v, d]) * x)
        for engine, lane in lanes.items():
            cp.add_no_overlap(lane)
            cp.add(sum(load[engine]) <= model.step)

    def _add_transfers(self) -> None:
        """Copies of tensors: when they are under way, and what they occupy."""
        graph = self.problem.graph
        users: dict[int, list[int]] = {}
        for t, v in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            users.setdefault(t, []).append(v)
        num = self.problem.cluster.num_devices
        apart = {
            t: found
            for t, found in sorted(users.items())
            if any(self.unit[v] != self.unit[graph.tensor_op[t]] for v in found)
        }
        wait = len(apart) * num * (num - 1) <= MOST_MOVES and self.problem.links != Links.PARALLEL
        if not wait and self.problem.links != Links.PARALLEL:
            self.model.relaxed.append("transfers do not wait for each other")
        lanes: dict[int, list[Any]] = {}
        table = pair_table(self.problem.cluster, self.problem.links)
        for t, found in sorted(users.items()):
            maker = int(graph.tensor_op[t])
            for v in found:
                self.cp.add(self.model.start[v] >= self.model.end[maker])
            if t in apart:
                self._copies(t, maker, found, table, lanes if wait else None)
        for lane in lanes.values():
            self.cp.add_no_overlap(lane)

    def _copies(
        self, t: int, maker: int, users: list[int], table: Any, lanes: dict[int, list[Any]] | None
    ) -> None:
        cp, model = self.cp, self.model
        home = self._of(maker)
        for d in range(self.problem.cluster.num_devices):
            there = [v for v in users if d in self._of(v) and self.unit[v] != self.unit[maker]]
            if not there or (len(home) == 1 and d in home):
                continue
            away = cp.new_bool_var(f"a{t},{d}")
            begin, end = (cp.new_int_var(0, self.horizon, f"{name}{t},{d}") for name in "bf")
            size = cp.new_int_var(0, self.horizon, f"z{t},{d}")
            cp.add(begin + size == end)
            cp.add(begin >= model.end[maker])
            cp.add(model.step >= end).only_enforce_if(away)
            for v in dict.fromkeys(there):
                here = [self._of(v)[d], *([home[d].negated()] if d in home else [])]
                cp.add_bool_or([*(literal.negated() for literal in here), away])
                cp.add(model.start[v] >= end).only_enforce_if(here)
            sources = {c: x for c, x in home.items() if c != d}
            took = {c: self._seconds(t, table[c, d]) for c in sources}
            least = sum(self.ticks.one(took[c]) * x for c, x in sources.items())
            cp.add(size >= least).only_enforce_if(away)
            model.sent[t, d] = (away, begin, end)
            if lanes is not None:
                self._occupy(t, d, sources, (begin, size, end, away), lanes)

    def _seconds(self, t: int, pair: Any) -> float:
        given = float(self.problem.costs.transfer_s[t])
        latency_s, s_per_byte, hops = (float(value) for value in pair)
        return (
            given * hops if given >= 0 else latency_s + float(self.problem.graph.tensor_bytes[t]) * s_per_byte
        )

    def _occupy(
        self,
        t: int,
        d: int,
        sources: dict[int, Any],
        move: tuple[Any, Any, Any, Any],
        lanes: dict[int, list[Any]],
    ) -> None:
        """An interval on every link, or port, for each device the tensor may come from."""
        begin, size, end, away = move
        cluster = self.problem.cluster
        if self.problem.links == Links.HOST:
            return  # reads and writes at the ports wait for each other: left out
        for c, x in sources.items():
            both = self.cp.new_bool_var(f"m{t},{c},{d}")
            self.cp.add_bool_or([x.negated(), away.negated(), both])
            self.cp.add_implication(both, x)
            self.cp.add_implication(both, away)
            moves = self.cp.new_optional_interval_var(begin, size, end, both, f"i{t},{c},{d}")
            used = (c, d) if self.problem.links == Links.HALF_DUPLEX else cluster.route[c, d].tolist()
            for resource in {int(link) for link in used if link >= 0}:
                lanes.setdefault(resource, []).append(moves)

    def _add_memory_limits(self) -> None:
        graph, usable = self.problem.graph, self.problem.cluster.usable_bytes
        held = np.zeros(self.num_units, dtype=np.int64)
        np.add.at(held, self.unit, held_bytes(graph))
        resident = np.zeros(self.num_units, dtype=np.int64)
        np.add.at(resident, self.unit, graph.resident_bytes)
        made = int(graph.tensor_bytes.sum()) + int(graph.workspace_bytes.sum()) + int(held.sum())
        for d in range(len(usable)):
            room = int(usable[d])
            here = [(u, self.model.place[u][d]) for u in range(self.num_units) if d in self.model.place[u]]
            if int(held.sum()) > room:
                self.cp.add(sum(int(held[u]) * x for u, x in here if held[u]) <= room)
            if made <= room:
                continue
            if graph.num_tensors > MOST_STORAGES:
                if "memory is looked at when the step ends only" not in self.model.relaxed:
                    self.model.relaxed.append("memory is looked at when the step ends only")
                continue
            stands = [(int(resident[u]), x) for u, x in here if resident[u]]
            self._storages(d, room, stands)

    def _storages(self, d: int, room: int, resident: list[tuple[int, Any]]) -> None:
        """Every storage on a device as an interval from its start to the last end that needs it."""
        graph, cp, model = self.problem.graph, self.cp, self.model
        spans: list[Any] = []
        sizes: list[int] = []

        def stand(
            first: Any, lasts: list[tuple[Any, list[Any]]], present: Any, num_bytes: int, keep: bool
        ) -> None:
            last = cp.new_int_var(0, self.horizon, f"l{len(spans)},{d}")
            length = cp.new_int_var(0, self.horizon, f"n{len(spans)},{d}")
            for moment, literals in lasts:
                cp.add(last >= moment).only_enforce_if(literals)
            if keep:
                cp.add(last == model.step)
            cp.add(last >= first).only_enforce_if(present)
            spans.append(cp.new_optional_interval_var(first, length, last, present, f"h{len(spans)},{d}"))
            sizes.append(num_bytes)

        home_size, users = home_bytes(graph), self._users()
        for t in range(graph.num_tensors):
            maker = int(graph.tensor_op[t])
            x, end = self._of(maker).get(d), model.end[maker]
            if x is not None and home_size[t] > 0:
                lasts = [(model.end[v], [x, self._of(v)[d]]) for v in users[t] if d in self._of(v)]
                lasts += [(model.sent[t, c][2], [x, model.sent[t, c][0]]) for c in self._targets(t, d)]
                stand(model.start[maker], [(end, [x]), *lasts], x, int(home_size[t]), bool(graph.keep[t]))
            if (t, d) in model.sent and graph.tensor_storage[t] != NO_STORAGE and graph.tensor_bytes[t] > 0:
                away, begin, arrived = model.sent[t, d]
                lasts = [(model.end[v], [away, self._of(v)[d]]) for v in users[t] if d in self._of(v)]
                stand(
                    begin, [(arrived, [away]), *lasts], away, int(graph.tensor_bytes[t]), bool(graph.keep[t])
                )
        for v in np.flatnonzero(graph.workspace_bytes).tolist():
            if d in self._of(v):
                stand(
                    model.start[v],
                    [(model.end[v], [self._of(v)[d]])],
                    self._of(v)[d],
                    int(graph.workspace_bytes[v]),
                    False,
                )
        grain = _byte_unit([*sizes, *(size for size, _ in resident)])
        free = cp.new_int_var(0, room // grain, f"free{d}")
        cp.add(free + sum(size // grain * x for size, x in resident) <= room // grain)
        cp.add_cumulative(spans, [size // grain for size in sizes], free)

    def _users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in range(self.problem.graph.num_tensors)]
        for t, v in zip(
            self.problem.graph.use_tensor.tolist(), self.problem.graph.use_op.tolist(), strict=True
        ):
            users[t].append(v)
        return users

    def _targets(self, t: int, d: int) -> list[int]:
        host = self.problem.links == Links.HOST  # then one write serves all, and is over sooner
        devices = range(self.problem.cluster.num_devices)
        return [] if host else [c for c in devices if c != d and (t, c) in self.model.sent]

    def _break_symmetry(self) -> None:
        """Of devices alike a later one is used only by a unit after the first unit of the one before it."""
        seconds = np.bincount(self.unit, self.travel.op_s.min(axis=1), self.num_units)
        order = np.argsort(-seconds, kind="stable").tolist()
        for devices in find_alike_devices(self.problem):
            for before, after in itertools.pairwise(devices):
                earlier: list[Any] = []
                for u in order:
                    self.cp.add(self.model.place[u].get(after, 0) <= sum(earlier))
                    if before in self.model.place[u]:
                        earlier.append(self.model.place[u][before])


def _byte_unit(sizes: list[int]) -> int:
    """Bytes to count in, so that bytes times ticks stay whole numbers of a computer.

    What divides all sizes if that is enough: then nothing is lost. Else sizes are rounded down, and the room
    is too: sums that fit still fit.
    """
    grain = max(math.gcd(*sizes), 1) if sizes else 1
    while sum(sizes) // grain > _MOST_GRAINS:
        grain *= 2
    return grain

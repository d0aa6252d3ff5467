"""The published latency model, for comparison: an accelerator runs its ops in pieces, each in one go.

Tarnawski et al., NeurIPS 2020, problem L: an accelerator holds at most q pieces, run in a fixed order. A
piece starts when all its outside inputs exist, reads them, computes, writes what others need, and only then
are all its outputs there. An op on a CPU runs on a core of its own when its inputs exist. Read and write take
the tensor's transfer time. Neither the overlap of transfers with work nor the number of cores is modelled, so
the values are not those of our simulator, in either direction.

    in[t, j], out[t, j]: tensor t is read, written by piece j    finish_j = start_j + compute + reads + writes
    read => start_j >= lat_maker     op in piece j => lat >= finish_j     op on a CPU => lat >= lat_inputs + q
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import ProblemError
from loadmaster.core.graph import edges, units
from loadmaster.core.problem import Links, Problem
from loadmaster.core.run import Budget
from loadmaster.graph.measures import longest_path
from loadmaster.placers.exact._latency.solver import make_solver, require_solver
from loadmaster.placers.exact._latency.ticks import Ticks, choose_ticks

CPU = -1  # the piece of an op that runs on a CPU


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """An answer of the published model."""

    latency_s: float
    bound_s: float
    piece: Ints  # [N] piece of each op, accelerator after accelerator, or CPU


def best_pieces(problem: Problem, budget: Budget, *, per_device: int = 1) -> Pieces:
    """The least latency CP-SAT finds in the published model, and what it proves."""
    _require_host(problem)
    cp_model = require_solver("the latency model of pieces")
    accelerators = np.flatnonzero(~problem.cluster.on_host[problem.cluster.kind]).astype(np.int32)
    first = _first_placement(problem, accelerators, per_device)
    horizon_s = pieces_latency_s(problem, first)
    model = _Model(cp_model, problem, accelerators, per_device, horizon_s)
    model.build(first)
    solver = make_solver(cp_model, budget)
    status = solver.solve(model.cp)
    bound_s = model.ticks.seconds(solver.best_objective_bound) if status != cp_model.UNKNOWN else 0.0
    piece = first
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        mine = model.read(solver)
        piece = mine if pieces_latency_s(problem, mine) < horizon_s else first
    return Pieces(pieces_latency_s(problem, piece), max(bound_s, 0.0), piece)


def pieces_latency_s(problem: Problem, piece: Ints) -> float:
    """The latency of a placement in pieces; infinite where pieces wait for each other in a circle."""
    graph, kind = problem.graph, _find_kinds(problem)
    num = int(piece.max(initial=CPU)) + 1
    node = np.where(piece == CPU, num + np.arange(graph.num_ops), piece)  # an op on a CPU is alone
    seconds = np.zeros(num + graph.num_ops)
    np.add.at(
        seconds, node, problem.costs.compute_s[np.arange(graph.num_ops), kind[(piece == CPU).astype(int)]]
    )
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    apart = node[maker] != node[user]
    moved = {(int(t), int(p)) for t, p in zip(graph.use_tensor[apart], node[user][apart], strict=True)}
    moved |= {(int(t), int(node[graph.tensor_op[t]])) for t in np.unique(graph.use_tensor[apart])}
    for t, p in moved:
        if p < num:
            seconds[p] += problem.costs.transfer_s[t]
    before: dict[int, set[int]] = {}
    for a, b in zip(node[maker][apart].tolist(), node[user][apart].tolist(), strict=True):
        before.setdefault(b, set()).add(a)
    return _finish_s(before, seconds, set(node.tolist()))


def _finish_s(before: dict[int, set[int]], seconds: Any, nodes: set[int]) -> float:
    """The last finish when every node starts as its last input is there (Kahn's algorithm)."""
    after: dict[int, list[int]] = {}
    waiting = {node: len(before.get(node, ())) for node in nodes}
    for node, inputs in before.items():
        for source in inputs:
            after.setdefault(source, []).append(node)
    start = dict.fromkeys(nodes, 0.0)
    ready, last, done = [node for node in nodes if waiting[node] == 0], 0.0, 0
    while ready:
        node = ready.pop()
        finish, done = start[node] + float(seconds[node]), done + 1
        last = max(last, finish)
        for follower in after.get(node, ()):
            start[follower] = max(start[follower], finish)
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return last if done == len(nodes) else float("inf")


def _require_host(problem: Problem) -> None:
    """The model speaks of equal accelerators around host memory."""
    cluster = problem.cluster
    away = cluster.kind[~cluster.on_host[cluster.kind]]
    if problem.links != Links.HOST or len(away) == 0 or len(away) == cluster.num_devices:
        raise ProblemError(
            "the latency model of pieces needs links 'host', accelerators and a host-side device"
        )
    if len(np.unique(away)) > 1 or (problem.costs.transfer_s < 0).any():
        raise ProblemError(
            "the latency model of pieces needs accelerators of one kind and given transfer times"
        )


def _find_kinds(problem: Problem) -> Ints:
    """The kind of the accelerators, then that of the CPUs."""
    cluster = problem.cluster
    on_host = cluster.on_host[cluster.kind]
    return np.array([cluster.kind[~on_host][0], cluster.kind[on_host][0]])


def _first_placement(problem: Problem, accelerators: Ints, per_device: int) -> Ints:
    """Everything on CPUs, or accelerators filled in topological order, whatever is faster."""
    graph, kind = problem.graph, _find_kinds(problem)
    unit, num_units = units(graph)
    size = np.bincount(unit, graph.resident_bytes, num_units)
    runs = np.ones(num_units, dtype=np.bool_)
    np.logical_and.at(runs, unit, np.isfinite(problem.costs.compute_s[:, kind[0]]))
    best = np.full(graph.num_ops, CPU, dtype=np.int32)
    filled, at, used = np.full(num_units, CPU, dtype=np.int32), 0, 0.0
    for u in range(num_units):
        if not runs[u]:
            continue
        while at < len(accelerators) and used + size[u] > problem.cluster.usable_bytes[accelerators[at]]:
            at, used = at + 1, 0.0
        if at == len(accelerators):
            break
        filled[u], used = at * per_device, used + float(size[u])
    greedy: Ints = filled[unit]
    return min((best, greedy), key=lambda piece: pieces_latency_s(problem, piece))


class _Model:
    """Writes the constraint model; a piece is (accelerator, number)."""

    def __init__(
        self, cp_model: Any, problem: Problem, accelerators: Ints, per_device: int, horizon_s: float
    ) -> None:
        self.problem, self.accelerators, self.per_device = problem, accelerators, per_device
        self.unit, self.num_units = units(problem.graph)
        self.num_pieces = len(accelerators) * per_device
        kind = _find_kinds(problem)
        self.on = problem.costs.compute_s[:, kind[0]]
        self.off = problem.costs.compute_s[:, kind[1]]
        known = np.concatenate([self.on, self.off, problem.costs.transfer_s])
        self.ticks: Ticks = choose_ticks(known, horizon_s)
        self.horizon = self.ticks.one(horizon_s) + problem.graph.num_ops + 1
        self.cp = cp_model.CpModel()
        # One variable for every unit where an accelerator has one piece, else for every op.
        self.key = self.unit if per_device == 1 else np.arange(problem.graph.num_ops, dtype=np.int32)

    def build(self, first: Ints) -> None:
        """All rows, and the first placement as a hint."""
        cp, num = self.cp, self.num_pieces
        keys = range(int(self.key.max()) + 1)
        self.x = [[cp.new_bool_var(f"x{k},{j}") for j in range(num + 1)] for k in keys]  # the last: CPU
        step = cp.new_int_var(0, self.horizon, "latency")
        self.latency = [cp.new_int_var(0, self.horizon, f"l{v}") for v in range(len(self.key))]
        for k in keys:
            cp.add_exactly_one(self.x[k])
        self._units()
        self._add_path_rows(step)
        finish = [self._add_piece_rows(j) for j in range(num)]
        for j in range(num):
            if j % self.per_device:
                cp.add(finish[j][0] >= finish[j - 1][1])
        self._add_memory_limits()
        self._break_symmetry()
        for v, k in enumerate(self.key.tolist()):
            for j in range(num + 1):
                if v == int(np.flatnonzero(self.key == k)[0]):
                    cp.add_hint(self.x[k][j], bool(j == (first[v] if first[v] != CPU else num)))
        cp.minimize(step)

    def _at(self, v: int, j: int) -> Any:
        return self.x[int(self.key[v])][j]

    def _units(self) -> None:
        """Ops of a unit share the accelerator, and ops that an accelerator cannot run stay on CPUs."""
        num = self.num_pieces
        for v in range(len(self.key)):
            if not np.isfinite(self.on[v]):
                self.cp.add_bool_and([self._at(v, num)])
        if self.per_device == 1:
            return
        for u in range(self.num_units):
            first, *rest = np.flatnonzero(self.unit == u).tolist()
            for v in rest:
                for a in range(len(self.accelerators)):
                    mine = range(a * self.per_device, (a + 1) * self.per_device)
                    self.cp.add(sum(self._at(v, j) for j in mine) == sum(self._at(first, j) for j in mine))

    def _add_path_rows(self, step: Any) -> None:
        """Latencies along edges, from below by the fastest times, and on CPUs."""
        graph, cpu = self.problem.graph, self.num_pieces
        fastest = np.minimum(self.on, self.off)
        head = self.ticks.down(longest_path(graph, fastest))
        own = self.ticks.down(self.off)
        for v in range(graph.num_ops):
            self.cp.add(self.latency[v] >= int(head[v]))
            self.cp.add(self.latency[v] >= int(own[v]) * self._at(v, cpu))
            self.cp.add(step >= self.latency[v])
        for u, v in zip(*map(np.ndarray.tolist, edges(graph)), strict=True):
            self.cp.add(self.latency[v] >= self.latency[u] + int(own[v]) * self._at(v, cpu))

    def _add_piece_rows(self, j: int) -> tuple[Any, Any]:
        """Start and finish of a piece: what it reads, computes and writes."""
        graph, cp = self.problem.graph, self.cp
        start, finish = (cp.new_int_var(0, self.horizon, f"{name}{j}") for name in ("s", "f"))
        took = self.ticks.down(self.on)
        load = [int(took[v]) * self._at(v, j) for v in range(graph.num_ops) if took[v]]
        users: dict[int, set[int]] = {}
        for t, v in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            users.setdefault(t, set()).add(v)
        move = self.ticks.down(self.problem.costs.transfer_s)
        for t, found in users.items():
            maker = int(graph.tensor_op[t])
            others = [v for v in sorted(found) if self.key[v] != self.key[maker]]
            if not others:
                continue
            read, write = cp.new_bool_var(f"i{t},{j}"), cp.new_bool_var(f"o{t},{j}")
            for v in others:
                cp.add_bool_or([self._at(v, j).negated(), self._at(maker, j), read])
                cp.add_bool_or([self._at(maker, j).negated(), self._at(v, j), write])
            cp.add(start >= self.latency[maker]).only_enforce_if(read)
            load.append(int(move[t]) * (read + write))
        cp.add(finish >= start + sum(load))
        for v in range(graph.num_ops):
            cp.add(self.latency[v] >= finish).only_enforce_if(self._at(v, j))
        return start, finish

    def _add_memory_limits(self) -> None:
        size = self.problem.graph.resident_bytes
        for a, device in enumerate(self.accelerators.tolist()):
            mine = range(a * self.per_device, (a + 1) * self.per_device)
            held = [int(size[v]) * self._at(v, j) for v in np.flatnonzero(size).tolist() for j in mine]
            self.cp.add(sum(held) <= int(self.problem.cluster.usable_bytes[device]))

    def _break_symmetry(self) -> None:
        """Of equal accelerators a later one is used only after the one before it."""
        if self.per_device > 1 or len(np.unique(self.problem.cluster.usable_bytes[self.accelerators])) > 1:
            return
        seconds = np.bincount(self.unit, np.where(np.isfinite(self.on), self.on, 0.0), self.num_units)
        for j in range(1, self.num_pieces):
            earlier: list[Any] = []
            for u in np.argsort(-seconds, kind="stable").tolist():
                self.cp.add(self.x[u][j] <= sum(earlier))
                earlier.append(self.x[u][j - 1])

    def read(self, solver: Any) -> Ints:
        """[N] the piece of each op in the solution."""
        chosen = [next(j for j, x in enumerate(row) if solver.boolean_value(x)) for row in self.x]
        piece = np.array(chosen, dtype=np.int32)[self.key]
        return np.where(piece == self.num_pieces, CPU, piece).astype(np.int32)

"""Max-load as a constraint programme: is there a split with all loads within a limit?

Two forms (exact.md section 6). *Free*: a boolean for every class and device, one for every net and device
that says whether the net is paid there; alike devices are told apart by the first class each holds, classes
in order of falling time. *Chain*: order booleans "class i stands after stage s", which fall along s and rise
along the order, and a type for every stage: written apart from the dynamic programme, it is its witness.

Times become integers, rounded down, so that a split within the limit is never lost: "no" is a proof. With
2^40 units to the limit rounding is below 1e-9 of it. A "yes" is believed when its loads are counted.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.problem import Load
from loadmaster.placers.exact._latency.solver import require_solver
from loadmaster.placers.exact._maxload.climb import kind_of_device
from loadmaster.placers.exact._maxload.model import MaxLoad

_UNITS = 2.0**40  # of the limit
_ROOM_UNITS = 2**30  # of all bytes
_MEMORY_MB = 2048  # what the solver may take
MOST_BOOLEANS = 200_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one question may take: seconds, or the solver's own deterministic time."""

    seconds: float | None = None
    steps: float | None = None
    workers: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A device for every class, or the proof that there is none, or neither."""

    device: Ints | None
    refuted: bool


def num_booleans(model: MaxLoad) -> int:
    """Size of the programme."""
    devices = int(model.count.sum())
    return (model.num_classes + model.nets.num) * devices


def decide_limit(
    model: MaxLoad, limit_s: float, effort: Effort, *, chain: bool, hint: Ints | None = None
) -> Reply:
    """Whether a split has all loads within a limit, as far as the effort goes."""
    cp_model = require_solver("cpsat_throughput")
    form: _Free | _Chain = (_Chain if chain else _Free)(cp_model, model, limit_s)
    if hint is not None:
        form.hint(hint)
    engine = cp_model.CpSolver()
    engine.parameters.num_workers = 1 if effort.steps is not None else effort.workers
    engine.parameters.max_memory_in_mb = _MEMORY_MB
    if effort.steps is not None:
        engine.parameters.max_deterministic_time = effort.steps
    if effort.seconds is not None:
        engine.parameters.max_time_in_seconds = effort.seconds
    status = engine.solve(form.programme)
    if status == cp_model.INFEASIBLE:
        return Reply(None, True)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Reply(None, False)
    return Reply(form.read(engine), False)


class _Free:
    """Any device for any class."""

    def __init__(self, cp_model: Any, model: MaxLoad, limit_s: float) -> None:
        self.model, self.programme = model, cp_model.CpModel()
        self.kind = kind_of_device(model)
        self.scale = _UNITS / max(limit_s, 1e-300)
        self.most = int(limit_s * self.scale)
        add, num, devices = self.programme, model.num_classes, len(self.kind)
        self.on = [[add.new_bool_var("") for _ in range(devices)] for _ in range(num)]
        for i in range(num):
            add.add_exactly_one(self.on[i])
            for d in np.flatnonzero(~np.isfinite(model.seconds[i, self.kind])).tolist():
                add.add(self.on[i][d] == 0)
        for d in range(devices):
            _add_limits(
                self.programme, self.model, self._column(d), int(self.kind[d]), self.scale, self.most, []
            )
        self.rank = _order_by_time(model)
        for alike in model.devices:
            self._break_symmetry(alike)

    def _column(self, d: int) -> list[Any]:
        return [row[d] for row in self.on]

    def _break_symmetry(self, alike: tuple[int, ...]) -> None:
        """A device may hold a class only if the one before it holds a class that comes earlier."""
        add = self.programme
        for before, d in itertools.pairwise(alike):
            seen = None  # whether `before` holds any class so far
            for i in self.rank:
                if seen is None:
                    add.add(self.on[i][d] == 0)
                else:
                    add.add_implication(self.on[i][d], seen)
                now = add.new_bool_var("")
                given = [self.on[i][before]] + ([seen] if seen is not None else [])
                add.add_bool_or([now.negated(), *given])
                for one in given:
                    add.add_implication(one, now)
                seen = now

    def hint(self, device: Ints) -> None:
        """Start from an assignment, alike devices renamed to be told apart."""
        first: dict[int, int] = {}
        for i in self.rank:
            first.setdefault(int(device[i]), len(first))
        name: dict[int, int] = {}
        for alike in self.model.devices:
            used = sorted((d for d in alike if d in first), key=first.__getitem__)
            name.update(zip(used, alike, strict=False))
        for i, row in enumerate(self.on):
            for d, variable in enumerate(row):
                self.programme.add_hint(variable, name[int(device[i])] == d)

    def read(self, engine: Any) -> Ints:
        """[C] devices."""
        rows = [[bool(engine.value(v)) for v in row] for row in self.on]
        device: Ints = np.array(rows).argmax(axis=1).astype(np.int32)
        return device


class _Chain:
    """Stages in a row; every stage has a type, every type as many stages as devices."""

    def __init__(self, cp_model: Any, model: MaxLoad, limit_s: float) -> None:
        self.model, self.programme = model, cp_model.CpModel()
        self.scale = _UNITS / max(limit_s, 1e-300)
        most, add = int(limit_s * self.scale), self.programme
        num, stages, types = model.num_classes, int(model.count.sum()), model.num_types
        self.after = [[add.new_bool_var("") for _ in range(stages - 1)] for _ in range(num)]
        self.on = [[add.new_bool_var("") for _ in range(stages)] for _ in range(num)]
        self.is_kind = [[add.new_bool_var("") for _ in range(types)] for _ in range(stages)]
        for row, on in zip(self.after, self.on, strict=True):
            for one, other in itertools.pairwise(row):
                add.add_implication(other, one)
            for s in range(stages):
                begins = row[s - 1] if s else 1
                ends = row[s] if s < stages - 1 else 0
                add.add(on[s] == begins - ends)
        for i, j in zip(model.source.tolist(), model.target.tolist(), strict=True):
            for one, other in zip(self.after[i], self.after[j], strict=True):
                add.add_implication(one, other)
        for kinds in self.is_kind:
            add.add_exactly_one(kinds)
        for t, alike in enumerate(model.devices):
            add.add(sum(kinds[t] for kinds in self.is_kind) == len(alike))
        for s in range(stages):
            column = [row[s] for row in self.on]
            for t in range(types):
                here = self.is_kind[s][t]
                for i in np.flatnonzero(~np.isfinite(model.seconds[:, t])).tolist():
                    add.add_bool_or([column[i].negated(), here.negated()])
                _add_limits(add, model, column, t, self.scale, most, [here])

    def hint(self, device: Ints) -> None:
        """Nothing: a chain is hinted by its limit."""

    def read(self, engine: Any) -> Ints:
        """[C] devices: those of a type in order."""
        pools = [list(alike) for alike in self.model.devices]
        taken = []
        for kinds in self.is_kind:
            t = [bool(engine.value(v)) for v in kinds].index(True)
            taken.append(pools[t].pop(0))
        stage = np.array([[bool(engine.value(v)) for v in row] for row in self.on]).argmax(axis=1)
        device: Ints = np.array(taken, dtype=np.int32)[stage]
        return device


def _order_by_time(model: MaxLoad) -> list[int]:
    longest = np.where(np.isfinite(model.seconds), model.seconds, 0.0).max(axis=1)
    order: list[int] = np.argsort(-longest, kind="stable").tolist()
    return order


def _add_limits(
    add: Any, model: MaxLoad, column: list[Any], kind: int, scale: float, most: int, only_if: list[Any]
) -> None:
    """Load and memory of the set `column` on a device of a type, where `only_if` holds."""
    nets, total = model.nets, int(model.num_bytes.sum())
    if model.room[kind] < total:
        unit = max(total // _ROOM_UNITS, 1)
        sizes = [int(size) // unit for size in model.num_bytes]
        held = sum(size * v for size, v in zip(sizes, column, strict=True) if size)
        _add_limit(add, held, int(model.room[kind]) // unit, only_if)
    whole = [int(s * scale) if np.isfinite(s) else 0 for s in model.seconds[:, kind].tolist()]
    compute = sum(s * v for s, v in zip(whole, column, strict=True) if s)
    reads, writes = [], []
    for e in range(nets.num):
        read, write = int(nets.read_s[kind, e] * scale), int(nets.write_s[kind, e] * scale)
        if max(read, write) == 0:
            continue
        home, users = column[nets.home[e]], [column[u] for u in nets.user[nets.ptr[e] : nets.ptr[e + 1]]]
        read_here = add.new_bool_var("")
        write_here = read_here if read == write and model.load != Load.MAX3 else add.new_bool_var("")
        for user in users:
            add.add_bool_or([user.negated(), home, read_here])
            add.add_bool_or([home.negated(), user, write_here])
        reads.append(read * read_here)
        if write_here is not read_here:
            writes.append(write * write_here)
    if model.load == Load.SUM:
        rows = [compute + sum(reads) + sum(writes)]
    else:
        rows = [
            compute,
            *([sum(reads) + sum(writes)] if model.load == Load.MAX2 else [sum(reads), sum(writes)]),
        ]
    for row in rows:
        _add_limit(add, row, most, only_if)


def _add_limit(add: Any, amount: Any, most: int, only_if: list[Any]) -> None:
    if isinstance(amount, int):
        return  # nothing can be there
    row = add.add(amount <= most)
    if only_if:
        row.only_enforce_if(only_if)

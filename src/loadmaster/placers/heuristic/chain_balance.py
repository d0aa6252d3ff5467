"""Cuts the forward order into contiguous blocks of equal time, one per device.

What people do by hand (and what pipeline tools call "balance by time"), done for unequal devices, in op
order and, where the split is free and modules take turns (the layers of an unrolled recurrent network),
module by module: for each order of the devices and each number of them, the least time T is found by
bisection such that filling device after device, each up to T seconds and its memory, covers all units.
Where a device's load counts its transfers through host memory, so does T. Backward ops and updates ride
with their groups. O(D log U) a probe, with transfers O(D U); at most 32 candidates simulated.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import Builder, best_repaired
from loadmaster.placers.heuristic._nets import Nets, nets_of
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.placers.registry import Placer

_PROBES = 40
_MOST_WORK = 10_000_000  # units x devices x candidates


@dataclass(frozen=True, slots=True)
class ChainBalance:
    """`max_candidates` device orders and lengths are tried."""

    max_candidates: int = 32
    pipelines: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Try device orders, the natural one over all devices first."""
        if problem.pipeline:
            from loadmaster.placers.pipeline import Effort, find_pipeline  # a step needs none of it

            return find_pipeline(problem, run, Effort(orders=1, rounds=0), algorithm="chain_balance")
        cargo = load_cargo(problem, acyclic=True)
        nets = nets_of(problem, cargo.of_op)
        strict = problem.objective == Objective.THROUGHPUT and problem.split != Split.FREE
        most = max(2, min(self.max_candidates, _MOST_WORK // (cargo.num_units * problem.cluster.num_devices)))
        orders = list(itertools.islice(device_orders(problem), most))
        lines = [_make_line(cargo, nets, order, strict=strict) for order in orders]
        cuts: list[Builder] = [line.cut for line in lines]
        row = order_by_module(problem, cargo)
        if problem.objective == Objective.STEP and (np.diff(row) < 0).any():
            cuts += [
                _cut_reordered(_make_line(_reorder_cargo(cargo, row), None, order, strict=False), row)
                for order in orders
            ]
        return best_repaired(problem, run, cargo, cuts, algorithm="chain_balance")


def order_by_module(problem: Problem, cargo: Cargo) -> Ints:
    """[U] units module by module, modules in the order of their first units."""
    first = np.full(cargo.num_units, problem.graph.num_ops, dtype=np.int64)
    np.minimum.at(first, cargo.of_op, np.arange(problem.graph.num_ops))
    seen: dict[str, int] = {}
    module = [seen.setdefault(problem.graph.module[op], len(seen)) for op in first.tolist()]
    return np.argsort(module, kind="stable").astype(np.int32)


def _reorder_cargo(cargo: Cargo, row: Ints) -> Cargo:
    """The cargo with its units in another row."""
    place = np.empty(len(row), dtype=np.int32)
    place[row] = np.arange(len(row), dtype=np.int32)
    return Cargo(
        of_op=place[cargo.of_op],
        seconds=cargo.seconds[row],
        held_bytes=cargo.held_bytes[row],
        made_bytes=cargo.made_bytes[row],
        fits=cargo.fits[row],
    )


def _cut_reordered(line: "_Line", row: Ints) -> Builder:
    """The line's cut, with bytes and devices of units in their own order."""

    def cut(unit_bytes: Floats, room: Floats) -> Ints:
        device = np.empty(len(row), dtype=np.int32)
        device[row] = line.cut(unit_bytes[row], room)
        return device

    return cut


def device_orders(problem: Problem) -> Iterable[tuple[int, ...]]:
    """Orders of devices to fill, most promising first; alike devices are not permuted among themselves."""
    cluster = problem.cluster
    num = cluster.num_devices
    total = problem.device_compute_s
    speed = np.where(np.isfinite(total), total, 0.0).sum(axis=0)
    natural = tuple(range(num))
    fast = tuple(np.argsort(speed, kind="stable").tolist())
    large = tuple(np.argsort(-cluster.usable_bytes, kind="stable").tolist())
    whole: list[tuple[int, ...]] = [natural, fast, large, fast[::-1], natural[::-1]]
    if num <= 4:
        whole += list(itertools.permutations(range(num)))
    alike = [
        (int(k), int(m), int(h))
        for k, m, h in zip(cluster.kind, cluster.usable_bytes, cluster.host, strict=True)
    ]
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    for length in sorted(range(1, num + 1), key=lambda n: (n != num, n)):
        for order in whole:
            look = tuple(alike[d] for d in order[:length])
            if look not in seen:
                seen.add(look)
                yield order[:length]


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """The units in a row, to be cut into a block for each device of `order`."""

    cargo: Cargo
    nets: Nets | None
    order: tuple[int, ...]
    aside: Bools  # [U] not in the row: some device of the order cannot run them
    seconds: Floats  # [U + 1, D] of the first u units, those aside or barred not counted
    barred: tuple[Longs, ...]  # D lists of units in the row that a device cannot run

    def cut(self, unit_bytes: Floats, room: Floats) -> Ints:
        """[U] devices: the fill with the least T that covers all units, or the fill without limit."""
        device: Ints = self.cargo.seconds.argmin(axis=1).astype(np.int32)  # of those aside: the fastest
        room = room - np.bincount(device[self.aside], unit_bytes[self.aside], len(room))
        taken = np.concatenate([[0.0], np.cumsum(np.where(self.aside, 0.0, unit_bytes))])
        ends = self._find_least_fill(taken, room)
        begin = 0
        for d, end in zip(self.order, ends, strict=True):
            device[begin:end] = np.where(self.aside[begin:end], device[begin:end], d)
            begin = end
        rest = np.flatnonzero(~self.aside[begin:]) + begin  # nothing has room: where there is most
        device[rest] = np.where(self.cargo.fits[rest], room, -np.inf).argmax(axis=1)
        return device

    def _find_least_fill(self, taken: Floats, room: Floats) -> list[int]:
        num = self.cargo.num_units
        ends = self._fill(taken, room, np.inf)
        if ends[-1] < num:
            return ends
        low, high = 0.0, self._upper_limit_s()
        for _ in range(_PROBES):
            middle = (low + high) / 2
            tried = self._fill(taken, room, middle)
            if tried[-1] == num:
                high, ends = middle, tried
            else:
                low = middle
        return ends

    def _upper_limit_s(self) -> float:
        """More than any block's load."""
        transfers = (
            0.0 if self.nets is None else float((self.nets.read_s + self.nets.write_s).max(axis=0).sum())
        )
        return (float(self.seconds[-1].max()) + transfers) * (1.0 + 1e-9)

    def _fill(self, taken: Floats, room: Floats, limit_s: float) -> list[int]:
        """Where each device's block ends when filled up to `limit_s`, its room, or a unit it cannot run."""
        ends, begin = [], 0
        for d in self.order:
            seconds = self.seconds[:, d]
            by_bytes = int(np.searchsorted(taken, taken[begin] + room[d], side="right")) - 1
            by_time = int(np.searchsorted(seconds, seconds[begin] + limit_s, side="right")) - 1
            barred = self.barred[d]
            at = int(np.searchsorted(barred, begin))
            by_support = int(barred[at]) if at < len(barred) else self.cargo.num_units
            end = max(begin, min(by_bytes, by_support, by_time))
            if self.nets is not None and end > begin:
                loads = self.nets.loads_s(d, begin, seconds[begin : end + 1] - seconds[begin])
                end = begin + int(np.flatnonzero(loads <= limit_s)[-1])  # the empty block loads nothing
            begin = end
            ends.append(begin)
        return ends


def _make_line(cargo: Cargo, nets: Nets | None, order: tuple[int, ...], *, strict: bool) -> _Line:
    """`strict`: every unit stays in the row, so that the split is a chain."""
    aside: Bools = np.logical_not(cargo.fits[:, list(order)].all(axis=1) | strict)
    counted = np.where(aside[:, None] | ~cargo.fits, 0.0, cargo.seconds)
    seconds = np.concatenate([np.zeros((1, counted.shape[1])), np.cumsum(counted, axis=0)])
    barred = tuple(np.flatnonzero(~(cargo.fits[:, d] | aside)) for d in range(counted.shape[1]))
    return _Line(cargo, nets, order, aside, seconds, barred)


PLACER: type[Placer] = ChainBalance

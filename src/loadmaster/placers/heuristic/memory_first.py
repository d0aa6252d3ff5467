"""Contiguous blocks and best fit by decreasing bytes, moved until they fit.

For memory that is nearly full. Blocks are cut where little is copied, along several orders of the units
(forward, depth first, by level, by module) and of the devices; those nearest to fitting are repaired
(`placers/repair.py`): annealed over standing memory, simulated, annealed again with less room where a peak
is higher than the model says. It stops when a few plans fit. O(U log U) a start and O(degree) a try, at most
some millions of them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from loadmaster.core.arrays import Ints, Longs, offsets
from loadmaster.core.graph import edges
from loadmaster.core.placement import Placement
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Run
from loadmaster.graph.measures import levels
from loadmaster.placers.answer import Tally
from loadmaster.placers.heuristic._packing import best_fit, order_depth_first
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.placers.registry import Placer
from loadmaster.placers.repair import Bench, load_bench, repair_until_fits
from loadmaster.placers.resident_memory import standing_bytes
from loadmaster.placers.unit_cuts import cut_into_blocks

_LARGE = 200_000  # units; beyond, some orders take longer to make than they are worth
_FEW = 4  # devices of which all orders are tried


@dataclass(frozen=True, slots=True)
class MemoryFirst:
    """`attempts`: starts repaired while nothing fits; `rounds`: repairs of each; `wanted`: plans that fit."""

    attempts: int = 6
    rounds: int = 3
    wanted: int = 3
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Repair the starts nearest to fitting first."""
        cargo, tally = load_cargo(problem), Tally(problem, run)
        bench = load_bench(problem, cargo)
        starts = sorted(
            ((_count_overflow(bench, device), device) for device in _list_starts(bench)), key=itemgetter(0)
        )
        found, wanted = 0, self.wanted if cargo.num_units <= _LARGE else 1
        for number, (lack, device) in enumerate(starts[: self.attempts]):
            if tally.spent or found == wanted or (found and lack > (0, 0)):
                break
            seed = number * self.rounds
            found += repair_until_fits(
                problem, tally, cargo, device, bench=bench, anew=device, rounds=self.rounds, seed=seed
            )
        if tally.scored == 0:  # nothing can fit: the nearest start says by how much
            tally.offer(plan_of(starts[0][1][cargo.of_op]))
        return tally.answer(algorithm="memory_first")


def _count_overflow(bench: Bench, device: Ints) -> tuple[int, int]:
    """Bytes without room, and bytes in all where there are such."""
    usable = bench.problem.cluster.usable_bytes
    held = standing_bytes(bench.standing, device, len(usable))
    over = int(np.maximum(held - usable, 0).sum())
    return over, int(held.sum()) if over else 0


def _list_starts(bench: Bench) -> Iterator[Ints]:
    """Placements [U] to begin with, the plainest first."""
    usable, allowed = bench.problem.cluster.usable_bytes, bench.cargo.fits
    for order in _unit_orders(bench.problem, bench.cargo):
        for devices in _device_orders(usable):
            yield cut_into_blocks(bench.standing, allowed, order, usable, devices=devices)
    size = bench.standing.unit_bytes
    yield best_fit(size, np.argsort(-size, kind="stable"), allowed, usable.copy())


def _device_orders(usable: Longs) -> list[Longs]:
    """Orders of devices; those of equal memory are alike."""
    if (usable == usable[0]).all():
        return [np.arange(len(usable))]
    if len(usable) <= _FEW:
        return [np.array(row) for row in itertools.permutations(range(len(usable)))]
    large = np.argsort(-usable, kind="stable")
    return [np.arange(len(usable)), large, large[::-1]]


def _unit_orders(problem: Problem, cargo: Cargo) -> Iterator[Longs]:
    """Orders of units: forward, depth first, by level, by module."""
    graph = problem.graph
    yield np.arange(cargo.num_units)
    source, target = edges(graph)
    yield _sort_by_first_op(cargo, order_depth_first(offsets(source, graph.num_ops), target))
    if graph.num_ops <= _LARGE:
        yield _sort_by_first_op(cargo, levels(graph))
        if any(graph.module):
            _, first, module = np.unique(np.array(graph.module), return_index=True, return_inverse=True)
            yield _sort_by_first_op(cargo, first[module])


def _sort_by_first_op(cargo: Cargo, key: Any) -> Longs:
    """Units by the least key [N] of their ops."""
    least = np.full(cargo.num_units, np.iinfo(np.int64).max)
    np.minimum.at(least, cargo.of_op, key.astype(np.int64))
    return np.argsort(least, kind="stable")


PLACER: type[Placer] = MemoryFirst

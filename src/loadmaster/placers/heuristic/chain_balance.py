"""The forward order cut into contiguous blocks of equal time, one block a device.

What people do by hand (and what pipeline tools call "balance by time"), done for unequal devices:
for each order of the devices and each number of them, the least time T is found by bisection such
that filling device after device, each up to T seconds and its memory, covers all units. Backward ops
and updates ride with their groups. O(D log U) a probe, at most 32 candidates simulated.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_repaired
from loadmaster.placers.cargo import Cargo, load_cargo
from loadmaster.placers.heuristic._nets import Nets, nets_of
from loadmaster.placers.registry import Placer

_PROBES = 40


@dataclass(frozen=True, slots=True)
class ChainBalance:
    """`max_candidates` device orders and lengths are tried."""

    max_candidates: int = 32

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Try device orders, the natural one over all devices first."""
        cargo = load_cargo(problem, acyclic=True)
        strict = problem.objective == Objective.THROUGHPUT and problem.split != Split.FREE
        # A pinned unit is set aside, unless every unit must stay in the chain.
        aside = np.zeros(cargo.num_units, dtype=np.bool_) if strict else cargo.pinned
        sums = _prefix_sums(cargo, aside)
        nets = nets_of(problem, cargo.of_op)
        orders = itertools.islice(device_orders(problem), self.max_candidates)
        builders = (
            lambda room, order=order: balanced(cargo, sums, nets, aside, room, order)[cargo.of_op]
            for order in orders
        )
        return best_repaired(problem, run, builders, algorithm="chain_balance")


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


def _prefix_sums(cargo: Cargo, aside: Bools) -> tuple[Floats, Floats]:
    """[U + 1, D] seconds and [U + 1] bytes of the first u units (those set aside or barred count nothing)."""
    seconds = np.where(aside[:, None] | ~cargo.fits, 0.0, cargo.seconds)
    held = np.where(aside, 0.0, cargo.held_bytes)
    return (
        np.concatenate([np.zeros((1, seconds.shape[1])), np.cumsum(seconds, axis=0)]),
        np.concatenate([[0.0], np.cumsum(held)]),
    )


def balanced(
    cargo: Cargo,
    sums: tuple[Floats, Floats],
    nets: Nets | None,
    aside: Bools,
    room: Floats,
    order: tuple[int, ...],
) -> Ints:
    """[U] devices: the fill with the least T that covers all units, or the fill without limit."""
    finite = np.where(np.isfinite(cargo.seconds), cargo.seconds, 0.0)
    low, high = 0.0, float(finite.max(axis=1).sum()) * (1.0 + 1e-9)
    cuts = _fill(cargo, sums, nets, room, order, np.inf)
    if cuts[-1] == cargo.num_units:
        for _ in range(_PROBES):
            middle = (low + high) / 2
            tried = _fill(cargo, sums, nets, room, order, middle)
            if tried[-1] == cargo.num_units:
                high, cuts = middle, tried
            else:
                low = middle
    device = np.empty(cargo.num_units, dtype=np.int32)
    begin = 0
    for d, end in zip(order, cuts, strict=True):
        device[begin:end] = d
        begin = end
    for u in [*np.flatnonzero(aside), *range(begin, cargo.num_units)]:
        choices = np.where(cargo.fits[u], room, -np.inf)
        device[u] = int(choices.argmax()) if u >= begin and not aside[u] else int(cargo.seconds[u].argmin())
    return device


def _fill(
    cargo: Cargo,
    sums: tuple[Floats, Floats],
    nets: Nets | None,
    room: Floats,
    order: tuple[int, ...],
    limit_s: float,
) -> list[int]:
    """Where each device's block ends when filled up to `limit_s`, its room, or a unit it cannot run."""
    seconds, held = sums
    cuts, begin = [], 0
    for d in order:
        by_bytes = int(np.searchsorted(held, held[begin] + room[d], side="right")) - 1
        by_time = int(np.searchsorted(seconds[:, d], seconds[begin, d] + limit_s, side="right")) - 1
        barred = np.flatnonzero(~cargo.fits[begin:, d])
        by_support = begin + int(barred[0]) if len(barred) else cargo.num_units
        end = max(begin, min(by_bytes, by_support, by_time))
        if nets is not None and end > begin:
            loads = nets.loads_s(d, begin, seconds[begin : end + 1, d] - seconds[begin, d])
            end = begin + int(np.flatnonzero(loads <= limit_s)[-1])  # the empty block loads nothing
        begin = end
        cuts.append(begin)
    return cuts


PLACER: type[Placer] = ChainBalance

"""Repair: a placement that overflows, moved as little as it takes until it fits.

`Bench.repair_devices` works on resident memory (`resident_memory.py`), which the compiled search counts
exactly: gently from where the units are; then hotter, with runs of units carved off the overfull devices; at
last from contiguous blocks and for memory alone. `repair_until_fits` closes the loop with the simulator: what
a peak shows beyond that model is taken off the room of its device, and the plan is repaired again. Work is
bounded by counts, not by clocks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadmaster.core.arrays import Ints, Longs
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run, Score
from loadmaster.cost.transfer import route_bytes_per_s
from loadmaster.placers._partition import Schedule, Standing, Terms, anneal_partition
from loadmaster.placers.placement_units import Cargo
from loadmaster.placers.resident_memory import load_standing, running_bytes, standing_bytes
from loadmaster.placers.unit_cuts import cut_into_blocks, move_overflow

_ROUNDS, _ROUNDS_OF_LARGE, _LARGE = 6, 2, 200_000  # repairs of a plan; from so many units on, fewer


class Offers(Protocol):
    """Who scores plans and keeps the best: a `Tally` (`answer.py`)."""

    run: Run

    def offer(self, plan: Plan) -> Score:
        """Score a plan."""
        ...

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """One search: temperatures in mean tensors, prices in copied bytes, and how many tries."""

    hot: float
    cold: float
    soft: float
    stiff: float
    tries_per_unit: int
    least_tries: int
    most_tries: int
    for_memory: bool = False  # alone: goes on when all fits, and counts no seconds


_GENTLE = Effort(0.1, 0.05, 1.0, 1.0, 60, 20_000, 2_000_000)
_FIRM = (
    Effort(0.5, 0.05, 0.6, 3.0, 300, 100_000, 2_000_000),
    Effort(1.0, 0.05, 0.6, 3.0, 500, 100_000, 2_000_000),
)
# Wide graphs need the first: few copies. Large units need the second: room to the byte.
_HARD = (
    Effort(1.0, 0.1, 0.6, 0.6, 2_000, 300_000, 3_000_000, for_memory=True),
    Effort(3.0, 0.05, 1.0, 3.0, 2_000, 300_000, 3_000_000, for_memory=True),
)


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A problem made ready for repairs."""

    problem: Problem
    cargo: Cargo
    standing: Standing
    running: tuple[Longs, ...]  # [U] each: bytes that a unit needs beside, while it runs; several opinions
    scale_bytes: float  # of a mean tensor
    bytes_per_s: float  # of a mean transfer

    def repair_devices(
        self, device: Ints, room_bytes: Longs, *, seed: int = 0, anew: Ints | None = None
    ) -> Ints:
        """[U] devices near `device` [U] whose standing bytes are within `room_bytes` [D], or nearly.

        With `anew` [U], staying near is not worth much: what does not fit soon begins again from there.
        """
        terms, allowed = self._make_terms(device, room_bytes, seed), self.cargo.fits
        best, over = self._anneal_from(device, terms, _GENTLE, seed)
        if over == 0 or self.standing.unit_bytes.sum() > room_bytes.sum(dtype=np.float64):
            return best
        hard = _HARD[(seed + seed // 2) % len(_HARD)]
        for effort in (*_FIRM, hard) if anew is None else (hard,):
            if not effort.for_memory:
                start = move_overflow(self.standing, allowed, best, room_bytes)
            elif anew is None:
                start = cut_into_blocks(self.standing, allowed, np.arange(len(device)), room_bytes)
            else:
                start = anew
            found, lack = self._anneal_from(start, terms, effort, seed)
            best, over = (found, lack) if lack < over else (best, over)
            if over == 0:
                break
        return best

    def excess(self, device: Ints, peak_bytes: Longs, seed: int) -> Longs:
        """[D] what peaks show beyond the bytes that `repair_devices` counts."""
        beside = np.zeros(len(peak_bytes), dtype=np.int64)
        np.maximum.at(beside, device, self.running[seed % len(self.running)])
        counted = standing_bytes(self.standing, device, len(peak_bytes)) + beside
        return np.asarray(np.maximum(peak_bytes - counted, 0))

    def _anneal_from(self, device: Ints, terms: Terms, effort: Effort, seed: int) -> tuple[Ints, int]:
        """The best state of one search from `device` [U], and the bytes it lacks."""
        tries = effort.tries_per_unit * len(device)
        schedule = Schedule(
            hot=effort.hot * self.scale_bytes,
            cold=effort.cold * self.scale_bytes,
            soft=effort.soft,
            stiff=effort.stiff,
            num_tries=min(max(tries, effort.least_tries), effort.most_tries),
            seed=seed,
            stop=not effort.for_memory,
        )
        terms = terms._replace(bytes_per_s=0.0) if effort.for_memory else terms
        found, over, _, _ = anneal_partition(self.standing, device, terms, schedule)
        return found, int(over)

    def _make_terms(self, device: Ints, room_bytes: Longs, seed: int) -> Terms:
        """Moves are judged by bytes, and by seconds beyond those of the busiest device now."""
        running, seconds = self.running[seed % len(self.running)], self.cargo.seconds
        heavy = np.argsort(-running, kind="stable")[: int((running > 0).sum())]
        rank = np.full(len(running), len(heavy), dtype=np.int64)
        rank[heavy] = np.arange(len(heavy))
        busy_s = np.bincount(device, seconds[np.arange(len(device)), device], len(room_bytes))
        return Terms(
            room_bytes=room_bytes.copy(),
            heavy_unit=heavy,
            heavy_bytes=np.append(running[heavy], 0),
            heavy_rank=rank,
            seconds=seconds,
            limit_s=float(busy_s.max()),
            bytes_per_s=self.bytes_per_s,
        )


def load_bench(problem: Problem, cargo: Cargo) -> Bench:
    """Everything that no plan changes."""
    standing = load_standing(problem, cargo)
    sizes = standing.net_bytes if len(standing.net_bytes) else standing.unit_bytes
    running = [running_bytes(problem, cargo, workspace=False)]
    if running[0].any():  # where all is kept, ops with workspace run before the memory is full
        running.append(running_bytes(problem, cargo, workspace=True))
    scale_bytes = max(float(sizes.mean()), 1.0)
    return Bench(problem, cargo, standing, tuple(running), scale_bytes, _mean_bytes_per_s(problem))


def _mean_bytes_per_s(problem: Problem) -> float:
    """Of the mean transfer: as its time is given, or over all routes."""
    given_s = problem.costs.transfer_s
    timed = given_s > 0
    if timed.any():
        return float(problem.graph.tensor_bytes[timed].sum() / given_s[timed].sum())
    away = ~np.eye(problem.cluster.num_devices, dtype=np.bool_)
    return float(route_bytes_per_s(problem.cluster)[away].mean()) if away.any() else 0.0


def repair_until_fits(
    problem: Problem,
    tally: Offers,
    cargo: Cargo,
    device: Ints,
    *,
    priority: Ints | None = None,
    bench: Bench | None = None,
    anew: Ints | None = None,
    rounds: int | None = None,
    seed: int = 0,
) -> bool:
    """Offer repaired forms of `device` [U] until one fits in the simulator; says whether one does.

    `priority` [N] is the order tried first. Nothing is tried where nothing can fit, or where a split has
    rules that moves would break.
    """
    ruled = problem.objective == Objective.THROUGHPUT and problem.split != Split.FREE
    if ruled or tally.run.bound.infeasible or tally.spent:
        return False
    bench = load_bench(problem, cargo) if bench is None else bench
    if rounds is None:
        rounds = _ROUNDS if cargo.num_units < _LARGE else _ROUNDS_OF_LARGE
    usable = problem.cluster.usable_bytes
    room = usable
    for turn in range(seed, seed + rounds):
        device = bench.repair_devices(device, room, seed=turn, anew=anew)
        peak = _offer_orders(problem, tally, device[cargo.of_op], priority)
        if (peak <= usable).all():
            return True
        if tally.spent:
            break
        room = np.maximum(usable - bench.excess(device, peak, turn + 1), 0)
    return False


def _offer_orders(problem: Problem, tally: Offers, device: Ints, priority: Ints | None) -> Longs:
    """[D] peaks under the best of a few orders; later orders are tried only where the first ones overflow."""
    best = tally.offer(plan_of(device, priority))
    for order in (_workspace_first, _latest_first):
        if best.overflow_bytes == 0 or tally.spent:
            break
        best = min(best, tally.offer(plan_of(device, order(problem))))
    return np.array(best.peak_bytes, dtype=np.int64)


def _workspace_first(problem: Problem) -> Ints:
    """[N] ops with more workspace than output come early, while little is held yet."""
    graph = problem.graph
    made = np.bincount(graph.tensor_op, graph.tensor_bytes, graph.num_ops)
    rank = np.empty(graph.num_ops, dtype=np.int32)
    rank[np.argsort(made - graph.workspace_bytes, kind="stable")] = np.arange(graph.num_ops, dtype=np.int32)
    return rank


def _latest_first(problem: Problem) -> Ints:
    """[N] what is far down the graph comes as soon as it is ready: it frees what it reads."""
    return np.arange(problem.graph.num_ops, dtype=np.int32)[::-1].copy()

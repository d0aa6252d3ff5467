"""The evaluators of the table of `learned`: max-load in closed form, compiled, and the simulator for steps.

The closed form is the simulator's own figure for links through host memory, which the suite checks on every
best row. Single moves are compiled with it (`ClosedForm.walk`), so that ten thousand of them take
milliseconds: every proposed move is one evaluation.
"""

from typing import Any

import numba
import numpy as np

from loadmaster.core.problem import Load, Problem
from loadmaster.placers.exact._maxload.climb import kind_of_device
from loadmaster.placers.exact._maxload.model import make_model
from loadmaster.placers.learned._groups import Groups
from loadmaster.simulator.events.engine import prepare

_PER_OVERRUN = 10.0


class ClosedForm:
    """Evaluates rows [B, U], and counts them."""

    def __init__(self, problem: Problem, groups: Groups) -> None:
        model = make_model(problem, groups.cargo.of_op, groups.num)
        assert model.exact
        assert model.load == Load.SUM
        kind = kind_of_device(model)
        nets = model.nets
        self.arrays = (
            np.ascontiguousarray(model.seconds[:, kind]),
            groups.cargo.held_bytes,
            groups.room_bytes,
            nets.home,
            nets.ptr,
            nets.user,
            np.ascontiguousarray(nets.read_s[kind]),
            np.ascontiguousarray(nets.write_s[kind]),
        )
        self.count = 0
        self.best_s = np.inf
        self.best: Any = None

    def __call__(self, rows: Any) -> Any:
        """[B] seconds, stretched where a row does not fit."""
        self.count += len(rows)
        times, over = _loads(np.ascontiguousarray(rows), *self.arrays)
        times = times * (1.0 + _PER_OVERRUN * over)
        self._note(rows, times, over)
        return times

    def _note(self, rows: Any, times: Any, over: Any) -> None:
        fitting = np.where(over == 0.0, times, np.inf)
        at = int(fitting.argmin())
        if fitting[at] < self.best_s:
            self.best_s, self.best = float(fitting[at]), rows[at].copy()

    def walk(self, starts: Any, fits: Any, most: int, seed: int, heat: float = 0.0, idle: int = 0) -> None:
        """Single moves from the first start, `most` evaluations in all.

        `heat` > 0 anneals from that temperature to a 3,000th of it; else a move is kept if it is not worse,
        and after `idle` moves without gain the next start follows.
        """
        row, over = _walk(np.ascontiguousarray(starts), fits, most, seed, heat, idle, *self.arrays)
        self.count += most - 1
        if over == 0.0:
            self(row[None])
        else:
            self.count += 1


class Simulated:
    """Evaluates rows with the simulator, first come first served by rank, and counts them."""

    def __init__(self, problem: Problem, groups: Groups) -> None:
        self.groups, self.simulator = groups, prepare(problem)
        self.count = 0
        self.best_s = np.inf
        self.best: Any = None

    def __call__(self, rows: Any) -> Any:
        """[B] seconds, stretched where a row does not fit."""
        self.count += len(rows)
        times = np.zeros(len(rows))
        for at, row in enumerate(rows):
            _, score = self.simulator.order_and_score(self.groups.plan(row))
            times[at] = self.groups.penalised_s(score)
            if score.overflow_bytes == 0 and score.time_s < self.best_s:
                self.best_s, self.best = score.time_s, row.copy()
        return times


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _loads(
    rows: Any, seconds: Any, held: Any, room: Any, home: Any, ptr: Any, user: Any, read_s: Any, write_s: Any
) -> Any:
    times, over = np.zeros(len(rows)), np.zeros(len(rows))
    for b in range(len(rows)):
        times[b], over[b] = _load(rows[b], seconds, held, room, home, ptr, user, read_s, write_s)
    return times, over


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _load(
    row: Any, seconds: Any, held: Any, room: Any, home: Any, ptr: Any, user: Any, read_s: Any, write_s: Any
) -> Any:
    """The busiest load of a row, and its worst relative overrun."""
    devices = seconds.shape[1]
    load, used = np.zeros(devices), np.zeros(devices)
    seen = np.full(devices, -1)
    for u in range(len(row)):
        d = row[u]
        load[d] += seconds[u, d]
        used[d] += held[u]
    for e in range(len(home)):
        at = row[home[e]]
        sent = False
        for k in range(ptr[e], ptr[e + 1]):
            d = row[user[k]]
            if d != at and seen[d] != e:
                seen[d] = e
                load[d] += read_s[d, e]
                sent = True
        if sent:
            load[at] += write_s[at, e]
    over = 0.0
    for d in range(devices):
        over = max(over, used[d] / max(room[d], 1.0) - 1.0)
    return load.max(), over


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _walk(
    starts: Any,
    fits: Any,
    most: int,
    seed: int,
    heat: float,
    idle: int,
    seconds: Any,
    held: Any,
    room: Any,
    home: Any,
    ptr: Any,
    user: Any,
    read_s: Any,
    write_s: Any,
) -> Any:
    """The best fitting row of a walk of single moves, and its overrun."""
    np.random.seed(seed)
    num, devices = fits.shape
    row, at, vain, done = starts[0].copy(), 0, 0, 1
    time_s, over = _load(row, seconds, held, room, home, ptr, user, read_s, write_s)
    time_s *= 1.0 + _PER_OVERRUN * over
    best, best_s, best_over = row.copy(), time_s if over == 0.0 else np.inf, over
    while done < most:
        begins = idle > 0 and vain > idle
        u, before = 0, 0
        if begins:
            at = (at + 1) % len(starts)
            row, vain = starts[at].copy(), 0
        else:
            u = np.random.randint(num)
            before = row[u]
            others = 0
            for d in range(devices):
                others += fits[u, d] and d != before
            if others > 0:
                chosen = np.random.randint(others)
                for d in range(devices):
                    if fits[u, d] and d != before:
                        if chosen == 0:
                            row[u] = d
                        chosen -= 1
        new_s, over = _load(row, seconds, held, room, home, ptr, user, read_s, write_s)
        new_s *= 1.0 + _PER_OVERRUN * over
        done += 1
        if over == 0.0 and new_s < best_s:
            best, best_s, best_over = row.copy(), new_s, over
        warmth = heat * (1.0 / 3000.0) ** (done / most) if heat > 0.0 else 0.0
        if begins:
            time_s = new_s
            continue
        vain = 0 if new_s < time_s else vain + 1
        if new_s <= time_s or (warmth > 0.0 and np.random.random() < np.exp((time_s - new_s) / warmth)):
            time_s = new_s
        else:
            row[u] = before
    return best, best_over

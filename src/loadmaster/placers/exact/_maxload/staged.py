"""Stages that have room for their micro-batches in flight: the best over all ideals, or along orders.

An order is a chain of ideals, so that one compiled loop (`flights.py`) serves both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.pipelines.in_flight import settled_bytes
from loadmaster.core.pipelines.schedule import Schedule
from loadmaster.core.problem import Problem
from loadmaster.placers.exact._maxload.chains import Ideals, find_ideals, make_tracks
from loadmaster.placers.exact._maxload.flights import sweep_flights
from loadmaster.placers.exact._maxload.holds import Holds, holds_of
from loadmaster.placers.exact._maxload.ideals import sum_by_ideal
from loadmaster.placers.exact._maxload.lines import list_orders, list_sequences, order_topologically
from loadmaster.placers.exact._maxload.model import MaxLoad, make_model
from loadmaster.placers.exact._maxload.packed import (
    LOAD_CODE,
    States,
    num_states,
    pack_model,
    states_by_count,
    states_in_sequence,
    user_words,
)

_MOST_STATES = 1024
_MOST_DEVICES = 256  # of one type, when it is asked how many would do
_MOST_PLACES = 600  # of a longer order, rows of neighbours stay together
_FUEL = 2_000_000  # stages looked at between two looks at the clock
_BETTER = 1e-12
Spent = Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Stages in the order of the forward pass, and the busiest load."""

    stage: Ints  # [C]
    device: tuple[int, ...]  # [S]
    again: tuple[bool, ...]  # [S] recomputed
    value_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A problem's classes with what they keep for micro-batches, and room [D] for all of it."""

    problem: Problem
    schedule: Schedule
    model: MaxLoad
    holds: Holds
    room: Longs  # [D]
    op_running: Longs  # [N] bytes that an op needs while it runs
    running: Longs  # [C]


def make_flight(problem: Problem, model: MaxLoad, room: Longs, op_running: Longs) -> Flight:
    """A model made ready; `room` is what devices may use, `op_running` what they must have left for ops."""
    assert problem.schedule is not None
    num_bytes = np.zeros(model.num_classes, dtype=np.int64)
    np.add.at(num_bytes, model.of_op, settled_bytes(problem.graph))
    roomy = model.with_room(problem, num_bytes, room)
    running = np.zeros(model.num_classes, dtype=np.int64)
    np.maximum.at(running, model.of_op, op_running)
    return Flight(problem, problem.schedule, roomy, holds_of(problem, roomy), room, op_running, running)


def best_order(
    flight: Flight, rng: np.random.Generator, *, most: int, rounds: int, bound_s: float, spent: Spent
) -> Staged | None:
    """The best cut of `most` orders, and of as many reorderings inside its stages as `rounds` says."""
    best: Staged | None = None
    for at, order in enumerate(list_orders(flight.model)):
        if at >= most or (at and spent()) or _reaches(best, bound_s):
            break
        best = cut_order(flight, order, _limit_below(best)) or best
    for at in range(rounds if best is not None else 0):
        assert best is not None
        if spent() or _reaches(best, bound_s):
            break
        key = rng.random(flight.model.num_classes)
        order = order_topologically(flight.model, best.stage, key, newest=at % 2 == 0)
        best = cut_order(flight, order, _limit_below(best)) or best
    return best


def _reaches(best: Staged | None, bound_s: float) -> bool:
    return best is not None and best.value_s <= bound_s * (1 + _BETTER)


def _limit_below(best: Staged | None) -> float:
    return np.inf if best is None else best.value_s * (1 - _BETTER)


def cut_order(flight: Flight, order: Ints, limit_s: float) -> Staged | None:
    """The best stages along an order of classes, None where none are under the limit."""
    num = len(order)
    if num > _MOST_PLACES:
        block = np.empty(num, dtype=np.int32)
        block[order] = (np.arange(num, dtype=np.int64) * _MOST_PLACES // num).astype(np.int32)
        coarse = make_model(flight.problem, block[flight.model.of_op], _MOST_PLACES)
        rough = make_flight(flight.problem, coarse, flight.room, flight.op_running)
        found = cut_order(rough, np.arange(_MOST_PLACES, dtype=np.int32), limit_s)
        return None if found is None else replace(found, stage=found.stage[block])
    line = replace(flight.model, source=order[:-1], target=order[1:])
    ideals = find_reversed_ideals(line, most=num + 1, max_bytes=2**34)
    assert ideals is not None
    return find_best_stages(flight, ideals, limit_s, spent=lambda: False)[0]


def find_reversed_ideals(model: MaxLoad, *, most: int, max_bytes: int) -> Ideals | None:
    """The ideals of the order turned round: what may come behind a stage."""
    return find_ideals(
        replace(model, source=model.target, target=model.source), most=most, max_bytes=max_bytes
    )


def list_tables(flight: Flight) -> Iterator[States]:
    """Every count of every type, or where those are too many a few sequences of devices, the last first."""
    count = flight.model.count.tolist()
    if num_states(count) <= _MOST_STATES:
        yield states_by_count(count)
        return
    for sequence in list_sequences(flight.model):
        yield states_in_sequence(sequence[::-1], flight.model.num_types)


def num_states_of(flight: Flight) -> int:
    """States per ideal."""
    return next(list_tables(flight)).num


def find_best_stages(
    flight: Flight, ideals: Ideals, limit_s: float, *, spent: Spent
) -> tuple[Staged | None, bool]:
    """The best stages over ideals under a limit, and whether it is proven that none are better."""
    best, proven = None, True
    for states in list_tables(flight):
        found, ended = _Pass(flight, ideals, states).run(limit_s, spent)
        proven &= ended and states.exact
        if found is not None:
            best, limit_s = found, _limit_below(found)
    return best, proven


def devices_needed(flight: Flight, ideals: Ideals, *, max_bytes: int, spent: Spent) -> int | None:
    """How many devices of the commonest type would hold everything with the others as they are, if known."""
    model = flight.model
    kind, most = int(model.count.argmax()), min(model.num_classes, _MOST_DEVICES)
    num = len(model.devices[kind])
    while num < most and not spent():
        num = min(2 * num, most)
        alike = (*model.devices[kind], *[-1] * (num - len(model.devices[kind])))
        devices = (*model.devices[:kind], alike, *model.devices[kind + 1 :])
        more = replace(flight, model=replace(model, devices=devices))
        count = num_states(more.model.count.tolist())
        if count > _MOST_STATES or 16 * count * ideals.num > max_bytes:
            break
        states = states_by_count(more.model.count.tolist())
        fits = np.isfinite(_Pass(more, ideals, states).sweep_ideals(np.inf, spent).best[-1])
        if fits.any():
            return int(states.used[kind, fits].min())
    return None


def most_microbatches(flight: Flight, ideals: Ideals, *, spent: Spent) -> int:
    """With how many micro-batches all has room on the devices there are, 0 if with none, or time is out."""
    schedule, fits = flight.schedule, 0
    fails = schedule.num_microbatches
    if schedule.name == "1f1b":  # no stage holds more than there are stages
        fails = min(fails, int(flight.model.count.sum()))
    while fails - fits > 1 and not spent():
        middle = (fits + fails) // 2
        fewer = replace(flight, schedule=replace(schedule, num_microbatches=middle))
        found, ended = find_best_stages(fewer, ideals, np.inf, spent=spent)
        if found is not None:
            fits = middle
        elif ended:
            fails = middle
        else:
            break
    return fits


@dataclass(frozen=True, slots=True, eq=False)
class _SweepResult:
    """What a pass over ideals found: values, and whence and how they came about."""

    best: Floats  # [I, states]
    came_from: Ints
    came_by: Ints
    ended: bool


class _Pass:
    """One table of states over all ideals."""

    def __init__(self, flight: Flight, ideals: Ideals, states: States) -> None:
        self.flight, self.ideals, self.states = flight, ideals, states

    def run(self, limit_s: float, spent: Spent) -> tuple[Staged | None, bool]:
        """The best stages within the limit, and whether the pass came to its end."""
        found = self.sweep_ideals(limit_s, spent)
        state = int(found.best[-1].argmin())
        value_s = float(found.best[-1, state])
        if not found.ended or value_s > limit_s or value_s == np.inf:
            return None, found.ended
        return self._trace_stages(found.came_from, found.came_by, state, value_s), True

    def sweep_ideals(self, limit_s: float, spent: Spent) -> _SweepResult:
        """The least busiest load of every ideal and state within the limit."""
        num, states = self.ideals.num, self.states
        best = np.full((num, states.num), np.inf)
        best[0, 0] = 0.0
        came_from = np.zeros((num, states.num), dtype=np.int32)
        came_by = np.zeros((num, states.num), dtype=np.int32)
        fixed = self._kernel_arguments()
        memory = (
            *(best, came_from, came_by),
            np.full(num, -1, dtype=np.int32),
            np.zeros((num, fixed[-1])),
            np.zeros((num, 5), dtype=np.int64),
            np.empty(num + 1, dtype=np.uint32),
        )
        given: tuple[Any, ...] = (*fixed[:-1], *memory)
        at = 0
        while at < num and not (at and spent()):
            at, _ = sweep_flights(*(at, _FUEL, limit_s), *given)
        return _SweepResult(best, came_from, came_by, ended=at >= num)

    def _kernel_arguments(self) -> tuple[Any, ...]:
        """What the kernel reads, and the number of tracks."""
        model, holds, ideals, states = self.flight.model, self.flight.holds, self.ideals, self.states
        arrays = pack_model(model)
        track, read_s, write_s = make_tracks(arrays, model.load)
        ptr, word, mask = user_words(model.nets)
        homes, users = (arrays.home_ptr, arrays.home_net), (arrays.user_ptr, arrays.user_net)
        nets = [part.astype(np.uint32) for part in (*homes, *users, model.nets.home, ptr, word)]
        barred = ~np.isfinite(model.seconds)
        links = ideals.ptr, ideals.up, ideals.more
        seconds, of_barred, num_bytes, _ = sum_by_ideal(
            *links,
            np.where(barred, 0.0, model.seconds),
            barred.astype(np.int32),
            model.num_bytes,
            np.zeros(model.num_classes),
        )
        again = sum_by_ideal(
            *links, holds.again_s, barred.astype(np.int32), model.num_bytes, np.zeros(model.num_classes)
        )[0]
        behind = states.used.sum(axis=0).tolist()
        in_flight = np.array([self.flight.schedule.count_held(count) for count in behind], dtype=np.int64)
        return (
            *(ideals.rows, ideals.ptr.astype(np.uint64)),
            *(ideals.up.astype(np.uint32), ideals.more.astype(np.uint32)),
            *(seconds, again, of_barred, num_bytes, model.room),
            *(track.astype(np.uint32), LOAD_CODE[model.load]),
            *(*nets, mask, read_s, write_s),
            *(holds.code, holds.home, holds.num_bytes, holds.ptr, holds.word, holds.saved, holds.needed),
            *(holds.of_class, holds.net, self.flight.running),
            *(in_flight, states.stride, states.step_ptr, states.step),
            len(read_s),
        )

    def _trace_stages(self, came_from: Ints, came_by: Ints, state: int, value_s: float) -> Staged:
        """The stages that lead to the whole: the last one found is the first of the pipeline."""
        rows, model = self.ideals.rows, self.flight.model
        pools = [list(alike)[::-1] for alike in model.devices]
        at, place = self.ideals.num - 1, 0
        stage = np.zeros(model.num_classes, dtype=np.int32)
        devices, again = [], []
        while at > 0:
            by, before = int(came_by[at, state]), int(came_from[at, state])
            bits = np.unpackbits((rows[at] & ~rows[before]).view(np.uint8), bitorder="little")
            stage[np.flatnonzero(bits[: model.num_classes])] = place
            devices.append(pools[by // 2].pop())
            again.append(bool(by % 2))
            state -= int(self.states.stride[by // 2])
            at, place = before, place + 1
        return Staged(stage, tuple(devices), tuple(again), value_s)

"""The best chain by the dynamic programme over ideals, with its proof, within limits of size and time.

Every pass asks: is there a chain whose loads are all under the best value known? No: that value is the
optimum. Yes: the chain found is better, its order is cut again, and the next pass asks for less.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, offsets
from loadmaster.core.problem import Load
from loadmaster.placers.exact._maxload.ideals import enumerate_ideals, sum_by_ideal
from loadmaster.placers.exact._maxload.lines import Stages, list_sequences, stages_of
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.exact._maxload.packed import (
    LOAD_CODE,
    PackedModel,
    States,
    num_states,
    pack_model,
    states_by_count,
    states_in_sequence,
    user_words,
)
from loadmaster.placers.exact._maxload.prices import Prices
from loadmaster.placers.exact._maxload.sweep import UNREACHED, sweep

MOST_STATES = 4096  # counts of devices per ideal
_MOST_TYPES, _MOST_ALIKE = 120, 250  # what a byte counts
_BETTER = 1e-12
_UNDER = 5e-10  # a chain that is better by less than this share is not looked for
_CHUNK = 20_000_000  # stages times states looked at between two looks at the clock
_WORD = 64
Spent = Callable[[int], bool]  # of the stages looked at so far
Improve = Callable[[Stages], Stages]


@dataclass(frozen=True, slots=True, eq=False)
class Ideals:
    """All I ideals of a model's order, L links up."""

    rows: NDArray[np.uint64]  # [I, W]
    ptr: Longs  # [I + 1] into up and more
    up: Ints  # [L] the ideal with one class more
    more: Ints  # [L] that class

    @property
    def num(self) -> int:
        """I."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best stages known, and whether it is proven that none are better (or that there are none)."""

    stages: Stages | None
    proven: bool
    looked: int  # stages looked at


def find_ideals(model: MaxLoad, *, most: int, max_bytes: int) -> Ideals | None:
    """All ideals, or None where there are more than `most` or than fit in half of `max_bytes`."""
    num = model.num_classes
    words = num // _WORD + 1
    each = 3 * (16 * words + 8) + 24 + bytes_per_ideal(model, num_states_of(model, exact=False))
    key = np.random.default_rng(1).integers(1, 2**63, num, dtype=np.uint64)
    by_target, by_source = (np.argsort(end, kind="stable") for end in (model.target, model.source))
    rows, ptr, up, more, complete = enumerate_ideals(
        words,
        offsets(model.target, num),
        model.source[by_target],
        offsets(model.source, num),
        model.target[by_source],
        key,
        min(most, max_bytes // (2 * each)),
        max(max_bytes // 64, 4096),
    )
    return Ideals(rows, ptr, up, more) if complete else None


def num_states_of(model: MaxLoad, *, exact: bool) -> int:
    """States per ideal, with every count of every type or in sequence."""
    count = sorted(model.count.tolist(), reverse=True)
    return num_states(count[1:]) if exact else int(model.count.sum()) + 1


def bytes_per_ideal(model: MaxLoad, states: int) -> int:
    """What a pass holds for each ideal."""
    return 6 * states + 12 * (model.num_types + 1) + 16 * model.num_types + 40


def exact_states_fit(model: MaxLoad, ideals: Ideals, *, max_bytes: int) -> bool:
    """Whether every count of every type can be told apart."""
    count, states = model.count, num_states_of(model, exact=True)
    small = model.num_types <= _MOST_TYPES and int(count.max()) <= _MOST_ALIKE
    held = ideals.num * bytes_per_ideal(model, states)
    return small and states <= MOST_STATES and held <= max_bytes // 2


def best_chain(
    model: MaxLoad,
    ideals: Ideals,
    price: Prices,
    start: Stages | None,
    *,
    exact: bool,
    spent: Spent,
    improve: Improve,
) -> Found:
    """Pass after pass from the chain known; in sequence (not `exact`) every sequence has its passes."""
    tables = (
        [_table_by_count(model)] if exact else [_table_by_sequence(model, s) for s in list_sequences(model)]
    )
    best, looked, proven = start, 0, True
    for table in tables:
        passes = _Passes(model, ideals, price, table)
        while best is None or best.value_s > price.bound_s * (1 + _BETTER):  # else nothing is better
            upper = passes.most_s if best is None else best.value_s
            stages, ended, count = passes.find_stages_under(upper * (1 - _UNDER), _count_from(spent, looked))
            looked += count
            if stages is None:
                proven &= ended
                break
            better = improve(stages)
            if best is not None and better.value_s >= best.value_s:
                break
            best = better
    return Found(best, proven and exact, looked)


def _count_from(spent: Spent, looked: int) -> Spent:
    return lambda more: spent(looked + more)


def devices_needed(model: MaxLoad, ideals: Ideals, *, spent: Spent) -> int | None:
    """How many devices of the commonest type would hold everything with the others as they are."""
    table = _table_by_count(model)
    passes = _Passes(model, ideals, None, _Table(table.order, table.states, table.count))
    return passes.find_least_devices(spent)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Types in an order of their own, the first counted by the programme itself, and states of the others."""

    order: Ints  # [T'] types, -1 = none
    states: States | None  # of all but the first
    count: Longs  # [T']


def _table_by_count(model: MaxLoad) -> _Table:
    order = np.argsort(-model.count, kind="stable")
    count = model.count[order].astype(np.int64)
    return _Table(
        order.astype(np.int32), states_by_count(count[1:].tolist()) if len(order) > 1 else None, count
    )


def _table_by_sequence(model: MaxLoad, sequence: tuple[int, ...]) -> _Table:
    order = np.concatenate([[-1], np.arange(model.num_types)]).astype(np.int32)
    count = np.concatenate([[0], model.count]).astype(np.int64)
    return _Table(order, states_in_sequence(sequence, model.num_types), count)


def make_tracks(arrays: PackedModel, load: Load) -> tuple[Ints, Floats, Floats]:
    """What is carried along a walk: reads and writes of a port in one number, or in two where they differ."""
    if load != Load.MAX3:
        return arrays.column, arrays.read_s, arrays.write_s
    none = np.zeros_like(arrays.read_s)
    shape = (2 * len(none), none.shape[1])
    read_s = np.stack([arrays.read_s, none], axis=1).reshape(shape)
    write_s = np.stack([none, arrays.write_s], axis=1).reshape(shape)
    return 2 * arrays.column, read_s, write_s


class _Passes:
    """A model, its ideals and a table of states, made ready for the kernel."""

    def __init__(self, model: MaxLoad, ideals: Ideals, price: Prices | None, table: _Table) -> None:
        self.model, self.ideals, self.price, self.table = model, ideals, price, table
        arrays = pack_model(model)
        self.track, read_s, write_s = make_tracks(arrays, model.load)
        ptr, word, mask = user_words(model.nets)
        homes, users = (arrays.home_ptr, arrays.home_net), (arrays.user_ptr, arrays.user_net)
        # Unsigned: an index that may be negative costs a comparison each time.
        indices = [part.astype(np.uint32) for part in (*homes, *users, model.nets.home, ptr, word)]
        self.nets: tuple[NDArray[Any], ...] = (*indices, mask, read_s, write_s)
        links = ideals.up.astype(np.uint32), ideals.more.astype(np.uint32)
        self.walk: tuple[NDArray[Any], ...] = (ideals.rows, ideals.ptr.astype(np.uint64), *links)
        order = table.order
        seconds = np.where(order >= 0, model.seconds[:, order], 0.0)
        barred = ~np.isfinite(seconds)
        self.room = np.where(order >= 0, model.room[order], -1)
        worth = price.worth if price is not None else np.zeros(model.num_classes)
        self.seconds, self.barred, self.num_bytes, self.worth = sum_by_ideal(
            ideals.ptr,
            ideals.up,
            ideals.more,
            np.where(barred, 0.0, seconds),
            barred.astype(np.int32),
            model.num_bytes,
            worth,
        )
        nets = model.nets
        finite = np.where(np.isfinite(model.seconds), model.seconds, 0.0)
        moved = nets.read_s.max(axis=0, initial=0.0).sum() + nets.write_s.max(axis=0, initial=0.0).sum()
        self.most_s = 1.01 * float(finite.max(axis=1).sum() + moved) + 1e-300

    def find_least_devices(self, spent: Spent) -> int | None:
        """The least number of devices of the first type, however long they take."""
        used, *_, ended, _ = self._run(self.most_s, spent, most_first=UNREACHED - 1)
        found = int(used[-1, -1])
        return found if ended and found < UNREACHED else None

    def find_stages_under(self, limit_s: float, spent: Spent) -> tuple[Stages | None, bool, int]:
        """Stages with all loads within a limit, whether the pass came to its end, and stages looked at."""
        most = int(self.table.count[0])
        used, came_from, came_by, ended, looked = self._run(limit_s, spent, most_first=most)
        if used[-1, -1] > most:
            return None, ended, looked
        return self._trace_stages(came_from, came_by), ended, looked

    def _run(
        self, limit_s: float, spent: Spent, *, most_first: int
    ) -> tuple[NDArray[np.uint8], Ints, NDArray[np.int8], bool, int]:
        table, num = self.table, self.ideals.num
        states, stride, step_ptr, step, used_of = self._states()
        carries, shared, left = self._compute_worths(limit_s, used_of)
        used = np.full((num, states), UNREACHED, dtype=np.uint8)
        used[0] = 0
        came_from = np.zeros((num, states), dtype=np.int32)
        came_by = np.zeros((num, states), dtype=np.int8)
        stamp = np.full(num, -1, dtype=np.int32)
        moved = np.zeros((num, len(self.nets[-1])))
        stack = np.empty(num + 1, dtype=np.uint32)
        fuel = _CHUNK // (1 + states * len(table.order) // 8)
        at, looked = 0, 0
        column = np.where(table.order >= 0, self.track[table.order], 0).astype(np.uint32)
        sums = (self.seconds, self.barred, self.num_bytes, self.worth)
        rules = (shared, self.room, column, LOAD_CODE[self.model.load])
        counts = (most_first, stride, step_ptr, step, left, float(carries[0]))
        memory = (used, came_from, came_by, stamp, moved, stack)
        fixed: tuple[Any, ...] = (*self.walk, *sums, *rules, *self.nets, *counts, *memory)
        while at < num and not (at and spent(looked)):
            at, more, _ = sweep(*(at, fuel, limit_s), *fixed)
            looked += more
        return used, came_from, came_by, at >= num, looked

    def _states(self) -> tuple[int, Longs, Longs, Longs, Longs]:
        """Number of states, and stride, steps and counts with the first type before the others."""
        states = self.table.states
        if states is None:
            none = np.zeros(0, dtype=np.int64)
            return 1, np.zeros(1, np.int64), np.zeros(2, np.int64), none, np.zeros((1, 1), np.int64)
        stride = np.concatenate([[0], states.stride])
        used = np.concatenate([np.zeros((1, states.num), dtype=np.int64), states.used])
        return states.num, stride, np.concatenate([[0], states.step_ptr]), states.step, used

    def _compute_worths(self, limit_s: float, used: Longs) -> tuple[Floats, Bools, Floats]:
        """Worth that a device carries, where stages may end, and worth that the devices left carry."""
        count, order = self.table.count, self.table.order
        if self.price is None:
            every = np.ones(self.ideals.num, dtype=np.bool_)
            return np.zeros(len(count)), every, np.zeros(used.shape[1])
        carries = np.where(order >= 0, self.price.carries(self.model, limit_s)[order], 0.0)
        total, all_carry = float(self.worth[-1]), float(carries @ count)
        margin = 1e-9 * max(total, all_carry)
        before = (used * carries[:, None]).sum(axis=0)
        left = all_carry - before - count[0] * carries[0] + margin
        sets = np.unique(before[:, None] + np.arange(count[0] + 1) * carries[0]) + margin
        spot = np.searchsorted(sets, self.worth)
        least = sets[np.minimum(spot, len(sets) - 1)]
        slack = all_carry - total + 2 * margin
        shared = (spot < len(sets)) & (least <= self.worth + slack)
        return carries, shared, left

    def _trace_stages(self, came_from: Ints, came_by: NDArray[np.int8]) -> Stages:
        """The stages that lead to the whole."""
        rows, num = self.ideals.rows, self.model.num_classes
        _, stride, *_ = self._states()
        at, state = self.ideals.num - 1, came_from.shape[1] - 1
        sets, kinds = [], []
        while at > 0:
            t, before = int(came_by[at, state]), int(came_from[at, state])
            if before < at:
                bits = np.unpackbits((rows[at] & ~rows[before]).view(np.uint8), bitorder="little")
                sets.append(np.flatnonzero(bits[:num]))
                kinds.append(int(self.table.order[t]))
            state -= int(stride[t])
            at = before
        stage = np.zeros(num, dtype=np.int32)
        for place, classes in enumerate(reversed(sets)):
            stage[classes] = place
        return stages_of(self.model, stage, kinds[::-1])

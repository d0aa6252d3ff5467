"""Splits along topological orders: many orders, each cut best, and the best of them reordered.

The linearised programme is only as good as its order. So several orders are cut; then the stages of the best
cut are kept and the classes inside them are put in another order, again and again: a cut of the new order is
never worse than the stages it came from (Archer et al., ICML 2024, search orders around an exact cut).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Floats, Ints, offsets
from loadmaster.placers.exact._maxload.linear import cut_linearly
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.exact._maxload.packed import (
    LOAD_CODE,
    PackedModel,
    States,
    loads_s,
    num_states,
    pack_model,
    states_by_count,
    states_in_sequence,
)
from loadmaster.placers.exact._maxload.reduce import contract_classes

_MOST_STATES = 512
_MOST_PLACES = 600  # of a longer order, rows of neighbours stay together
_WIDER = (1.25, 2.0, 5.0)  # limits tried, in terms of the bound
_BETTER = 1e-12
Spent = Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A chain: the stage of every class, the type of every stage, and the busiest load."""

    stage: Ints  # [C]
    kind: tuple[int, ...]  # [stages]
    value_s: float

    def device(self, model: MaxLoad) -> Ints:
        """[C] devices: those of a type in order."""
        pools = [list(alike) for alike in model.devices]
        taken = [pools[t].pop(0) for t in self.kind]
        return np.array(taken, dtype=np.int32)[self.stage]


def stages_of(model: MaxLoad, stage: Ints, kind: Sequence[int]) -> Stages:
    """Stages with the value that their loads have."""
    found = Stages(stage, tuple(kind), 0.0)
    return Stages(stage, tuple(kind), float(loads_s(model, found.device(model)).max()))


def best_line(
    model: MaxLoad,
    rng: np.random.Generator,
    *,
    rounds: int,
    bound_s: float = 0.0,
    spent: Spent = lambda: False,
    start: Stages | None = None,
) -> Stages | None:
    """The best cut of several orders and `rounds` reorderings; None where no cut has room for all.

    It ends when a cut reaches `bound_s`, which no split can beat.
    """
    line, best = _Line(model), start
    good_s = bound_s * (1 + _BETTER)
    for order in list_orders(model) if start is None else ():
        best = line.first(order, bound_s) if best is None else line.cut(order, _limit_below(best)) or best
        if best is not None and (spent() or best.value_s <= good_s):
            return best
    for at in range(rounds if best is not None else 0):
        assert best is not None
        if spent() or best.value_s <= good_s:
            break
        order = order_topologically(model, best.stage, rng.random(model.num_classes), newest=at % 2 == 0)
        best = line.cut(order, best.value_s * (1 + _BETTER)) or best
    return best


def _limit_below(stages: Stages) -> float:
    return stages.value_s * (1 - _BETTER)


class _Line:
    """A model made ready for the kernel."""

    def __init__(self, model: MaxLoad) -> None:
        self.model = model
        self.arrays: PackedModel = pack_model(model)
        self.tables = _list_tables(model)

    def first(self, order: Ints, bound_s: float) -> Stages | None:
        """The best cut of an order; short stages are looked at first."""
        for factor in _WIDER if bound_s > 0 else ():
            found = self.cut(order, factor * bound_s)
            if found is not None:
                return found
        return self.cut(order, np.inf)

    def cut(self, order: Ints, limit_s: float) -> Stages | None:
        """The best cut under a limit over all tables of states, None if there is none."""
        if len(order) > _MOST_PLACES:
            coarse, block = merge_into_blocks(self.model, order, _MOST_PLACES)
            found = _Line(coarse).cut(np.arange(coarse.num_classes, dtype=np.int32), limit_s)
            return None if found is None else Stages(found.stage[block], found.kind, found.value_s)
        best = None
        for states in self.tables:
            value, begins, kinds = self._run(order, states, limit_s)
            if value < np.inf:
                best, limit_s = (begins, kinds), value * (1 - _BETTER)
        if best is None:
            return None
        cuts = np.zeros(len(order), dtype=np.int32)
        cuts[best[0]] = 1
        stage = np.empty(len(order), dtype=np.int32)
        stage[order] = np.cumsum(cuts) - 1
        return stages_of(self.model, stage, [int(t) for t in best[1][::-1]])

    def _run(self, order: Ints, states: States, limit_s: float) -> tuple[float, Ints, NDArray[np.int8]]:
        model, arrays = self.model, self.arrays
        value, begins, kinds = cut_linearly(
            order,
            model.seconds,
            model.num_bytes,
            model.room,
            arrays.column,
            LOAD_CODE[model.load],
            arrays.home_ptr,
            arrays.home_net,
            arrays.user_ptr,
            arrays.user_net,
            model.nets.home,
            model.nets.ptr,
            arrays.read_s,
            arrays.write_s,
            states.stride,
            states.step_ptr,
            states.step,
            states.num,
            limit_s,
        )
        return float(value), begins, kinds


def merge_into_blocks(model: MaxLoad, order: Ints, most: int) -> tuple[MaxLoad, Ints]:
    """The model with rows of neighbours in an order as classes, and the block of each class."""
    num = model.num_classes
    block = np.empty(num, dtype=np.int32)
    block[order] = (np.arange(num, dtype=np.int64) * most // num).astype(np.int32)
    return contract_classes(model, block, most), block


def _list_tables(model: MaxLoad) -> list[States]:
    """Every count of every type, or where those are too many a few sequences of devices."""
    count = model.count.tolist()
    if num_states(count) <= _MOST_STATES:
        return [states_by_count(count)]
    return [states_in_sequence(sequence, model.num_types) for sequence in list_sequences(model)]


def list_sequences(model: MaxLoad) -> list[tuple[int, ...]]:
    """Orders of devices, as types: fastest, largest and first named come first, and the other way round."""
    total = np.where(np.isfinite(model.seconds), model.seconds, 0.0).sum(axis=0)
    named = np.repeat(np.arange(model.num_types), model.count)
    first = np.argsort(np.array([d for alike in model.devices for d in alike]), kind="stable")
    found = [named[first], named[np.argsort(total[named], kind="stable")]]
    found.append(named[np.argsort(-model.room[named], kind="stable")])
    both = [order for one in found for order in (one, one[::-1])]
    return list(dict.fromkeys(tuple(int(t) for t in order) for order in both))


def list_orders(model: MaxLoad) -> Iterator[Ints]:
    """Topological orders of different kinds, each once."""
    num = model.num_classes
    early, late = (
        _compute_depth(num, model.source, model.target),
        _compute_depth(num, model.target, model.source),
    )
    number = np.arange(num, dtype=np.float64)
    flat = np.zeros(num, dtype=np.int32)
    seen: set[bytes] = set()
    for key, newest in (
        (number, False),
        (number, True),
        (-number, True),
        (-late, False),
        (early, False),
        (-late, True),
        (late, True),
        (_seconds(model), True),
    ):
        for backwards in (False, True):
            order = order_topologically(model, flat, key, newest=newest, backwards=backwards)
            if order.tobytes() not in seen:
                seen.add(order.tobytes())
                yield order


def _seconds(model: MaxLoad) -> Floats:
    longest: Floats = np.where(np.isfinite(model.seconds), model.seconds, 0.0).max(axis=1)
    return -longest


def _compute_depth(num: int, source: Ints, target: Ints) -> Floats:
    """[num] the longest way to each class, in edges."""
    heads, pointer, waiting = _to_csr(num, source, target)
    depth = [0.0] * num
    ready = [v for v in range(num) if waiting[v] == 0]
    while ready:
        u = ready.pop()
        for v in heads[pointer[u] : pointer[u + 1]]:
            depth[v] = max(depth[v], depth[u] + 1.0)
            waiting[v] -= 1
            if waiting[v] == 0:
                ready.append(v)
    return np.array(depth)


def _to_csr(num: int, source: Ints, target: Ints) -> tuple[list[int], list[int], list[int]]:
    heads = target[np.argsort(source, kind="stable")].tolist()
    return heads, offsets(source, num).tolist(), np.bincount(target, minlength=num).tolist()


def order_topologically(
    model: MaxLoad, stage: Ints, key: Floats, *, newest: bool, backwards: bool = False
) -> Ints:
    """Stage by stage, inside a stage the class that became ready last first (`newest`), or by key."""
    num = model.num_classes
    ends = (model.target, model.source) if backwards else (model.source, model.target)
    heads, pointer, waiting = _to_csr(num, *ends)
    at, by = (-stage if backwards else stage).tolist(), key.tolist()
    heap = [(at[v], 0, by[v], v) for v in range(num) if waiting[v] == 0]
    heapq.heapify(heap)
    order = []
    while heap:
        u = heapq.heappop(heap)[3]
        order.append(u)
        for v in heads[pointer[u] : pointer[u + 1]]:
            waiting[v] -= 1
            if waiting[v] == 0:
                heapq.heappush(heap, (at[v], -len(order) if newest else 0, by[v], v))
    return np.array(order[::-1] if backwards else order, dtype=np.int32)

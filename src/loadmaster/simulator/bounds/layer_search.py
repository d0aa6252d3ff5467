"""What no plan can beat, by the layers of a training step: prices, a relaxed diagram, branching on devices.

The steps of a spine (`spine_steps.py`) are searched by `layer_diagram.py`. A *branch* says which devices
some layers may use. To begin with there is one for each pair of devices of the first and the last layer,
of devices that nothing tells apart only one; every plan is in a branch, so the least of their bounds
holds. Prices of bytes and work are found by subgradients; then the diagram is searched with labels kept
apart as far as its width goes. The weakest branch is divided on, where its cheapest choices disagree most.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.problem import Problem
from loadmaster.simulator.bounds.layer_diagram import NEVER, ONE, keep_options, price_steps, search_layers
from loadmaster.simulator.bounds.spine_steps import SpineSteps, build_spine_steps
from loadmaster.simulator.bounds.window_options import SOMEWHERE

WIDTH = 128
FEW_OPTIONS, MANY_OPTIONS = 3_200, 8_000  # of a step
_PRICED_OPTIONS = 20_000_000  # at the root: some tenths of a second
_TIMES_PRUNED = 3  # while the root's prices are looked for
_AT_A_BRANCH = 0.2  # of the rounds of the root, whose prices it begins with
_FEWEST_ROUNDS, _MOST_ROUNDS = 60, 1_000
_PRICED = 10  # branches at most for each one that is searched
_PACE, _SLOWER, _PATIENCE = 1.5, 0.7, 20  # of the steps of subgradients
_SPELL, _GROWTH = 80, 1e-4  # rounds that must gain so much of the limit, or they are the last
_PARTS = 6  # layers from which work has a price
_BELOW = 1.0 - 1e-12
_AMBITION, _NEARLY = 0.2, 1e-3  # of what is left to the limit, and of the limit: what a search is to prove


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Open devices [K + 1, D] by layer from the last, and prices found for it."""

    open_at: Bools
    point: Floats  # [D + parts * rows] prices in ticks
    split_at: int  # layer to divide, -1 = none
    searched: bool = False  # by the diagram


class LayerSearch:
    """Steps as flat arrays, and what is done with them."""

    def __init__(self, steps: SpineSteps, upper_s: float) -> None:
        """`upper_s`: a plan takes this long, or nothing above it is asked."""
        self.steps = steps
        options = steps.steps
        self.ptr = np.cumsum([0, *(len(o.start) for o in options)]).astype(np.int64)
        self.first_origin = self.ptr
        self.start = np.concatenate([o.start for o in options])
        self.end = np.concatenate([o.end for o in options])
        self.span = np.concatenate([o.forward + o.backward for o in options])
        self.work = np.concatenate([o.work for o in options])
        self.num_bytes = np.concatenate([o.num_bytes for o in options])
        self.origin = np.arange(len(self.start))
        self.limit = int(np.ceil(upper_s / steps.tick_s)) + 1
        self.scale = float(self.limit)
        self.num_layers, self.num = len(options) + 1, len(steps.first)
        self.num_rows = 2 * (int(steps.engine.max()) + 1)
        self.room = np.minimum(steps.room, 1 << 56)
        self.open_at = np.ones((self.num_layers, self.num), dtype=np.bool_)
        self.starts = np.unique(np.linspace(0, self.num_layers - 1, _PARTS, endpoint=False).astype(np.int64))
        total = int(self.num_bytes.max(initial=0)) * self.num_layers + steps.first_bytes + 1
        self.priced_room = np.where(self.room < total, self.room, 0)
        self.most_price = (1 << 58) // max(total * self.num, 1)
        self.up = np.zeros((self.num_layers, self.num), dtype=np.int64)
        self.down = np.zeros((self.num_layers, self.num), dtype=np.int64)
        self.chosen = np.zeros(max(self.num_layers - 1, 1), dtype=np.int64)

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.ptr, self.start, self.end, self.span, self.work, self.num_bytes

    @property
    def _ends(self) -> tuple[Any, ...]:
        steps = self.steps
        return steps.first, steps.first_work, steps.first_bytes, steps.last, steps.before, steps.engine

    def _price(self, byte_price: Longs, work_price: Longs, open_at: Bools) -> int:
        prices = (byte_price, work_price, open_at, self.up, self.down, self.chosen)
        given: list[Any] = [*self._options, *self._ends, *prices]
        return int(price_steps(*given))

    def first_point(self) -> Floats:
        """No prices."""
        return np.zeros(self.num + len(self.starts) * self.num_rows)

    def prices(self, point: Floats) -> tuple[Longs, Longs]:
        """Whole prices of a byte on each device, and of work of each engine at every layer."""
        with np.errstate(divide="ignore", invalid="ignore"):
            a_byte = np.where(self.priced_room > 0, point[: self.num] / self.priced_room * ONE, 0.0)
        byte_price = np.minimum(a_byte, float(self.most_price)).astype(np.int64)
        share = point[self.num :].reshape(len(self.starts), self.num_rows) / self.scale
        work_price = np.zeros((self.num_layers, self.num_rows), dtype=np.int64)
        for row, begin in zip(np.floor(share * ONE).astype(np.int64), self.starts, strict=True):
            work_price[begin:] += row
        return byte_price, work_price

    def price(self, open_at: Bools, point: Floats) -> int:
        """What prices prove of a branch, in ticks."""
        byte_price, work_price = self.prices(point)
        best = self._price(byte_price, work_price, open_at)
        if best >= NEVER:
            return self.limit
        budget = sum(int(r) * int(p) for r, p in zip(self.room, byte_price, strict=True))
        return min(-((budget - int(best)) // ONE), self.limit)

    def improve_prices(self, open_at: Bools, point: Floats, rounds: int) -> tuple[int, Floats, Floats]:
        """The best bound of some rounds, its prices, and [K + 1, D] how often a layer was where at last."""
        best, best_point, often = -1, point, np.zeros((self.num_layers, self.num))
        before = -1
        pace, idle = _PACE, 0
        for at in range(rounds):
            bound = self.price(open_at, point)
            if bound >= self.limit:
                return self.limit, point, often
            if bound > best:
                best, best_point, idle = bound, point, 0
            else:
                idle += 1
                if idle >= _PATIENCE:
                    pace, idle = _SLOWER * pace, 0
            if at % _SPELL == _SPELL - 1:
                if best - before < _GROWTH * self.limit:
                    break
                before, often[:] = best, 0.0
            slope = self._slope(often)
            size = float(slope @ slope)
            if size < 1e-18:
                break
            point = self._project(point + pace * (self.limit - bound) / size * slope)
        return best, best_point, often

    @property
    def num_rounds(self) -> int:
        """Rounds of subgradients that take some tenths of a second."""
        return min(max(_PRICED_OPTIONS // max(len(self.start), 1), _FEWEST_ROUNDS), _MOST_ROUNDS)

    def _slope(self, often: Floats) -> Floats:
        """How the bound changes with the prices, by the cheapest choice."""
        path = self.chosen[: self.num_layers - 1]
        used = self.num_bytes[path].sum(axis=0)
        used[self.start[path[0]]] += self.steps.first_bytes
        often[np.arange(len(path)), self.start[path]] += 1
        often[-1, self.end[path[-1]]] += 1
        held = np.where(
            self.priced_room > 0, (used - self.priced_room) / np.maximum(self.priced_room, 1), 0.0
        )
        chain = np.append(self.span[path], self.steps.last[self.end[path[-1]]])
        rest = np.cumsum(chain[::-1])[::-1]
        load = np.cumsum(self.work[path][::-1], axis=0)[::-1]
        late = load[np.minimum(self.starts, len(path) - 1)] - rest[self.starts][:, None]
        late += self.steps.before[:, self.end[path[-1]]]
        begin = self.start[path[0]]
        rows = self.steps.engine[begin] + np.array([0, self.num_rows // 2])
        late[0, rows] += self.steps.first_work[begin] - self.steps.first[begin]
        return np.concatenate([held, late.reshape(-1) / self.scale])

    def _project(self, point: Floats) -> Floats:
        point = np.maximum(point, 0.0)
        total = float(point[self.num :].sum())
        if total > self.scale:
            point[self.num :] *= self.scale / total
        return point

    def search(self, open_at: Bools, point: Floats, width: int, aim: int) -> int:
        """What the merged diagram proves of a branch, in ticks, `aim` if it is no less."""
        return self._search(open_at, point, width, aim, merge=True)[0]

    def _search(
        self, open_at: Bools, point: Floats, width: int, limit: int, *, merge: bool, room: Longs | None = None
    ) -> tuple[int, int, Longs, Longs]:
        byte_price, work_price = self.prices(point)
        none, free = np.zeros_like(byte_price), np.zeros_like(work_price)
        self._price(none, free, open_at)
        plain = np.where(self.down >= NEVER, NEVER, self.down // ONE)
        self._price(byte_price, work_price, open_at)
        rows = 0 if merge else len(self.ptr) - 1
        parent = np.zeros((rows, self.num * width), dtype=np.int64)
        taken = np.zeros((rows, self.num * width), dtype=np.int64)
        rest = (self.down, plain, limit, width, merge, parent, taken)
        room = self.room if room is None else room
        prices = (room, self.steps.rest_bytes, byte_price, work_price, open_at)
        given: list[Any] = [*self._options, *self._ends, *prices, *rest]
        bound, label = search_layers(*given)
        return int(bound), int(label), parent, taken

    def find_choice(
        self, open_at: Bools, point: Floats, width: int, *, share: float = 1.0
    ) -> tuple[float, dict[int, int]] | None:
        """Seconds and devices by unit of the best choice that a narrow search without merging meets."""
        room = (self.room * share).astype(np.int64)
        bound, label, parent, taken = self._search(open_at, point, width, self.limit, merge=False, room=room)
        if label < 0:
            return None
        device: dict[int, int] = {}
        for k in range(self.num_layers - 2, -1, -1):
            option = int(taken[k, label])
            label = int(parent[k, label])
            device[int(self.steps.layer_unit[k + 1])] = int(self.end[option])
            if k == 0:
                device[int(self.steps.layer_unit[0])] = int(self.start[option])
            inner = self.steps.steps[k].inner[self.origin[option] - self.first_origin[k]]
            some = zip(self.steps.inner_units[k].tolist(), inner.tolist(), strict=True)
            device |= {u: d for u, d in some if d != SOMEWHERE}
        return bound * self.steps.tick_s, device

    def prune(self, open_at: Bools, point: Floats) -> None:
        """Drop options that no plan faster than the limit uses, by prices."""
        byte_price, work_price = self.prices(point)
        best = self._price(byte_price, work_price, open_at)
        if best >= NEVER:
            return
        budget = sum(int(r) * int(p) for r, p in zip(self.room, byte_price, strict=True))
        keep = np.ones(len(self.start), dtype=np.bool_)
        limit = self.limit * ONE + budget
        given: list[Any] = [*self._options, byte_price, work_price, self.up, self.down, limit, keep]
        keep_options(*given)
        self.ptr = np.concatenate([[0], np.cumsum(keep)])[self.ptr]
        self.start, self.end, self.span = self.start[keep], self.end[keep], self.span[keep]
        self.work, self.num_bytes = self.work[keep], self.num_bytes[keep]
        self.origin = self.origin[keep]

    def first_branches(self) -> Iterator[Bools]:
        """A branch for each pair of devices of the last and first layers, but for like ones."""
        alike = self._find_like_devices()
        for last, first in itertools.product(range(self.num), repeat=2):
            if any(alike[d, last] for d in range(last)):
                continue
            if any(alike[d, first] and d != last for d in range(first)) and first != last:
                continue
            open_at = np.ones((self.num_layers, self.num), dtype=np.bool_)
            open_at[0] = np.arange(self.num) == last
            open_at[-1] = np.arange(self.num) == first
            yield open_at

    def _find_like_devices(self) -> Bools:
        """[D, D] pairs that may be exchanged in all that the steps hold."""
        alike = np.zeros((self.num, self.num), dtype=np.bool_)
        engine, steps = self.steps.engine, self.steps
        lone = np.bincount(engine)[engine] == 1
        for i, j in itertools.combinations(range(self.num), 2):
            ends = all(
                row[i] == row[j]
                for row in (steps.first, steps.first_work, steps.last, *steps.before, steps.room)
            )
            if ends and lone[i] and lone[j]:
                alike[i, j] = alike[j, i] = all(
                    _is_symmetric(o, i, j, engine) for o in {id(o): o for o in steps.steps}.values()
                )
        return alike


def _is_symmetric(options: Any, i: int, j: int, engine: Ints) -> bool:
    """Whether what options cost stays the same when two devices are exchanged."""
    swap = np.arange(options.num_bytes.shape[1])
    swap[[i, j]] = [j, i]
    by_engine = np.arange(options.work.shape[1] // 2)
    by_engine[[engine[i], engine[j]]] = [engine[j], engine[i]]
    by_row = np.concatenate([by_engine, len(by_engine) + by_engine])

    def rows(exchanged: bool) -> Any:
        devices = np.column_stack([options.start, options.end])
        work, held = options.work, options.num_bytes
        if exchanged:
            devices, work, held = swap[devices], work[:, by_row], held[:, swap]
        table = np.column_stack([devices, options.forward + options.backward, work, held])
        return table[np.lexsort(table.T[::-1])]

    return bool(np.array_equal(rows(False), rows(True)))


class LayerBound:
    """What is proven so far, and branches to go on with: better the longer it is asked to `advance`."""

    def __init__(
        self, problem: Problem, upper_s: float, *, most_options: int = FEW_OPTIONS, coarse: bool = False
    ) -> None:
        """`upper_s`: what a plan takes, or a time that plans are not asked to beat."""
        self.steps = build_spine_steps(problem, upper_s, most_options=most_options, coarse=coarse)
        self._waiting: list[tuple[int, int, Branch]] = []
        self._fresh: list[Bools] = []
        self._serial = itertools.count()
        if self.steps is None:
            return
        self.search = LayerSearch(self.steps, upper_s)
        self._root, self.point = 0, self.search.first_point()
        for _ in range(_TIMES_PRUNED):
            if self._root < self.search.limit:
                self.search.prune(self.search.open_at, self.point)
                self._root, self.point, _ = self.search.improve_prices(
                    self.search.open_at, self.point, self.search.num_rounds // _TIMES_PRUNED + 1
                )
        self.search.prune(self.search.open_at, self.point)
        self._fresh = list(self.search.first_branches())[::-1] if self._root < self.search.limit else []

    @property
    def seconds(self) -> float:
        """No step is shorter, or none is shorter than `upper_s`; 0 where there is no spine."""
        if self.steps is None:
            return 0.0
        least = self._waiting[0][0] if self._waiting else self.search.limit
        least = min(least, self._root) if self._fresh else max(least, self._root)
        # a limit in ticks is a little above `upper_s`: what reaches it says no more than that
        return min(least, self.search.limit - 2) * self.steps.tick_s * _BELOW

    @property
    def done(self) -> bool:
        """Whether nothing is left to divide."""
        if self._fresh or not self._waiting:
            return not self._fresh
        weakest = self._waiting[0][2]
        return weakest.searched and weakest.split_at < 0

    def advance(self, width: int = WIDTH) -> Branch | None:
        """Price one more branch, search the weakest or divide it; the branch where one was searched."""
        if self._fresh:
            self._add(self._fresh.pop(), self.point, self._root)
            return None
        bound, _, branch = heapq.heappop(self._waiting)
        if not branch.searched:
            aim = self._next_aim(bound)
            found = self.search.search(branch.open_at, branch.point, width, aim)
            branch = replace(branch, searched=found < aim)
            self._push(max(bound, found), branch)
            return branch if branch.searched else None
        for d in np.flatnonzero(branch.open_at[branch.split_at]):
            open_at = branch.open_at.copy()
            open_at[branch.split_at] = np.arange(self.search.num) == d
            self._add(open_at, branch.point, bound)
        return None

    def lower_limit(self, upper_s: float) -> None:
        """A faster plan was found: what is no faster need not be looked at."""
        if self.steps is not None:
            self.search.limit = min(self.search.limit, int(np.ceil(upper_s / self.steps.tick_s)) + 1)
            self._waiting = [one for one in self._waiting if one[0] < self.search.limit]
            heapq.heapify(self._waiting)

    def _next_aim(self, bound: int) -> int:
        """What to prove next of a branch: the lower, the fewer labels stay below it and are merged."""
        left = self.search.limit - bound
        return self.search.limit if left < _NEARLY * self.search.limit else bound + int(_AMBITION * left)

    def _add(self, open_at: Bools, point: Floats, least: int) -> None:
        rounds = max(int(_AT_A_BRANCH * self.search.num_rounds), _FEWEST_ROUNDS)
        bound, better, often = self.search.improve_prices(open_at, point, rounds)
        split = np.where(open_at, often, 0.0) / np.maximum(often.sum(axis=1, keepdims=True), 1.0)
        doubt = np.where(open_at.sum(axis=1) == 1, -1.0, 1.0 - split.max(axis=1))
        at = int(doubt.argmax()) if doubt.max() >= 0 else -1
        self._push(max(bound, least), Branch(open_at, better, at))

    def _push(self, bound: int, branch: Branch) -> None:
        if bound < self.search.limit:
            heapq.heappush(self._waiting, (bound, next(self._serial), branch))


def bound_by_layers(
    problem: Problem,
    upper_s: float,
    *,
    most_branches: int,
    width: int = WIDTH,
    most_options: int = FEW_OPTIONS,
    coarse: bool = False,
) -> float:
    """Seconds that no step is below, or none is below `upper_s`; 0 without a spine. So many are searched."""
    found, searched = LayerBound(problem, upper_s, most_options=most_options, coarse=coarse), 0
    for _ in range(_PRICED * most_branches):
        if found.done or searched == most_branches:
            break
        searched += found.advance(width) is not None
    return found.seconds

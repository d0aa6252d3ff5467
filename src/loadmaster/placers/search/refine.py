"""Local search with the simulator: starts from a plan and moves the ops that the step waits for.

A move gives one unit, a row of neighbours or a module to another device, swaps two units, or lets an op
start sooner or later (`_moves.py`). It is timed by replaying the present plan from the last snapshot that
the move cannot touch (`_replay.py`), thousands of moves a second on 10,000 ops; what is better is timed and
sized again by the simulator before it is kept, several improvements at a time while they keep being
confirmed. So the answer is never worse than its start and always as feasible. When nothing better is found
for long, a few random units are moved and the search goes on from there. Anytime; deterministic under a
count budget, and a larger budget continues the same search.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats, Ints, offsets, sorted_unique
from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.core.run import Run, Score
from loadmaster.core.units import format_seconds
from loadmaster.placers.answer import Meter, Tally
from loadmaster.placers.fixed_plan import why_foreign
from loadmaster.placers.grouping.groups import GroupedProblem, group_ops
from loadmaster.placers.heuristic._list_kernel import upward_rank
from loadmaster.placers.heuristic._lists import Lists, load_lists
from loadmaster.placers.placement_units import Cargo
from loadmaster.placers.registry import Placer, placer
from loadmaster.placers.search._moves import Cast, Move, blank_move, climb, critical_units
from loadmaster.placers.search._replay import NONE, Tape, Weights, blank_tape, replay
from loadmaster.simulator.events.engine import LINK_CODE, is_unordered
from loadmaster.simulator.events.throughput import hop_s

_SNAPSHOTS = 32
_TAPE_BYTES = 2**28  # of snapshots at most
_HEAP_ROOM = 4096
_MOST_UNCONFIRMED = 32
_EVENTS_A_CALL = 2_000_000  # ops replayed before the clock is looked at
_SHRUNK = 0.7  # groups per smaller group or op from which on they are moved first
_MOST_OPS = 200_000  # beyond that only groups are moved
_NEARLY = 1.01  # a start this much worse than the best plan is taken
_SHAKEN = 4  # units moved at random when a climb has ended


@dataclass(frozen=True, slots=True)
class Refine:
    """`start`: a plan, or the algorithm whose plan is refined; `patience`: tries per unit without success
    that end a climb; `kicks`: how often the search goes on from a shaken plan.
    """

    start: str | Plan = "m_etf"
    patience: int = 10
    kicks: int = 100
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __post_init__(self) -> None:
        """Refuse what is no start."""
        if not isinstance(self.start, str | Plan):
            given = type(self.start).__name__
            hint = "; of a Placement, give its .plan" if isinstance(self.start, Placement) else ""
            raise InputError(f"refine cannot start from a {given}; give a plan or an algorithm's name{hint}")
        for field in ("patience", "kicks"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(f"refine: {field} is {value!r}; give a whole number >= 0")

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Construct, then move until the budget is spent, the bound is met or nothing helps."""
        meter, tally = Meter(run), Tally(problem, run)
        if isinstance(self.start, Plan):
            _require_own(problem, self.start)
            tally.offer(self.start, in_order=not is_unordered(self.start))
        else:
            tally.adopt(placer(self.start)(problem, meter.member()))
            tally.scored = meter.count
        tally.mend()
        room = not run.out_of_budget(tally.scored + 2)  # for one try and one confirmation
        if room and tally.best_score.overflow_bytes == 0:
            self.improve(tally)
        return tally.answer(algorithm="refine")

    def improve(self, tally: Tally) -> None:
        """Refine the best plan of a tally within its budget: groups, where they are few, then units."""
        levels = _make_searches(tally)
        for kick in range(self.kicks + 1):
            for level in levels:
                if tally.run.out_of_budget(tally.scored + 3):  # a start, one try and its confirmation
                    return
                if level.take(tally.best_plan, shaken=_SHAKEN if kick else 0):
                    level.climb_until(self.patience * level.lists.cargo.num_units)
                if level.over:
                    return


def _require_own(problem: Problem, plan: Plan) -> None:
    """Refuse a start that is no plan of this problem."""
    broken = why_foreign(problem, plan)
    if broken:
        raise InputError(f"refine cannot start from that plan: {broken}; give a plan of this problem")


def _make_searches(tally: Tally) -> list["_Search"]:
    """Searches over groups, over groups no longer than the longest op, and over single units.

    Groups only where they are few against what comes next, units only where these are not too many.
    """
    problem = tally.problem
    num_ops = problem.graph.num_ops
    coarse = group_ops(problem, max_ops=_MOST_OPS if num_ops > _MOST_OPS else None)
    fine = group_ops(problem, merge_branches=False, time_share=num_ops)
    sizes = [coarse.problem.graph.num_ops, fine.problem.graph.num_ops, num_ops]
    levels = []
    for groups, size, following in ((coarse, sizes[0], sizes[1]), (fine, sizes[1], sizes[2])):
        if size <= _SHRUNK * following and size <= _MOST_OPS:
            levels.append(_Search(tally, load_lists(groups.problem), groups))
    if num_ops <= _MOST_OPS or not levels:
        levels.append(_Search(tally, load_lists(problem), None))
    return levels


class _Search:
    """The present plan and its tape; `base` is the last plan of a climb that the simulator confirmed."""

    def __init__(self, tally: Tally, lists: Lists, groups: GroupedProblem | None) -> None:
        self.tally, self.lists, self.groups, self.rng = tally, lists, groups, tally.run.rng
        problem, cargo, fixed = lists.problem, lists.cargo, lists.fixed
        num_ops, engines = problem.graph.num_ops, fixed.num_engines
        self.links = LINK_CODE[problem.links]
        self.least_s = np.where(cargo.fits[cargo.of_op], problem.device_compute_s, np.inf).min(axis=1)
        self.most_s = np.where(cargo.fits[cargo.of_op], problem.device_compute_s, 0.0).max(axis=1)
        self.rank_s = upward_rank(fixed, self.least_s, np.zeros(problem.graph.num_tensors))
        self.cast, self.weights = (
            _build_cast(problem, cargo),
            _build_weights(problem, lists, self.rank_s - self.least_s),
        )
        heap_room = min(num_ops, _HEAP_ROOM)
        row_bytes = 12 * (num_ops + 2 * engines * heap_room)
        self.tape: Tape = blank_tape(
            num_ops,
            engines,
            max(fixed.num_links, problem.cluster.num_devices),
            snapshots=int(np.clip(_TAPE_BYTES // row_bytes, 2, _SNAPSHOTS)),
            heap_room=heap_room,
        )
        self.move: Move = blank_move(num_ops)
        self.chain = np.empty(num_ops, dtype=np.int32)
        self.batch, self.pending = 1, 0

    @property
    def over(self) -> bool:
        """Whether the budget is spent but for one last confirmation, or the bound is met."""
        spent = self.tally.run.out_of_budget(self.tally.scored + 1)
        return spent or self.tally.best_score <= Score(0, self.tally.run.bound.seconds * (1.0 + 1e-9))

    def climb_until(self, patience: int) -> None:
        """Move to better plans until `patience` tries in a row brought nothing."""
        idle = 0
        while not self.over and idle < patience:
            seconds, tried, begin = self._try_moves(patience - idle)
            self.tally.scored += tried
            idle += tried
            if seconds == np.inf:
                self._report_progress()
                continue
            self._record(begin)
            self.pending += 1
            if self.pending >= self.batch and self._confirm():
                idle = 0
        self._confirm()

    def take(self, plan: Plan, *, shaken: int) -> bool:
        """Start from a plan of the ops, a few random units put elsewhere; by its order or by rank.

        False: groups cannot say what the plan says; their nearest plan is much worse.
        """
        cargo = self.lists.cargo
        self.device, self.key = self._own(plan)
        for _ in range(shaken):
            u, d = int(self.rng.integers(cargo.num_units)), int(self.rng.integers(cargo.fits.shape[1]))
            if cargo.fits[u, d]:
                self.device[cargo.of_op == u] = d
        own, own_s = self.key, self._record()
        self.key = np.empty(len(own))
        self.key[np.lexsort((np.arange(len(own)), -self.rank_s))] = np.arange(len(own))
        if self._record() >= own_s:
            self.key = own
            self._record()
        score = self.tally.offer(self._plan())
        self.base: tuple[Ints, Floats, Score] = (self.device.copy(), self.key.copy(), score)
        best = self.tally.best_score
        return self.groups is None or shaken > 0 or score <= Score(best.overflow_bytes, best.time_s * _NEARLY)

    def _own(self, plan: Plan) -> tuple[Ints, Floats]:
        """Device and key of this level's ops: those of the longest op of a group."""
        if self.groups is None:
            return plan.device.copy(), plan.priority.astype(np.float64)
        op_of, seconds = self.groups.coarse.op_of, self.tally.problem.costs.compute_s.min(axis=1)
        order = np.lexsort((np.arange(len(op_of)), -seconds, op_of))
        longest = order[np.searchsorted(op_of[order], np.arange(self.lists.problem.graph.num_ops))]
        return plan.device[longest], plan.priority[longest].astype(np.float64)

    def _try_moves(self, most: int) -> tuple[float, int, int]:
        tries, limit = max(1, _EVENTS_A_CALL // len(self.key)), self.tally.run.budget.count
        if limit is not None:
            tries = min(tries, limit - self.tally.scored - 1)
        found: tuple[float, int, int] = climb(
            self.rng,
            self.lists.fixed,
            self.weights,
            self.cast,
            self.links,
            self.device,
            self.key,
            self.tape,
            self.move,
            self.used_bytes,
            self.most_s,
            self.critical,
            min(tries, most),
            self.present_s,
        )
        return found

    def _confirm(self) -> bool:
        """Have the simulator judge the present plan; what is no better than the base is given up."""
        if self.pending == 0:
            return False
        score = self.tally.offer(self._plan())
        better = score < self.base[2]
        if better:
            self.base = (self.device.copy(), self.key.copy(), score)
            self.batch = min(2 * self.batch, _MOST_UNCONFIRMED)
        else:
            self.batch = 1
            self._restore(self.base)
        self.pending = 0
        self._report_progress()
        return better

    def _restore(self, plan: tuple[Ints, Floats, Score]) -> None:
        self.device, self.key = plan[0].copy(), plan[1].copy()
        self._record()

    def _record(self, begin: int = 0) -> float:
        """Run the present plan again from a snapshot on, and find what its end waits for."""
        fixed, cargo = self.lists.fixed, self.lists.cargo
        self.present_s = float(
            replay(fixed, self.weights, self.links, self.device, self.key, self.tape, begin, np.inf)
        )
        count = critical_units(fixed, self.tape, cargo.of_op, self.chain)
        self.critical: Ints = self.chain[:count]
        where = self.device[self.cast.unit_op[self.cast.unit_ptr[:-1]]]
        self.used_bytes = np.bincount(where, cargo.held_bytes, cargo.fits.shape[1]).astype(np.float64)
        return self.present_s

    def _plan(self) -> Plan:
        priority = np.empty(len(self.key), dtype=np.int32)
        priority[np.lexsort((np.arange(len(self.key)), self.key))] = np.arange(len(self.key), dtype=np.int32)
        plan = plan_of(self.device.copy(), priority)
        return plan if self.groups is None else self.groups.back(plan)

    def _report_progress(self) -> None:
        text = f"refine: {self.tally.scored:,} moves, {format_seconds(self.tally.best_score.time_s)}"
        self.tally.run.progress(text, 0.0)


def _build_cast(problem: Problem, cargo: Cargo) -> Cast:
    """Units with their ops, neighbours and modules."""
    graph, num = problem.graph, cargo.num_units
    unit_op = np.argsort(cargo.of_op, kind="stable").astype(np.int32)
    unit_ptr = offsets(cargo.of_op, num)
    maker, user = cargo.of_op[graph.tensor_op[graph.use_tensor]], cargo.of_op[graph.use_op]
    away = maker != user
    one, other = maker[away].astype(np.int64), user[away].astype(np.int64)
    pair = sorted_unique(np.concatenate([one * num + other, other * num + one]))
    known: dict[str, int] = {}
    names = [graph.module[op] for op in unit_op[unit_ptr[:-1]].tolist()]
    module = np.array([known.setdefault(n, len(known)) if n else NONE for n in names], dtype=np.int32)
    within = np.flatnonzero(module != NONE)
    return Cast(
        unit_ptr=unit_ptr,
        unit_op=unit_op,
        near_ptr=offsets((pair // num).astype(np.int32), num),
        near=(pair % num).astype(np.int32),
        module=module,
        module_ptr=offsets(module[within], max(len(known), 1)),
        module_unit=within[np.argsort(module[within], kind="stable")].astype(np.int32),
        fits=cargo.fits,
        held_bytes=cargo.held_bytes,
        room_bytes=problem.cluster.usable_bytes.astype(np.float64),
    )


def _build_weights(problem: Problem, lists: Lists, tail_s: Floats) -> Weights:
    work_s = lists.mean_s + max(1e-3 * float(lists.mean_s.mean()), 1e-12)  # ops of no time count a little
    hops = np.zeros((2, 0, 0))
    if problem.links == Links.HOST:
        every = np.arange(problem.graph.num_tensors, dtype=np.int32)
        devices = range(problem.cluster.num_devices)
        ways = (True, False)
        hops = np.stack(
            [np.stack([hop_s(problem, every, d, to_host=way) for d in devices], axis=1) for way in ways]
        )
    return Weights(tail_s=tail_s, work_s=work_s, total_s=float(work_s.sum()), hop_s=hops)


PLACER: type[Placer] = Refine

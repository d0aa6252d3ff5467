"""Solves small problems exactly: tries every plan that may be better, and rules out the rest by a bound.

A step: depth first over op sequences and devices (`_latency/tree.py`). Throughput: depth first over the
devices of units, the longest first, cut where the busiest engine, or all engines together, cannot be better
than the best split; a split that is better looks for an order within memory by the same tree of sequences.
Where everything has been walked, the answer is optimal in the simulator's own semantics, or it is proven that
nothing fits: no relaxation of memory, contention or issue times stands between. Exponential; meant for up to
about a dozen units on two or three devices. A count budget counts plans and splits that were judged, and the
walk is cut off at so many branches for each of them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import held_bytes, units
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem, allowed_devices
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally, broken_rules
from loadmaster.placers.exact._latency.symmetry import find_alike_devices
from loadmaster.placers.exact._latency.tree import END, LEAF, NODES, walk_tree
from loadmaster.placers.registry import Placer
from loadmaster.simulator.bounds.favourite_children import pair_table
from loadmaster.simulator.bounds.travel import compute_travel
from loadmaster.simulator.events.engine import LINK_CODE, is_unordered, prepare
from loadmaster.simulator.events.event_kernel import run_events
from loadmaster.simulator.events.kernel import IN_ORDER
from loadmaster.simulator.events.throughput import steady_state

_LEAP = 20_000  # branches between two looks at the clock
_BRANCHES = 100  # for each leaf of a count budget
_SPLITS = 8  # for each plan of a count budget: none of them is simulated
_OFFERS = 2  # plans scored beside: the first and the best
_OP_AT, _DEVICE = 2, 5  # in the state of a walk


@dataclass(frozen=True, slots=True)
class BranchAndBound:
    """`start`: a plan whose time is to be beaten."""

    start: Plan | None = None
    max_ops: ClassVar[int] = 60

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Walk the tree until it or the budget ends."""
        tally = Tally(problem, run)
        if self.start is None:
            tally.offer(plan_of(_first_devices(problem)))
        else:
            tally.offer(self.start, in_order=not is_unordered(self.start))
        if tally.spent:
            return tally.answer(algorithm="branch_and_bound")
        known = tally.best_score
        fits = known.overflow_bytes == 0 and not broken_rules(problem, tally.best_plan)
        best_s = known.time_s if fits else np.inf
        if problem.objective == Objective.STEP:
            tree = _Tree(problem, best_s)
            whole, plan = tree.walk(run), tree.best_plan
            tried = f"{tree.counts[NODES]} branches walked, {tree.judged} plans tried"
        else:
            splits = _Splits(problem, best_s)
            whole, plan = splits.walk(run), splits.best_plan
            tried = f"{splits.judged} splits tried"
        if plan is not None:
            tally.offer(plan, in_order=True)
        proof = f"every other plan was ruled out: {tried}" if whole else ""
        return tally.answer(algorithm="branch_and_bound", proof=proof)


class _Tree:
    """Sequences of ops: where the walk is, and the best plan it found."""

    def __init__(self, problem: Problem, best_s: float) -> None:
        graph = problem.graph
        self.problem, self.fixed = problem, prepare(problem).fixed
        unit, num_units = units(graph)
        travel = compute_travel(problem)
        self.tables = travel.op_s, travel.head_s, travel.tail_s, _move_s(problem)
        self.unit, self.twin = unit, _name_twins(problem)
        can_run = np.isfinite(travel.op_s)
        self.only = np.where(can_run.sum(axis=1) == 1, can_run.argmax(axis=1), -1).astype(np.int32)
        self.held = np.zeros(num_units, dtype=np.int64)
        np.add.at(self.held, unit, held_bytes(graph))
        self.best_s = best_s
        self.begin()

    def begin(self) -> None:
        """To the root; nothing was found yet."""
        graph, num_devices, num_units = self.problem.graph, self.problem.cluster.num_devices, len(self.held)
        num_ops = graph.num_ops
        self.counts = np.zeros(2, dtype=np.int64)
        none = np.full(num_ops, -1, dtype=np.int32)
        self.state: tuple[Any, ...] = (
            self.counts,
            np.zeros(num_ops + 1, dtype=np.int64),
            none.copy(),
            np.zeros(num_ops),
            np.zeros(num_ops),
            none.copy(),
            np.full(num_units, -1, dtype=np.int32),
            np.zeros(num_units, dtype=np.int32),
            np.zeros(self.fixed.num_engines),
            np.zeros(num_ops),
            np.zeros(num_devices, dtype=np.int64),
            np.zeros(num_devices, dtype=np.int64),
        )
        self.best_plan: Plan | None = None  # better than the first
        self.judged = 0

    def find_order(self, device: Ints, run: Run) -> tuple[Plan | None, bool]:
        """Of given devices [N] any order that fits, and whether all were tried within the budget."""
        op_s, *others = self.tables
        num_devices = op_s.shape[1]
        given = np.where(device[:, None] == np.arange(num_devices), op_s, np.inf)
        self.begin()
        self.best_s, self.tables, twin, only = np.inf, (given, *others), self.twin, self.only
        self.twin = np.full(num_devices, -1, dtype=np.int32)  # devices are named: none stands for another
        self.only = device.astype(np.int32)
        whole = self.walk(run, any_will_do=True)
        self.tables, self.twin, self.only = (op_s, *others), twin, only
        return self.best_plan, whole

    def walk(self, run: Run, *, any_will_do: bool = False) -> bool:
        """Whether the whole tree, or up to the first plan that fits, was walked within the budget."""
        issue, room = bool(self.fixed.issue_s.any()), self.problem.cluster.usable_bytes
        tree = self.fixed, issue, self.tables, self.unit, self.twin, self.only, self.held, room, self.state
        while True:
            why = walk_tree(*tree, self.best_s, _LEAP)
            if why == LEAF:
                self._judge(issue)
                if any_will_do and self.best_plan is not None:
                    return True
            else:
                run.progress(f"branch and bound: {self.counts[NODES]} branches", 0.0)
            if why == END or run.out_of_budget(
                _OFFERS + max(int(self.counts[NODES]) // _BRANCHES, self.judged)
            ):
                return bool(why == END)

    def _judge(self, issue: bool) -> None:
        """Simulate the plan that the walk stands at; keep it if it fits and is the best."""
        self.judged += 1
        device, order = self.state[_DEVICE].copy(), self.state[_OP_AT]
        priority = np.empty(len(order), dtype=np.int32)
        priority[order] = np.arange(len(order), dtype=np.int32)
        for column in (device, priority):  # as the columns of a plan are: compiled for these
            column.flags.writeable = False
        links = LINK_CODE[self.problem.links]
        _, end, _, peak, _, _, _, moved, _ = run_events(self.fixed, device, priority, IN_ORDER, links, issue)
        seconds = float(max(end.max(), moved.max(initial=0.0)))
        if seconds < self.best_s and (peak <= self.problem.cluster.usable_bytes).all():
            self.best_s, self.best_plan = seconds, plan_of(device, priority)


class _Splits:
    """Devices of units: how far the walk is, and the best split found."""

    def __init__(self, problem: Problem, best_s: float) -> None:
        self.problem, self.best_s, self.judged = problem, best_s, 0
        self.best_plan: Plan | None = None
        self.whole = True  # whether every split that might be better was judged, its orders too
        unit, num_units = units(problem.graph)
        self.unit, self.allowed = unit, allowed_devices(problem, unit, num_units)
        seconds = np.zeros((num_units, problem.cluster.num_devices))
        np.add.at(seconds, unit, problem.device_compute_s)
        self.seconds = np.where(self.allowed, seconds, np.inf)
        self.held = np.zeros(num_units, dtype=np.int64)
        np.add.at(self.held, unit, held_bytes(problem.graph))
        self.order = np.argsort(-self.seconds.min(axis=1), kind="stable").tolist()
        self.rest_s = np.append(np.cumsum(self.seconds.min(axis=1)[self.order][::-1])[::-1], 0.0)
        engines, self.engine = np.unique(problem.cluster.engine, return_inverse=True)
        self.busy_s, self.filled = (
            np.zeros(len(engines)),
            np.zeros(problem.cluster.num_devices, dtype=np.int64),
        )
        self.tree = _Tree(problem, best_s)
        self.twin, self.device = self.tree.twin, np.full(num_units, -1, dtype=np.int32)

    def walk(self, run: Run) -> bool:
        """Whether all splits were judged or ruled out within the budget."""
        self._descend(0, run)
        return self.whole

    def _descend(self, k: int, run: Run) -> None:
        if k == len(self.order):
            self._judge(run)
            return
        u = self.order[k]
        for d in np.argsort(self.seconds[u], kind="stable").tolist():
            if run.out_of_budget(_OFFERS + self.judged // _SPLITS):
                self.whole = False
                return
            if not self._is_open(u, d):
                continue
            before_s = self.busy_s[self.engine[d]]
            self.busy_s[self.engine[d]] += self.seconds[u, d]
            self.filled[d] += self.held[u]
            self.device[u] = d
            least_s = max(self.busy_s.max(), (self.busy_s.sum() + self.rest_s[k + 1]) / len(self.busy_s))
            if least_s < self.best_s * (1.0 - 1e-12):
                self._descend(k + 1, run)
            self.device[u] = -1
            self.filled[d] -= self.held[u]
            self.busy_s[self.engine[d]] = before_s

    def _is_open(self, u: int, d: int) -> bool:
        """Whether a unit may go to a device: allowed, room at its end, no like device before it idle."""
        fits = self.filled[d] + self.held[u] <= self.problem.cluster.usable_bytes[d]
        used = self.twin[d] < 0 or bool((self.device == self.twin[d]).any())
        return bool(self.allowed[u, d]) and bool(fits) and used

    def _judge(self, run: Run) -> None:
        """If the split is the best so far and keeps the rules, find an order that fits."""
        self.judged += 1
        plan = plan_of(self.device[self.unit])
        seconds = steady_state(self.problem, plan).time_s
        if seconds >= self.best_s or broken_rules(self.problem, plan):
            return
        ordered, ended = self.tree.find_order(plan.device, run)
        if ordered is not None:
            self.best_s, self.best_plan = seconds, ordered
        elif not ended:
            self.whole = False


def _first_devices(problem: Problem) -> Ints:
    """Every op on the first device it may use."""
    allowed: Ints = np.isfinite(compute_travel(problem).op_s).argmax(axis=1).astype(np.int32)
    return allowed


def _move_s(problem: Problem) -> Any:
    """[T, D, D] seconds of a transfer that waits for nobody."""
    table = pair_table(problem.cluster, problem.links)
    given, num_bytes = problem.costs.transfer_s[:, None, None], problem.graph.tensor_bytes[:, None, None]
    least = np.where(given >= 0, given * table[:, :, 2], table[:, :, 0] + num_bytes * table[:, :, 1])
    here = np.arange(problem.cluster.num_devices)
    least[:, here, here] = 0.0
    return least


def _name_twins(problem: Problem) -> Ints:
    """[D] the like device that is used before this one, or -1."""
    twin = np.full(problem.cluster.num_devices, -1, dtype=np.int32)
    for devices in find_alike_devices(problem):
        twin[devices[1:]] = devices[:-1]
    return twin


PLACER: type[Placer] = BranchAndBound

"""Slicers: from keys of nodes to a plan, so that whatever a network says, the plan obeys every rule.

For throughput the keys are listed into a topological order of classes, and the linearised dynamic programme
cuts it: the best chain along that order. For a step they are the order in which ops are inserted, each on the
device where it ends first or, where wished, on the device the network scores best that still has room.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Objective, Problem
from loadmaster.placers.exact._maxload.contract import Chain, chain_model
from loadmaster.placers.exact._maxload.lines import _Line, list_orders, order_topologically
from loadmaster.placers.exact._maxload.packed import loads_s
from loadmaster.placers.heuristic._insert_kernel import insert_ops, ready_order
from loadmaster.placers.heuristic._list_kernel import NOWHERE
from loadmaster.placers.heuristic._lists import Lists, load_lists
from loadmaster.placers.learned._groups import Groups
from loadmaster.placers.learned._scene import Scene, scene_of_step, scene_of_throughput
from loadmaster.simulator.events.kernel import PARALLEL


@dataclass(frozen=True, slots=True, eq=False)
class Sliced:
    """A plan, and what the slicer itself thinks it takes."""

    plan: Plan
    expected_s: float


class StepSlicer:
    """Ops inserted in the order of their keys."""

    def __init__(self, problem: Problem, groups: Groups) -> None:
        self.problem, self.groups = problem, groups
        self.lists: Lists = load_lists(problem)
        self.rules = self.lists.rules(None, PARALLEL)
        self.seconds = problem.device_compute_s

    def scene(self) -> Scene:
        """What the network sees."""
        return scene_of_step(self.problem, self.lists)

    def slice(self, key: Floats, wanted: Ints | None = None) -> Sliced | None:
        """The plan of keys [N]; `wanted` [U] names devices of groups."""
        order = ready_order(self.lists.fixed, np.ascontiguousarray(key, dtype=np.float64))
        hint = np.full(len(key), NOWHERE, dtype=np.int32)
        if wanted is not None:
            hint = wanted[self.groups.cargo.of_op].astype(np.int32)
        device, start = insert_ops(self.lists.fixed, self.rules, order, hint)
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        priority = np.empty(len(order), dtype=np.int32)
        priority[np.lexsort((place, start))] = np.arange(len(order), dtype=np.int32)
        end_s = start + self.seconds[np.arange(len(key)), device]
        return Sliced(plan_of(device, priority), float(end_s.max()))

    def wish(self, score: Floats, rng: np.random.Generator | None = None) -> Ints:
        """[U] the best device of each group that still has room, or one drawn by its score."""
        cargo = self.groups.cargo
        weight = self.lists.mean_s + 1e-3 * float(self.lists.mean_s.mean()) + 1e-300
        total: Floats = np.stack(
            [np.bincount(cargo.of_op, weight * column, cargo.num_units) for column in score.T], 1
        )
        total = total / np.bincount(cargo.of_op, weight, cargo.num_units)[:, None]
        total = np.where(cargo.fits, total, -np.inf)
        if rng is None:
            return self._take_best(total)
        chance = np.exp(total - total.max(axis=1, keepdims=True))
        drawn: Ints = self.groups.draw(chance, rng, 1)[0]
        return drawn

    def _take_best(self, score: Floats) -> Ints:
        """[U] the best device of each group in forward order; one without room left is not taken."""
        groups = self.groups
        num_bytes, room = groups.cargo.held_bytes, groups.room_bytes
        best: Ints = score.argmax(axis=1).astype(np.int32)
        if (np.bincount(best, num_bytes, groups.num_devices) <= room).all():
            return best
        left = room.copy()
        for u in range(groups.num):
            roomy = np.where(left >= num_bytes[u], score[u], -np.inf)
            if np.isfinite(roomy).any():
                best[u] = int(roomy.argmax())
            left[best[u]] -= num_bytes[u]
        return best


class LoadSlicer:
    """Classes in an order, cut best."""

    def __init__(self, problem: Problem, groups: Groups) -> None:
        self.problem, self.groups = problem, groups
        self.chain: Chain = chain_model(problem)
        self.line = _Line(self.chain.model)
        self._flat = np.zeros(self.chain.model.num_classes, dtype=np.int32)

    def scene(self) -> Scene:
        """What the network sees."""
        return scene_of_throughput(self.problem, self.chain.model)

    def order(self, key: Floats) -> Ints:
        """The topological order in which the least key comes first."""
        return order_topologically(self.chain.model, self._flat, key, newest=False)

    def slice(self, key: Floats, bound_s: float = 0.0) -> Sliced | None:
        """The best cut of the order of keys [C]; None where no cut has room for all."""
        return self.cut(self.order(key), bound_s)

    def cut(self, order: Ints, bound_s: float = 0.0) -> Sliced | None:
        """The best cut of an order."""
        stages = self.line.first(order, bound_s)
        if stages is None:
            return None
        device = stages.device(self.chain.model)
        row = device[self.chain.class_of_unit].astype(np.int32)
        return Sliced(self.groups.plan(row), float(loads_s(self.chain.model, device).max()))

    def usual(self, bound_s: float = 0.0) -> Sliced | None:
        """The best cut of the orders that nobody learned."""
        cuts = (self.cut(order, bound_s) for order in list_orders(self.chain.model))
        return min((one for one in cuts if one is not None), key=lambda one: one.expected_s, default=None)


Slicer = StepSlicer | LoadSlicer


def slicer_of(problem: Problem, groups: Groups) -> Slicer:
    """The slicer for what is asked."""
    if problem.objective == Objective.STEP:
        return StepSlicer(problem, groups)
    return LoadSlicer(problem, groups)

"""Slicers: from keys of nodes to a plan, so that whatever a network says, the plan obeys every rule.

For throughput the keys are listed into a topological order of classes, and the linearised dynamic programme
cuts it: the best chain along that order. For a step they are the priorities of list scheduling, over groups
of ops, each on the device where it ends first or, where wished, on the device the network scores best that
still has room. What a slicer reckons a plan to take is a by-product of making it, as the schedule of HEFT is:
nothing is simulated.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import FREE, Objective, Problem
from loadmaster.placers.exact._maxload.contract import Chain, chain_model
from loadmaster.placers.exact._maxload.lines import _Line, list_orders, order_topologically
from loadmaster.placers.exact._maxload.packed import loads_s
from loadmaster.placers.grouping.groups import GroupedProblem, group_ops
from loadmaster.placers.heuristic._list_kernel import NOWHERE, construct_plan
from loadmaster.placers.heuristic._lists import VIEWS, Lists, load_lists
from loadmaster.placers.heuristic.heft import plan_by_insertion
from loadmaster.placers.learned._groups import Groups, group_problem
from loadmaster.placers.learned._scene import Scene, scene_of_step, scene_of_throughput

_FEW_OPS = 4096  # up to here every pass over ops is affordable
_ROOMY = (
    0.8  # of a training step: slicers count what stays, not what comes and goes, so full plans may not fit
)
_NEARLY_FULL = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Sliced:
    """A plan, what the slicer itself thinks it takes, and how full it thinks the fullest device is."""

    plan: Plan
    expected_s: float
    fullness: float = 0.0  # of its room, 1 = full
    roomy: float = 1.0  # up to here it surely fits

    @property
    def rank(self) -> tuple[bool, float]:
        """Less is better: what seems too large comes last, what is nearly so is held to be slower."""
        late = _NEARLY_FULL * max(self.fullness - self.roomy, 0.0)
        return self.fullness > 1.0, self.expected_s * (1.0 + late)


class StepSlicer:
    """List scheduling in the order of keys, over groups of ops where grouping makes the graph smaller.

    What is keyed and wished for are the groups (`nodes`); plans are of the ops.
    """

    def __init__(self, problem: Problem, groups: Groups) -> None:
        self.problem = problem
        grouped = group_ops(problem) if problem.graph.num_ops > 1 else None
        smaller = grouped is not None and grouped.problem.graph.num_ops < problem.graph.num_ops
        self.grouped: GroupedProblem | None = grouped if smaller else None
        self.nodes = self.grouped.problem if self.grouped is not None else problem
        self.groups = group_problem(self.nodes) if self.grouped is not None else groups
        self.lists: Lists = load_lists(self.nodes)
        self.views = VIEWS[problem.links]
        self.first = np.arange(problem.graph.num_ops)  # [N] an op of each node
        if self.grouped is not None:
            _, self.first = np.unique(self.grouped.coarse.op_of, return_index=True)
        self.roomy = _ROOMY if (problem.graph.mirror >= 0).any() else 1.0
        self._rules = {view: self.lists.rules(self.no_key, view) for view in self.views}

    @property
    def no_key(self) -> Floats:
        """[N] the numbers of nodes."""
        return np.arange(self.nodes.graph.num_ops, dtype=np.float64)

    def scene(self) -> Scene:
        """What the network sees."""
        return scene_of_step(self.nodes, self.lists)

    def earliest(self, of_op: Floats) -> Floats:
        """[nodes] the least value among the ops of each node."""
        if self.grouped is None:
            return of_op
        least = np.full(self.nodes.graph.num_ops, np.inf)
        np.minimum.at(least, self.grouped.coarse.op_of, of_op)
        return least

    def row(self, plan: Plan) -> Ints:
        """[U] the devices of a plan of ops."""
        return self.groups.row(plan_of(plan.device[self.first]))

    def slice(
        self, key: Floats, wanted: Ints | None = None, view: int | None = None, *, room: float = 1.0
    ) -> Sliced | None:
        """The plan of keys [N]; `wanted` [U] names devices of groups, FREE those left to list scheduling.

        `room`: the share of each device's room that may be used.
        """
        rules = self._rules[self.views[0] if view is None else view]
        rules = rules._replace(key=np.ascontiguousarray(key, dtype=np.float64))
        if room < 1.0:
            rules = rules._replace(room=room * rules.room)
        if wanted is not None:
            fits = self.groups.cargo.fits
            asked = np.zeros_like(fits)
            told = np.flatnonzero(wanted != FREE)
            asked[told, wanted[told]] = fits[told, wanted[told]]
            rules = rules._replace(allowed=np.where(asked.any(axis=1, keepdims=True), asked, fits))
        return self._sliced(*construct_plan(self.lists.fixed, rules))

    def usual(self, view: int | None = None) -> list[tuple[Floats, Sliced]]:
        """What nobody learned: the keys of m_etf, over nodes."""
        seen = self.views[0] if view is None else view
        rank = -self.lists.compute_upward_rank(transfers=False)
        with_transfers = -self.lists.compute_upward_rank(transfers=True)
        found = []
        for key in (rank, self.no_key, with_transfers):
            one = self.slice(key, view=seen)
            assert one is not None
            found.append((key, one))
        first_come = construct_plan(self.lists.fixed, self.lists.rules(None, seen))
        found.append((first_come[1].astype(np.float64), self._sliced(*first_come)))
        return found

    def op_by_op(self) -> list[Sliced]:
        """Ungrouped plans: of a pass by rank, which reckons as those of nodes do, then of heft and m_etf."""
        lists = self.lists if self.grouped is None else load_lists(self.problem)
        rank = lists.compute_upward_rank(transfers=True)
        order = np.lexsort((np.arange(len(rank)), -rank)).astype(np.int32)
        inserted = plan_by_insertion(lists, order, np.full(len(rank), NOWHERE, dtype=np.int32))
        passes: list[tuple[Floats | None, int]] = [(-rank, self.views[0])]
        if self.grouped is not None and len(rank) <= _FEW_OPS:
            number = np.arange(len(rank), dtype=np.float64)
            passes += [(key, view) for view in self.views for key in (number, None)]
        made = [construct_plan(lists.fixed, lists.rules(*one)) for one in passes]
        found = [self._sliced(*one, of_ops=True) for one in made]
        return [found[0], Sliced(inserted, np.inf), *found[1:]]

    def _sliced(
        self, device: Ints, position: Ints, over_s: float, used: Floats, *, of_ops: bool = False
    ) -> Sliced:
        """What a list pass made, as a plan of ops."""
        plan = plan_of(device, position)
        if self.grouped is not None and not of_ops:
            plan = self.grouped.back(plan)
        fullness = float((used / np.maximum(self.lists.room_bytes, 1.0)).max())
        return Sliced(plan, float(over_s), fullness, self.roomy)

    def alone(self, key: Floats) -> Sliced | None:
        """Everything on the fastest device that has room for it and may run it."""
        cargo, held = self.groups.cargo, float(self.lists.footprint.sum())
        able = cargo.fits.all(axis=0) & (self.lists.room_bytes >= held)
        if not able.any():
            return None
        fastest = int(np.where(able, cargo.seconds.sum(axis=0), np.inf).argmin())
        return self.slice(key, np.full(cargo.num_units, fastest, dtype=np.int32))

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
        self.kind = np.zeros(problem.cluster.num_devices, dtype=np.int64)  # [D] the model's type of each
        for t, alike in enumerate(self.chain.model.devices):
            self.kind[list(alike)] = t
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

"""Grouping: a smaller problem whose plans are plans of the original, with the parallelism kept.

Published placers merge an op with its only consumer without end, until a block of parallel branches is one
group and the graph a chain. Here (u, v) merge only if v is all that follows u, or u all that comes before
v, and a group stays small against the step and against the devices:

* a join takes sources and ops without time, and at most one of its branches, while that is cheaper to run
  than to send; so a block keeps at least as many groups as it has branches;
* seconds of what must share a device: at most the longest op, or bound / (8 devices); bytes that outlive it
  (resident, kept, read in another phase): at most 1/16 of the smallest device;
* backward ops merge as the ops they mirror, parameters as their first readers, updates as their parameters;
* ops of one group of the graph stay tied to one device, phases stay apart, and ops that no device may run
  together are never merged.

Why there is no circle is said in `kernel.py`. A lower bound must never come from a grouped
problem: merging is a restriction. O(ops + uses) a pass, with a few passes.
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.core.errors import PlanError, ProblemError
from loadmaster.core.graph import units
from loadmaster.core.plan import Plan
from loadmaster.core.problem import FREE, Problem
from loadmaster.graph.coarsen import CoarseGraph, coarsen_costs, contract_to, expand
from loadmaster.placers.grouping.facts import (
    build_net,
    fastest_s,
    homes_of,
    kinds_of,
    limit_of,
    num_engines,
    ops_under_rules,
    restrict_net,
    roots_of,
    ties_of,
)
from loadmaster.placers.grouping.kernel import (
    follow_homes,
    merge_into_consumers,
    merge_into_producers,
    merge_rows,
    merge_siblings,
    order_depth_first,
)
from loadmaster.placers.grouping.net import NONE, Groups, Ties, contract_net, longest_path_s

_TIME_SHARE = 8  # groups per device and bound, at least
_BYTE_SHARE = 16  # groups per device's memory, at least
_WIDTH = 4  # groups per device that a level of a huge graph keeps


@dataclass(frozen=True, slots=True, eq=False)
class GroupedProblem:
    """A coarse problem and the way back."""

    problem: Problem  # coarse
    coarse: CoarseGraph
    joins_kept: bool  # False: for `max_ops` siblings or rows across joins were merged

    def back(self, plan: Plan) -> Plan:
        """The plan of every op that does what a plan of the groups says; without an order if it has none."""
        num = self.problem.graph.num_ops
        if len(plan.device) != num:
            raise PlanError(f"a plan of {len(plan.device)} ops does not fit {num} groups; plan the groups")
        fine = expand(replace(plan, priority=_distinct_order(plan.priority)), self.coarse)
        if (plan.priority == plan.priority[0]).all():
            return replace(fine, priority=np.zeros(len(fine.device), dtype=np.int32))
        return fine


def group_ops(
    problem: Problem,
    *,
    bound_s: float | None = None,
    max_ops: int | None = None,
    merge_branches: bool = True,
    time_share: int = _TIME_SHARE,
    byte_share: int = _BYTE_SHARE,
) -> GroupedProblem:
    """The problem with ops merged to groups.

    `bound_s` is a lower bound of the step, worked out roughly if not given. Without `merge_branches` no
    branch is merged into a join: the longest path then grows by sources only. With `max_ops` groups grow
    until there are no more than that: longer ones first (up to bound / devices), then siblings where a level
    is wider than 4 groups per device, at last rows of neighbours across joins. Bytes, pins and phases are
    never given up, so more may remain.
    """
    for name, value in (("max_ops", max_ops), ("time_share", time_share), ("byte_share", byte_share)):
        if value is not None and value < 1:
            raise ProblemError(f"grouping got {name} {value}; give 1 or more")
    work = _Work(
        problem, bound_s=bound_s, branches=merge_branches, time_share=time_share, byte_share=byte_share
    )
    work.settle()
    kept = max_ops is None or work.shrink(max_ops)
    op_of, num, tied = work.number_groups()
    coarse = contract_to(problem.graph, op_of, num, tied=tied, named=False)
    pinned = np.full(num, FREE, dtype=np.int32)
    np.maximum.at(pinned, op_of, problem.pinned)
    costs = coarsen_costs(problem.costs, coarse)
    return GroupedProblem(replace(problem, graph=coarse.graph, costs=costs, pinned=pinned), coarse, kept)


def _distinct_order(priority: Ints) -> Ints:
    """Priorities that differ and say the same: ops of equal priority run by index."""
    rank = np.empty(len(priority), dtype=np.int32)
    rank[np.lexsort((np.arange(len(priority)), priority))] = np.arange(len(priority), dtype=np.int32)
    return rank


class _Work:
    """Ops on their way to groups."""

    def __init__(
        self, problem: Problem, *, bound_s: float | None, branches: bool, time_share: int, byte_share: int
    ) -> None:
        graph = problem.graph
        self.graph = graph
        self.branches = branches
        self.num_engines = num_engines(problem)
        self.net = build_net(problem)
        self.seconds = fastest_s(problem)
        if bound_s is None:
            path_s = longest_path_s(self.net.ptr, self.net.head, self.seconds)
            bound_s = max(path_s, float(self.seconds.sum()) / self.num_engines)
        self.bound_s = bound_s
        self.limit = limit_of(problem, self.seconds, bound_s, time_share=time_share, byte_share=byte_share)
        self.kind = kinds_of(graph, self.net)
        self.unit, num_units = units(graph)
        ruled = ops_under_rules(graph)
        self.home = homes_of(graph, self.unit, ruled)
        self.ties = ties_of(problem, self.unit, num_units, self.seconds, self.home)
        self.ops = np.flatnonzero(ruled)  # those that merge by the rules, not as others do
        self.rules = restrict_net(self.net, self.ops, self.kind)
        alone = np.zeros(len(self.ops), dtype=np.bool_)
        self.groups = Groups(self.unit[self.ops], self.kind[self.ops], self.seconds[self.ops], alone)
        self.label = np.arange(len(self.ops), dtype=np.int32)  # group of each of `ops`
        self.first = self.ops  # an op of each group

    def settle(self) -> None:
        """Merge until nothing more may."""
        while True:
            single = len(self.first) == len(self.ops)
            root, branch, count = merge_into_consumers(
                self.rules, self.groups, self.ties, self.limit, self.branches, single
            )
            self._contract(root, count, branch=branch)
            root, zero = merge_into_producers(self.rules, self.groups, self.ties, self.limit)
            self._contract(root, zero)
            if count + zero == 0:
                return

    def _contract(
        self, root: Ints, count: int, *, branch: Bools | None = None, order: Ints | None = None
    ) -> None:
        """Make groups of the roots, if any merged, numbered along `order`."""
        if count == 0:
            return
        branch = np.zeros(len(root), dtype=np.bool_) if branch is None else branch
        order = np.arange(len(root), dtype=np.int32) if order is None else order
        number, self.rules = contract_net(self.rules, root, order, branch)
        stays = order[root[order] == order]
        self.groups = Groups(*(column[stays] for column in self.groups))
        self.first = self.first[stays]
        self.label = number[self.label]

    def shrink(self, max_ops: int) -> bool:
        """Go on until at most `max_ops` remain; whether the rules alone did it."""
        for step in (self.settle, self._merge_siblings):
            limit = self.limit
            while self._count() > max_ops and self.limit.seconds < self.bound_s / self.num_engines:
                self.limit = self.limit._replace(seconds=2 * self.limit.seconds)
                step()
            self.limit = limit
            if self._count() <= max_ops:
                return step == self.settle
        most_s = float(self.seconds.sum())
        self.limit = self.limit._replace(seconds=most_s / max_ops)  # of one row, if all were equal
        while self._count() > max_ops and self.limit.seconds < 2 * most_s:
            order = order_depth_first(self.rules, self._modules())
            root, count = merge_rows(self.rules, self.groups, self.ties, self.limit, order)
            self._contract(root, count, order=order)
            self.limit = self.limit._replace(seconds=2 * self.limit.seconds)
        return False

    def _merge_siblings(self) -> None:
        root, order, count = merge_siblings(
            self.rules, self.groups, self.ties, self.limit, _WIDTH * self.num_engines
        )
        self._contract(root, count, order=order)
        self.settle()

    def _modules(self) -> Ints:
        """[groups] a number for the module of each."""
        number: dict[str, int] = {}
        module = self.graph.module
        found = (number.setdefault(module[op], len(number)) for op in self.first.tolist())
        return np.fromiter(found, dtype=np.int32, count=len(self.first))

    def _follow_homes(self) -> tuple[Ints, Ints, Longs, Ties]:
        """Group of each op that has one by the rules, leader and potential of the others, all ties."""
        group = np.full(self.graph.num_ops, NONE, dtype=np.int32)
        group[self.ops] = self.label
        ties = Ties(*(column.copy() for column in self.ties))
        leader, potential = follow_homes(
            self.net, self.kind, self.graph.phase, group, len(self.first), self.home, self.unit, ties
        )
        return group, leader, potential, ties

    def _count(self) -> int:
        group, leader, _, _ = self._follow_homes()
        alone = (group == NONE) & (leader == np.arange(len(leader)))
        return len(self.first) + int(np.count_nonzero(alone))

    def number_groups(self) -> tuple[Ints, int, Ints]:
        """Coarse op of each op in topological order, their number, and the tied unit of each coarse op."""
        group, leader, potential, ties = self._follow_homes()
        leads = np.flatnonzero((group == NONE) & (leader == np.arange(len(leader))))
        op = np.concatenate([self.first, leads])
        key = np.concatenate([np.arange(len(self.first)), -potential[leads]])
        order = np.lexsort((op, key, self.kind[op]))
        number = np.empty(len(op), dtype=np.int32)
        number[order] = np.arange(len(op), dtype=np.int32)
        at = np.zeros(len(leader), dtype=np.int32)
        at[leads] = number[len(self.first) :]
        op_of = at[leader]
        op_of[self.ops] = number[self.label]
        return op_of, len(op), roots_of(ties.up)[self.unit[op[order]]]

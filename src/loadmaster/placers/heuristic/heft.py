"""HEFT: ops by upward rank, each on the device and in the idle gap where it finishes first.

Topcuoglu, Hariri, Wu: Performance-effective and low-complexity task scheduling for heterogeneous computing,
IEEE TPDS 2002. rank(o) = mean time + the longest way to an end with mean transfer times (section 4.1);
insertion into idle gaps (4.2). Beyond the paper: an op's unit and the devices' memory are respected, and
the rank without transfer times is tried too. Transfers are planned free of contention and then simulated as
they are. O(V D log V + E D) a pass, gaps found by bisection.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_of
from loadmaster.placers.heuristic._insert_kernel import insert_ops
from loadmaster.placers.heuristic._list_kernel import NOWHERE
from loadmaster.placers.heuristic._lists import Lists, load_lists
from loadmaster.placers.registry import Placer
from loadmaster.placers.traits import MOST_OPS
from loadmaster.simulator.events.kernel import PARALLEL


@dataclass(frozen=True, slots=True)
class Heft:
    """No parameters."""

    max_ops: ClassVar[int] = MOST_OPS
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Insert by rank with and without transfers in the rank; keep the better."""
        lists = load_lists(problem)
        return best_of(problem, run, _iterate_plans(lists), algorithm="heft")


def _iterate_plans(lists: Lists) -> Iterator[Plan]:
    for transfers in (True, False):
        rank = lists.compute_upward_rank(transfers=transfers)
        order = np.lexsort((np.arange(len(rank)), -rank)).astype(np.int32)
        yield plan_by_insertion(lists, order, np.full(len(rank), NOWHERE, dtype=np.int32))


def plan_by_insertion(lists: Lists, order: Ints, wanted: Ints) -> Plan:
    """The plan of one insertion pass, in the order of its starts."""
    start: Floats
    device, start = insert_ops(lists.fixed, lists.rules(None, PARALLEL), order, wanted)
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    priority = np.empty(len(order), dtype=np.int32)
    priority[np.lexsort((place, start))] = np.arange(len(order), dtype=np.int32)
    return plan_of(device, priority)


PLACER: type[Placer] = Heft

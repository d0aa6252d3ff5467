"""CPOP: the critical path on the device that runs it fastest, everything else where it finishes first.

Topcuoglu, Hariri, Wu: Performance-effective and low-complexity task scheduling for heterogeneous computing,
IEEE TPDS 2002, section 4.3. Priority = upward + downward rank; the ops of highest priority form the
critical path and share a device; ready ops are taken by priority and inserted into the gap where they
finish first. Beyond the paper: every device whose time for the path is within a factor two of the best is
tried, memory and units are respected (what has no room on the path's device goes elsewhere). O(V D log V +
E D) a pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.graph import edges
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_of
from loadmaster.placers.heuristic._insert_kernel import ready_order
from loadmaster.placers.heuristic._list_kernel import NOWHERE
from loadmaster.placers.heuristic._lists import Lists, load_lists
from loadmaster.placers.heuristic.heft import plan_by_insertion
from loadmaster.placers.registry import Placer
from loadmaster.placers.traits import MOST_OPS

_MOST_PATH_DEVICES = 4
_NEARLY_BEST = 2.0


@dataclass(frozen=True, slots=True)
class Cpop:
    """No parameters."""

    max_ops: ClassVar[int] = MOST_OPS
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Try the likely devices for the critical path; keep the best."""
        return best_of(problem, run, _iterate_plans(load_lists(problem)), algorithm="cpop")


def _iterate_plans(lists: Lists) -> Iterator[Plan]:
    rank = lists.compute_upward_rank(transfers=True) + lists.compute_downward_rank(transfers=True)
    order: Ints = ready_order(lists.fixed, -rank)
    path = critical_path(lists, rank)
    for d in _path_devices(lists, path):
        wanted = np.full(len(rank), NOWHERE, dtype=np.int32)
        wanted[path] = d
        yield plan_by_insertion(lists, order, wanted)


def critical_path(lists: Lists, rank: Floats) -> Ints:
    """One chain of ops of highest rank from a start to an end."""
    source, target = edges(lists.problem.graph)
    begin = np.searchsorted(source, np.arange(len(rank) + 1))
    first = np.ones(len(rank), dtype=np.bool_)
    first[target] = False
    starts = np.flatnonzero(first)
    op = int(starts[rank[starts].argmax()])
    path = [op]
    while begin[op] < begin[op + 1]:
        children = target[begin[op] : begin[op + 1]]
        op = int(children[rank[children].argmax()])
        path.append(op)
    return np.array(path, dtype=np.int32)


def _path_devices(lists: Lists, path: Ints) -> list[int]:
    """Devices to try for the critical path, fastest first; alike ones once."""
    cluster = lists.problem.cluster
    seconds = np.where(lists.cargo.fits[lists.cargo.of_op], lists.problem.device_compute_s, np.inf)
    total = seconds[path].sum(axis=0)
    finite = np.where(np.isfinite(seconds), seconds, 0.0)
    barred = (~np.isfinite(seconds[path])).sum(axis=0)  # a device that runs most of it is still a choice
    total = np.where(np.isfinite(total), total, finite[path].sum(axis=0) + barred * 1e30)
    order = sorted(range(cluster.num_devices), key=lambda d: (float(total[d]), d))
    seen: set[tuple[int, int, int]] = set()
    chosen = []
    for d in order:
        look = (int(cluster.kind[d]), int(cluster.usable_bytes[d]), int(cluster.host[d]))
        if look not in seen and total[d] <= _NEARLY_BEST * total[order[0]]:
            seen.add(look)
            chosen.append(d)
    return chosen[:_MOST_PATH_DEVICES]


PLACER: type[Placer] = Cpop

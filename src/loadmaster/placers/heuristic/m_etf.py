"""m-ETF: the op and device that can start earliest, while memory lasts.

Earliest task first (Hwang et al., SIAM J. Comput. 1989) with memory (Baechi: Jeon et al., SoCC 2020). It
differs from the published code: two heaps per device instead of sorting all ready ops for every decision,
so that the width of a graph does not matter; devices and links may differ, and an op goes where it finishes
first; a full device is passed over, and what fits nowhere is repaired, not an error. Ties go by op number
(as published for TensorFlow), by order of becoming ready (as for PyTorch) or by upward rank, under several
views of the links; ops are placed one by one and in bounded groups (`grouping/groups.py`); the best
simulated plan is kept, first come first served or in the order the pass gave. O((V + E) D log V) a pass; up
to 4,096 ops every combination is tried, then the two most promising. Its guarantees are in `_guarantee.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Links, Problem, Split
from loadmaster.core.run import Run, Score
from loadmaster.placers.answer import Tally
from loadmaster.placers.grouping.groups import GroupedProblem, group_ops
from loadmaster.placers.heuristic._guarantee import etf_guarantee
from loadmaster.placers.heuristic._lists import VIEWS, Lists, load_lists
from loadmaster.placers.registry import Placer
from loadmaster.placers.traits import MOST_OPS

_SMALL_OPS = 4096  # up to here every pass is affordable
_FEW = 2  # passes beyond that
_FEW_GROUPS = 20_000  # of a graph with too many ops to place one by one
_SHRUNK = 0.5  # groups per op from which on groups alone are placed


@dataclass(frozen=True, slots=True)
class MEtf:
    """`first_come`: score plans first come first served only, as published evaluations do."""

    first_come: bool = False
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Construct with several keys and views; keep the best."""
        tally = Tally(problem, run)
        lists = construct_all(tally, first_come=self.first_come)
        tally.mend()
        return tally.answer(
            algorithm="m_etf", guarantee=describe_guarantee(tally, lists, first_come=self.first_come)
        )


def construct_all(tally: Tally, *, first_come: bool) -> Lists | None:
    """Offer the plans of every pass over ops and over groups; on large graphs of few passes over either.

    Returns the ops as they were listed, None if groups alone were placed.
    """
    problem = tally.problem
    small, large = problem.graph.num_ops <= _SMALL_OPS, problem.graph.num_ops > MOST_OPS
    groups = None
    if small or large or problem.links != Links.PARALLEL:
        groups = group_ops(problem, max_ops=_FEW_GROUPS if large else None)
    shrunk = large or (groups is not None and groups.problem.graph.num_ops <= _SHRUNK * problem.graph.num_ops)
    if groups is not None and (small or shrunk):
        _offer_groups(tally, groups, every=small, first_come=first_come)
    if shrunk and not small:
        return None
    lists = load_lists(problem)
    _offer_ops(tally, lists, every=small, first_come=first_come)
    return lists


def describe_guarantee(tally: Tally, lists: Lists | None, *, first_come: bool) -> str:
    """What theory promises: of a pass over ops that sees parallel links and is replayed in its own order."""
    if lists is None or first_come or tally.spent or tally.problem.links != Links.PARALLEL:
        return ""
    guarantee = etf_guarantee(tally.problem, cargo=lists.cargo, fixed=lists.fixed)
    return "" if guarantee is None else guarantee.sentence


def _offer_groups(tally: Tally, groups: GroupedProblem, *, every: bool, first_come: bool) -> None:
    """Offer plans of groups: in their own order, as a rule the better one, and first come first served."""
    lists = load_lists(groups.problem)
    for count, (key, links) in enumerate(_list_passes(lists, ranked=True)):
        if tally.spent or (count == _FEW and not every):
            break
        plan = groups.back(lists.placed(key, links))
        if every or first_come:
            tally.offer(plan_of(plan.device))
        if not first_come and not tally.spent:
            tally.offer(plan)


def _offer_ops(tally: Tally, lists: Lists, *, every: bool, first_come: bool) -> None:
    """Offer plans of ops, first come and in their own order; then once more by the best first-come order."""
    views = VIEWS[lists.problem.links]
    most = None if every else min(_FEW, len(views))
    served: list[tuple[Score, int, Plan]] = []
    for count, (key, links) in enumerate(_list_passes(lists, ranked=False)):
        if tally.spent or count == most:
            break
        plan = lists.placed(key, links)
        served.append((tally.offer(plan_of(plan.device)), count, tally.last))
        if not first_come and not tally.spent:
            tally.offer(plan)
    if served and not tally.spent and (every or len(views) == 1):
        again = lists.placed(min(served)[2].priority.astype(np.float64), views[0])
        tally.offer(plan_of(again.device))
        if every and not first_come and not tally.spent:
            tally.offer(again)


def _list_passes(lists: Lists, *, ranked: bool) -> Iterator[tuple[Floats | None, int]]:
    """Keys and views, most promising first; no key: by order of becoming ready."""
    number = np.arange(lists.problem.graph.num_ops, dtype=np.float64)
    views = VIEWS[lists.problem.links]
    if ranked:  # groups are of a size: the truth about links and the longest way serve them best
        views = views if len(views) == 1 else (views[1], views[0], *views[2:])
        yield -lists.compute_upward_rank(transfers=False), views[0]
        yield number, views[0]
    for links in views[1 if ranked else 0 :]:
        yield number, links
    for links in views:
        yield None, links
    rank = -lists.compute_upward_rank(transfers=False)
    for links in views[1 if ranked else 0 :]:
        yield rank, links
    rank = -lists.compute_upward_rank(transfers=True)
    for links in views:
        yield rank, links


PLACER: type[Placer] = MEtf

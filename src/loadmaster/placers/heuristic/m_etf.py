"""m-ETF: the op and device that can start earliest, while memory lasts.

Earliest task first (Hwang et al., SIAM J. Comput. 1989) with memory (Baechi: Jeon et al., SoCC 2020). It
differs from the published code: two heaps per device instead of sorting all ready ops for every decision,
so that the width of a graph does not matter; devices and links may differ, and an op goes where it finishes
first; a full device is passed over, and what fits nowhere is repaired, not an error. Ties go by op number
(as published for TensorFlow), by order of becoming ready (as for PyTorch) or by upward rank, under several
views of the links; ops are placed one by one and in bounded groups (`grouping.py`); the best simulated plan
is kept, first come first served or in the order the pass gave. O((V + E) D log V) a pass; up to 4,096 ops
every combination is tried, then the two most promising. Its guarantees are in `_guarantee.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Links, Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.grouping import Grouped, grouped
from loadmaster.placers.heuristic._guarantee import etf_guarantee
from loadmaster.placers.heuristic._lists import MOST_OPS, VIEWS, Lists, load_lists
from loadmaster.placers.registry import Placer

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
        construct_all(tally, first_come=self.first_come)
        tally.mend()
        return tally.answer(algorithm="m_etf", guarantee=promised(tally, first_come=self.first_come))


def construct_all(tally: Tally, *, first_come: bool) -> None:
    """Offer the plans of every pass over ops and over groups; on large graphs of two passes over either."""
    problem = tally.problem
    small, large = problem.graph.num_ops <= _SMALL_OPS, problem.graph.num_ops > MOST_OPS
    groups = None
    if small or large or problem.links != Links.PARALLEL:
        groups = grouped(problem, max_ops=_FEW_GROUPS if large else None)
    shrunk = large or (groups is not None and groups.problem.graph.num_ops <= _SHRUNK * problem.graph.num_ops)
    most = None if small else _FEW
    if groups is not None and (small or shrunk):
        _offer(tally, load_lists(groups.problem), groups, most=most, first_come=first_come)
    if small or not shrunk:
        _offer(tally, load_lists(problem), None, most=most, first_come=first_come)


def promised(tally: Tally, *, first_come: bool) -> str:
    """What theory promises: of a pass that sees parallel links and is replayed in its own order."""
    if first_come or tally.spent or tally.problem.links != Links.PARALLEL:
        return ""
    if tally.problem.graph.num_ops > MOST_OPS:  # groups were placed
        return ""
    guarantee = etf_guarantee(tally.problem)
    return "" if guarantee is None else guarantee.sentence


def _offer(tally: Tally, lists: Lists, groups: Grouped | None, *, most: int | None, first_come: bool) -> None:
    """Offer what passes make, first come and in their own order; then once more by the best plan's order."""
    views = VIEWS[lists.problem.links]
    for count, (key, links) in enumerate(_passes(lists, ranked=groups is not None)):
        if tally.spent or count == most:
            break
        plan = lists.placed(key, links)
        if groups is not None and most is not None and not first_come:
            tally.offer(groups.back(plan))  # of groups the own order is as a rule the better one
        else:
            _offer_both(tally, plan, groups, first_come=first_come)
    if groups is None and not tally.spent and (most is None or len(views) == 1):
        again = tally.best_plan.priority.astype(np.float64)
        _offer_both(tally, lists.placed(again, views[0]), None, first_come=first_come)


def _offer_both(tally: Tally, plan: Plan, groups: Grouped | None, *, first_come: bool) -> None:
    fine = plan if groups is None else groups.back(plan)
    tally.offer(plan_of(fine.device))
    if not first_come and not tally.spent:
        tally.offer(fine)


def _passes(lists: Lists, *, ranked: bool) -> Iterator[tuple[Floats | None, int]]:
    """Keys and views, most promising first; no key: by order of becoming ready."""
    number = np.arange(lists.problem.graph.num_ops, dtype=np.float64)
    views, rank = VIEWS[lists.problem.links], -lists.upward(transfers=False)
    if ranked:  # groups are of a size: the truth about links and the longest way serve them best
        views = views if len(views) == 1 else (views[1], views[0], *views[2:])
        yield rank, views[0]
        yield number, views[0]
    for key in (number, None, rank, -lists.upward(transfers=True)):
        for links in views:
            if not ranked or links != views[0] or key is None or (key is not number and key is not rank):
                yield key, links


PLACER: type[Placer] = MEtf

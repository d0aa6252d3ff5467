"""m-SCT: favourite children from a linear programme, then m-ETF with devices that wait for them.

Small communication times (Hanen, Munier: scheduling dependent tasks on m processors with small communication
delays) with memory (Baechi: Jeon et al., SoCC 2020). The programme (`simulator/bounds/favourite_children.py`)
says which child should stay with its parent on unlimited devices. By default transfer times are *clipped*,
which makes its optimum a proven lower bound and the programme seconds faster; `clipped=False` is the
published form. It differs from the published code: favourites are rounded to a matching (there two edges at x
= 0.5 cancel each other), and beside the published rule (a device is awake while its favourite is ready, an
urgent op goes first) the literature's is tried: a device also stays idle while the favourite's other parents
still run. Plain m-ETF is tried too, so that m_sct is never worse. O(programme) + O((V + E) D log V) a pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Bound, Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.heuristic._list_kernel import PUBLISHED, WAITING
from loadmaster.placers.heuristic._lists import VIEWS, Lists, load_lists
from loadmaster.placers.heuristic.m_etf import construct_all, describe_guarantee
from loadmaster.placers.registry import Placer
from loadmaster.placers.traits import MOST_OPS
from loadmaster.simulator.bounds.favourite_children import Favourites, find_favourites, match_favourites


@dataclass(frozen=True, slots=True)
class MSct:
    """`clipped`: the programme whose optimum is a bound; `threshold`: x up to it makes a favourite;
    `first_come`: score plans first come first served only, as published evaluations do.
    """

    clipped: bool = True
    threshold: float = 0.5
    first_come: bool = False
    max_ops: ClassVar[int] = MOST_OPS
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Solve, round, construct by every rule; keep the best."""
        run.progress("m_sct: linear programme", 0.0)
        found = find_favourites(problem, clipped=self.clipped)
        if found.bound_s > run.bound.seconds and not run.bound.infeasible:
            run = replace(run, bound=Bound(found.bound_s, "small communication"))
        lists, tally = load_lists(problem), Tally(problem, run)
        construct_all(tally, first_come=self.first_come)
        rules = self._rules(found, lists)
        for plan in _iterate_plans(lists, rules):
            for offered in (plan_of(plan.device),) if self.first_come else (plan_of(plan.device), plan):
                if not tally.spent:
                    tally.offer(offered)
        tally.mend()
        return tally.answer(
            algorithm="m_sct", guarantee=describe_guarantee(tally, lists, first_come=self.first_come)
        )

    def _rules(self, found: Favourites, lists: Lists) -> list[tuple[Ints, int]]:
        """Favourites and awake rules to try.

        A programme has many optima, and plans differ by some percent over which one the solver returns: so
        the favourites by transfer time alone have their turn too.
        """
        programme = match_favourites(found, lists.problem.graph.num_ops, self.threshold)
        return [(programme, PUBLISHED), (programme, WAITING), (_favourites_by_transfer(lists), WAITING)]


def _favourites_by_transfer(lists: Lists) -> Ints:
    """[N] favourites by falling transfer time."""
    graph = lists.problem.graph
    maker, seconds = graph.tensor_op[graph.use_tensor], lists.transfer_s[graph.use_tensor]
    order = np.lexsort((-graph.use_op, maker))  # of equals the later child
    staying = np.zeros(len(order))
    found = Favourites(maker[order], graph.use_op[order], seconds[order], staying, 0.0, 0.0, False)
    return match_favourites(found, graph.num_ops)


def _iterate_plans(lists: Lists, rules: list[tuple[Ints, int]]) -> Iterator[Plan]:
    """Every rule, by number and by rank, under each view of the links."""
    number = np.arange(lists.problem.graph.num_ops, dtype=np.float64)
    for links in VIEWS[lists.problem.links]:
        for favourite, awake in rules:
            for key in (number, -lists.compute_upward_rank(transfers=False)):
                yield lists.placed(key, links, favourite=favourite, awake=awake)


PLACER: type[Placer] = MSct

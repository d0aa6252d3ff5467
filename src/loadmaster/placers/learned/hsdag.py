"""HSDAG: a graph network divides the graph into groups, places each, and learns from the times of its plans.

Duan, Ping, Kanakaris et al.: "A Structure-Aware Framework for Learning Device Placements on Computation
Graphs", NeurIPS 2024 (arXiv 2405.14185), written from the paper. Twenty plans, then one REINFORCE step; the
features of a node grow by those of its group after each plan. `as_coded` does what the published code does
where it differs from the text: types and index alone as features, one scalar return for all choices, parsing
until nothing merges, dropout while sampling, and no plan on a single device. By default times are taken
relative to the first plan's, returns have a baseline, and one device alone may be the answer.

Any number of devices; support and room are masked while sampling. Free splits only. Needs torch.
"""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.learned._groups import group_problem
from loadmaster.placers.learned._levels import say_levels
from loadmaster.placers.learned._searcher import offer_start
from loadmaster.placers.learned._table_placer import require_share, search_and_climb
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class Hsdag:
    """`steps` plans an update, `passes` of parsing at most, `width` of the network, `baseline` of returns;
    `start`: a plan to begin with; `finish`: the share of the budget for single moves at the end.
    """

    steps: int = 20
    passes: int = 1
    width: int = 128
    dropout: float = 0.2
    learning_rate: float = 1e-3
    discount: float = 0.95
    baseline: bool = True
    merge_chains: bool = True
    as_coded: bool = False
    start: Plan | None = None
    finish: float = 0.3
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)
    max_ops: ClassVar[int] = 20_000
    needs: ClassVar[tuple[str, str]] = ("torch", "torch")

    def __post_init__(self) -> None:
        """Refuse what makes no search."""
        require_share("hsdag", "finish", self.finish)
        require_share("hsdag", "dropout", self.dropout)
        for name in ("steps", "passes", "width"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"hsdag: {name} is {value!r}; give a whole number >= 1")

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Parse, sample, learn, then climb."""
        from loadmaster.modules.threads import one_thread
        from loadmaster.placers.learned._hsdag_search import HsdagSearch

        groups, tally = group_problem(problem), Tally(problem, run)
        if self.start is not None:
            offer_start(problem, tally, self.start)
        with one_thread():
            search = HsdagSearch(problem, groups, self, int(run.rng.integers(2**31)))
            search_and_climb(search, groups, tally, self.finish)
        tally.mend()
        return say_levels(problem, tally.answer(algorithm="hsdag"))


PLACER: type[Placer] = Hsdag

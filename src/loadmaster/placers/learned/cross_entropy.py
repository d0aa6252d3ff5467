"""Cross-entropy: draws devices from a table, and moves the table towards the best tenth of the plans.

The plain half of Post, with what makes it better than published: it starts from the best cut of an order (for
a step, from heft's plan), names devices that are alike in the order of first use, keeps the elite of earlier
rounds, and spends the last part of its budget on single moves from the best plan. There is no network and
nothing to load. Free splits only. Deterministic under a seed and a count budget; O(ops) a plan.
"""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.learned._table import TableSettings
from loadmaster.placers.learned._table_placer import answer_by_table, require_share
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """`warm`: begin with a constructor's plan, or with `start`; `elite`, `mixing` (0: 2 / groups), `period`
    (0: by the budget) and `keep` as in `_table.py`; `finish`: the share of the budget for single moves.
    """

    warm: bool = True
    start: Plan | None = None
    elite: float = 0.1
    mixing: float = 0.0
    period: int = 0
    keep: float = 0.7
    archive: bool = True
    relabel: bool = True
    finish: float = 0.5
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __post_init__(self) -> None:
        """Refuse what makes no search."""
        require_share("cross_entropy", "finish", self.finish)
        self._settings()

    def _settings(self) -> TableSettings:
        return TableSettings(
            elite=self.elite,
            mixing=self.mixing,
            period=self.period,
            keep=self.keep,
            archive=self.archive,
            relabel=self.relabel,
        )

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Draw, keep the best, draw nearer to them."""
        return answer_by_table(
            problem,
            run,
            self._settings(),
            warm=self.warm,
            start=self.start,
            finish=self.finish,
            algorithm="cross_entropy",
        )


PLACER: type[Placer] = CrossEntropy

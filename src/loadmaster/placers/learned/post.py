"""Post: cross-entropy every hundred plans and proximal policy optimisation every ten, on one table.

Gao, Chen, Li, NeurIPS 2018 (`_table.py`). `Post(warm=False, finish=0.0)` is what the paper describes: from a
uniform table, joint ratios, no local moves. What the paper leaves open (both periods, the mixing, the form of
the surrogate) has the defaults of docs/learned.md. By default it starts warm and ends with single moves:
cold it needs thousands of plans for what the best cut of an order gives at once. Free splits only.
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
class Post:
    """`form` of the surrogate: 'clipped' or 'kl', with `clip` or `beta`; `ratio` of probabilities: 'joint' as
    published or of each 'group'; `warm` or `start` and `finish` as of cross_entropy.
    """

    form: str = "clipped"
    warm: bool = True
    start: Plan | None = None
    elite: float = 0.1
    mixing: float = 0.0
    period: int = 0
    clip: float = 0.2
    beta: float = 1.0
    ratio: str = "joint"
    by_rank: bool = False
    relabel: bool = False
    finish: float = 0.5
    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __post_init__(self) -> None:
        """Refuse what makes no search."""
        require_share("post", "finish", self.finish)
        self._settings()

    def _settings(self) -> TableSettings:
        return TableSettings(
            elite=self.elite,
            mixing=self.mixing,
            period=self.period,
            relabel=self.relabel,
            ppo=self.form or "clipped",
            clip=self.clip,
            beta=self.beta,
            ratio=self.ratio,
            by_rank=self.by_rank,
        )

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Draw, ascend, and every so often take the elite's distribution."""
        return answer_by_table(
            problem,
            run,
            self._settings(),
            warm=self.warm,
            start=self.start,
            finish=self.finish,
            algorithm="post",
        )


PLACER: type[Placer] = Post

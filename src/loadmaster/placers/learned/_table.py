"""A table of probabilities, one row a group, improved by cross-entropy and by proximal policy optimisation.

Gao, Chen, Li: "Post: Device Placement with Cross-Entropy Minimization and Proximal Policy Optimization",
NeurIPS 2018. The policy is f(d | u) = prod_m softmax(u_m)[d_m]: no network, no graph, nothing carries over.
After every `ce_period` samples f becomes the share of each device among the elite (their Algorithm 1), mixed
with a little of the uniform distribution; in between, after every `ppo_period` samples, a few gradient steps
on a surrogate of the expected advantage. The paper does not print the surrogate: both usual forms are here.
O(U D) a sample.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.errors import InputError
from loadmaster.placers.learned._groups import Groups
from loadmaster.placers.learned._surrogate import climb_surrogate

CLIPPED, KL, NONE = "clipped", "kl", ""
JOINT, GROUP = "joint", "group"
_PERIOD, _SHORT_PERIOD, _SHORT_BUDGET = 100, 50, 500
_MIXED, _WARM = 2.0, 3.0  # over the number of groups: the uniform share, and what a warm start leaves open


@dataclass(frozen=True, slots=True)
class TableSettings:
    """Parameters of cross-entropy and of the gradient steps between its rounds."""

    elite: float = 0.1  # rho
    period: int = 0  # samples of a cross-entropy round; 0: 100, or 50 of a budget of at most 500
    mixing: float = 0.0  # eps; 0: 2 / groups
    keep: float = 1.0  # f <- keep * new + (1 - keep) * old
    archive: bool = False  # the elite of earlier rounds competes again
    relabel: bool = False  # devices that are alike are named in the order of first use
    ppo: str = NONE  # 'clipped', 'kl' or ''
    ppo_steps: int = 10
    ppo_rate: float = 0.1
    clip: float = 0.2
    beta: float = 1.0
    ratio: str = JOINT  # of probabilities: of whole rows as published, or of each 'group'
    by_rank: bool = False  # advantages from ranks instead of standard deviations

    def __post_init__(self) -> None:
        """Refuse what makes no search."""
        if not 0.0 < self.elite <= 1.0 or not 0.0 <= self.mixing <= 1.0 or not 0.0 < self.keep <= 1.0:
            raise InputError(
                f"elite is {self.elite!r}, mixing {self.mixing!r}, keep {self.keep!r};"
                " give shares from 0 to 1"
            )
        if self.ppo not in (CLIPPED, KL, NONE) or self.ratio not in (JOINT, GROUP):
            raise InputError(
                f"ppo is {self.ppo!r}, ratio {self.ratio!r};"
                " give 'clipped', 'kl' or '', and 'joint' or 'group'"
            )
        if self.period < 0 or self.ppo_steps < 0:
            raise InputError(f"period is {self.period!r}, ppo_steps {self.ppo_steps!r}; give numbers >= 0")


class TableSearch:
    """Proposes rows from the table, and improves it from what they took."""

    def __init__(
        self, groups: Groups, settings: TableSettings, *, budget: int | None, start: Ints | None = None
    ) -> None:
        self.groups, self.settings = groups, settings
        short = budget is not None and budget <= _SHORT_BUDGET
        self.period = settings.period or (_SHORT_PERIOD if short else _PERIOD)
        self.batch = max(self.period // 10, 2) if settings.ppo else self.period
        self.uniform = groups.cargo.fits / groups.cargo.fits.sum(axis=1, keepdims=True)
        self.mixing = min(1.0, settings.mixing or _MIXED / max(groups.num, 1))
        self.probability = self.uniform.copy()
        if start is not None:
            open_share = min(0.5, _WARM / max(groups.num, 1))
            at_start = _one_hot(self._named(start[None]), groups.num_devices)[0]
            self.probability = (1.0 - open_share) * at_start + open_share * self.uniform
        self._rows: list[Ints] = []
        self._times: list[Floats] = []
        self._elite: tuple[Ints, Floats] | None = None

    def propose(self, rng: np.random.Generator) -> Ints:
        """[B, U] rows of the present table."""
        return self._named(self.groups.draw(self.probability, rng, self.batch))

    def observe(self, rows: Ints, times_s: Floats) -> None:
        """Learn from the times of rows that were proposed."""
        finite = np.isfinite(times_s)
        worst = 10.0 * float(times_s[finite].max()) if finite.any() else 1.0
        times_s = np.where(finite, times_s, worst)
        self._rows.append(rows)
        self._times.append(times_s)
        if sum(map(len, self._rows)) >= self.period:
            self._minimise_cross_entropy()
            self._rows, self._times = [], []
        elif self.settings.ppo and len(rows) > 1:
            self.probability = ascend(self.probability, rows, times_s, self.settings)

    def _named(self, rows: Ints) -> Ints:
        return self.groups.relabel(rows) if self.settings.relabel else rows

    def _minimise_cross_entropy(self) -> None:
        """The table nearest to the elite's distribution, in closed form."""
        rows, times_s = np.concatenate(self._rows), np.concatenate(self._times)
        count = max(1, round(self.settings.elite * len(times_s)))
        if self._elite is not None:
            rows = np.concatenate([rows, self._elite[0]])
            times_s = np.concatenate([times_s, self._elite[1]])
        limit_s = np.partition(times_s, count - 1)[count - 1]
        best = np.flatnonzero(times_s <= limit_s)
        if self.settings.archive:
            first = best[np.argsort(times_s[best], kind="stable")][:count]
            self._elite = rows[first], times_s[first]
        share = _one_hot(rows[best], self.groups.num_devices).mean(axis=0)
        share = self.settings.keep * share + (1.0 - self.settings.keep) * self.probability
        self.probability = (1.0 - self.mixing) * share + self.mixing * self.uniform


def _one_hot(rows: Ints, num_devices: int) -> Floats:
    """[B, U, D] ones."""
    return np.asarray(rows[:, :, None] == np.arange(num_devices), dtype=np.float64)


def advantages(times_s: Floats, *, by_rank: bool) -> Floats:
    """How much better than the others each row is; the unit of time does not matter."""
    if by_rank:
        rank = np.argsort(np.argsort(times_s, kind="stable"), kind="stable")
        return np.asarray(1.0 - 2.0 * rank / max(len(times_s) - 1, 1), dtype=np.float64)
    spread = float(times_s.std())
    if spread <= 1e-12 * float(np.abs(times_s).max()):
        return np.zeros(len(times_s))
    return np.asarray((times_s.mean() - times_s) / spread)


def ascend(probability: Floats, rows: Ints, times_s: Floats, settings: TableSettings) -> Floats:
    """The table after a few steps up the surrogate of samples drawn from it."""
    advantage = advantages(times_s, by_rank=settings.by_rank)
    if not advantage.any():
        return probability
    table: Floats = climb_surrogate(
        probability,
        rows,
        advantage,
        settings.ppo_steps,
        settings.ppo_rate,
        settings.ratio == JOINT,
        settings.ppo == CLIPPED,
        settings.clip,
        settings.beta,
    )
    return table

"""Early stopping: a trial whose metric has not become better for some reports stops."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.searchers import Decision, Entrant, RunAll, metric_value


@dataclass
class Patience(RunAll):
    """Stops a trial after `patience` reports in a row that are not better by more than `min_delta`.

    A trial reports every `every` steps: its own evaluation, or the training loss if it has none.
    """

    every: int
    patience: int = 3
    min_delta: float = 0.0
    metric: str | None = None
    mode: str | None = None
    _steps: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _best: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _waited: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check what was given."""
        for name in ("patience", "every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; give a whole number >= 1")
        if self.mode not in (None, "min", "max"):
            raise InputError(f"mode is {self.mode!r}; give 'min' or 'max'")

    def compare_by(self, metric: str | None, mode: str) -> None:
        """Take metric and mode from the study if they were not given."""
        self.metric = metric if self.metric is None else self.metric
        self.mode = mode if self.mode is None else self.mode

    def begin(self, entrants: Sequence[Entrant]) -> None:
        """The trials that take part."""
        self._steps |= {each.name: each.num_steps for each in entrants}

    def milestone(self, trial: str, step: int) -> int | None:
        """The next report before the end."""
        following = (step // self.every + 1) * self.every
        return following if following < self._steps[trial] else None

    def report(self, trial: str, step: int, metrics: Mapping[str, float]) -> Decision:
        """Continue or stop."""
        value = metric_value(metrics, self.metric)
        worse = math.inf if math.isnan(value) else -value if self.mode == "max" else value
        if worse < self._best.get(trial, math.inf) - self.min_delta:
            self._best[trial], self._waited[trial] = worse, 0
            return Decision.CONTINUE
        self._waited[trial] = self._waited.get(trial, 0) + 1
        return Decision.STOP if self._waited[trial] >= self.patience else Decision.CONTINUE

"""How fast trials step, and when they are saved.

A checkpoint is written every so many steps, or every so many seconds. By default as often as costs no more
than three per cent of the time: after writing for w seconds, the next one is due w / 0.03 seconds later.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from loadmaster.core.errors import InputError
from loadmaster.core.units import parse_seconds

MOST_SHARE = 0.03
_LEAST_S = 60.0
_NUM_KEPT = 9


class Pace:
    """Seconds per step of every trial, and whether a checkpoint is due."""

    def __init__(
        self, planned_s: Mapping[str, float], every: int | str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planned_s, self._clock = planned_s, clock
        self._steps, self._every_s = _parse_every(every)
        self._seen: dict[str, deque[float]] = {}
        self._saved: dict[str, tuple[float, float]] = {}  # when, how long it took

    def note_step(self, trial: str, seconds: float) -> None:
        """A step took so long, by the device's clock."""
        self._seen.setdefault(trial, deque(maxlen=_NUM_KEPT)).append(seconds)

    def step_s(self, trial: str) -> float:
        """The median of the last steps; before the first, what was planned."""
        seen = self._seen.get(trial)
        return median(seen) if seen else self._planned_s.get(trial, 0.0)

    def next_save(self, trial: str, step: int) -> int | None:
        """The step at which a checkpoint by count is due."""
        return None if self._steps is None else (step // self._steps + 1) * self._steps

    def find_last_save(self, step: int) -> int:
        """The step of the last checkpoint by count up to this one; 0 = none is due by count."""
        return 0 if self._steps is None else step // self._steps * self._steps

    @property
    def by_count(self) -> bool:
        """Whether checkpoints come at given steps, whatever they cost."""
        return self._steps is not None

    def is_save_due(self, trial: str, step: int) -> bool:
        """Whether a turn that ends at this step ends with a checkpoint."""
        if self._steps is not None:
            return step % self._steps == 0
        at, took_s = self._saved.setdefault(trial, (self._clock(), 0.0))
        wait_s = self._every_s if self._every_s is not None else max(_LEAST_S, took_s / MOST_SHARE)
        return self._clock() - at >= wait_s

    def note_save(self, trial: str, seconds: float) -> None:
        """A checkpoint was written."""
        self._saved[trial] = self._clock(), seconds


def _parse_every(every: int | str) -> tuple[int | None, float | None]:
    if every == "auto":
        return None, None
    if isinstance(every, int) and not isinstance(every, bool):
        if every < 1:
            raise InputError(
                f"checkpoint_every is {every}; give steps from 1 on, a time such as '10min', or 'auto'"
            )
        return every, None
    return None, parse_seconds(every)

"""Checkpoints kept on request beside the last two: the best of a trial, and where it was stopped.

Both want a checkpoint at every report. The best one is that of the best report whose checkpoint is on disk;
equal ones: the earliest.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from loadmaster.train.coordination.searchers import metric_value
from loadmaster.train.coordination.study_state import TrialEntry
from loadmaster.train.disk.checkpoints import SavedCheckpoint


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept beside the last checkpoints, and by which metric one is the best."""

    best: bool = False
    stopped: bool = False
    metric: str | None = None
    mode: str = "min"

    def wants_save(self, entry: TrialEntry, step: int, *, reports: bool) -> bool:
        """Whether a turn that ends at this step, perhaps with a report, is to be saved."""
        return (self.best or self.stopped) and (reports or step in entry.reports)

    def find_best(self, entry: TrialEntry, root: Path) -> SavedCheckpoint | None:
        """The checkpoint of a trial's best report, where it was asked for and is on disk."""
        if not self.best:
            return None
        sign = -1 if self.mode == "max" else 1
        found: list[tuple[float, int, SavedCheckpoint]] = []
        for saved in entry.committed:
            if saved.step in entry.reports and (root / saved.folder).is_dir():
                value = sign * metric_value(entry.reports[saved.step][0], self.metric)
                found.append((math.inf if math.isnan(value) else value, saved.step, saved))
        return min(found, key=lambda row: row[:2])[2] if found else None

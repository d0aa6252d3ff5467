"""The status of a study, read from its folder, whether it runs, was killed, or has ended."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import Result, TrialResult, TrialStatus
from loadmaster.train.coordination.study_state import StudyState, TrialEntry
from loadmaster.train.disk.journal import Replay, read_journal


@dataclass(frozen=True, slots=True)
class _ReadOnly:
    """A journal that is only read."""

    path: Path
    replay: Replay


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """What the journal of a study tells."""

    folder: Path
    running: bool  # a process has it now
    num_steps: dict[str, int]
    trials: tuple[TrialResult, ...]

    def __str__(self) -> str:
        """A table, and whether it runs."""
        ended = (TrialStatus.DONE, TrialStatus.STOPPED, TrialStatus.FAILED)
        over = all(each.status in ended for each in self.trials)
        how = "running" if self.running else "ended" if over else "not running; fit() continues from here"
        steps = ", ".join(f"{name} {each}" for name, each in self.num_steps.items())
        return f"{Result(self.trials).table()}\n\n{self.folder}: {how}; steps in all: {steps}"

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        document = Result(self.trials).to_json()
        return {
            "folder": str(self.folder),
            "running": self.running,
            "num_steps": self.num_steps,
            "trials": document["trials"],
        }


def read_status(folder: str | os.PathLike[str]) -> StudyStatus:
    """How the study in a folder stands, at what is saved; nothing is written, and one that runs goes on."""
    root = Path(folder)
    journal = root / "journal"
    if not journal.is_file():
        raise InputError(f"{root} is not the folder of a study: it has no journal")
    running = _is_locked(root / "lock")
    state: Any = StudyState(_ReadOnly(journal, read_journal(journal)))  # type: ignore[arg-type]
    entries: dict[str, TrialEntry] = state.entries
    return StudyStatus(
        root,
        running,
        {name: entry.num_steps for name, entry in entries.items()},
        tuple(make_trial_result(entry, root / "checkpoints") for entry in entries.values()),
    )


def make_trial_result(entry: TrialEntry, root: Path) -> TrialResult:
    """What is known of a trial, its best checkpoint apart; `root` has the checkpoints."""
    return TrialResult(
        name=entry.name,
        status=entry.status,
        step=entry.step,
        loss=entry.loss,
        metrics=dict(entry.metrics),
        seconds=entry.seconds,
        num_tokens=entry.num_tokens,
        error=entry.error,
        error_kind=entry.error_kind,
        durable_step=entry.durable_step,
        folder=root / entry.committed[-1].folder if entry.committed else None,
        verified=entry.verified,
    )


def _is_locked(path: Path) -> bool:
    """Whether a process has the folder; looked at for an instant."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False

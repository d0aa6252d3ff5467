"""Messages between the coordinator and its workers: small frozen objects.

    coordinator                                worker of a device
        Task(trial, fence, steps, ...)   -->       Stepped, Stepped, ... , Turned | Failed | SaveFailed
                                         <--       Written, later: a checkpoint that was written beside
        Release(trial)                   -->       Released(parcel)
        Halt                             -->       the turn ends at the next step boundary
                                         <--       Lost, from the pool: the process is gone

A fencing number is given out with every task. Messages and checkpoints of an older one are ignored, so that
a worker which was thought dead cannot change anything when it comes back.
"""

from dataclasses import dataclass
from typing import Any

from loadmaster.train.disk.checkpoints import SavedCheckpoint


@dataclass(frozen=True, slots=True)
class Parcel:
    """A trial's state on its way between workers: the runner itself, a folder in memory, or a snapshot."""

    content: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One turn of a trial on a device."""

    trial: str
    fence: int
    num_steps: int
    evaluate: bool = False  # after the last step
    fresh: bool = False  # the trial begins here
    restore: SavedCheckpoint | None = None  # it goes on from a checkpoint
    parcel: Parcel | None = None  # it comes from another device
    then: str | None = None  # who probably follows: a hint for prefetching
    generation: int = 0  # the number of a checkpoint, where one is written
    save: bool = False  # write one after the steps; the last state of a trial is always written
    beside: bool = False  # while training goes on: there is memory for a copy
    close: bool = False  # let go of its memory afterwards


@dataclass(frozen=True, slots=True)
class Release:
    """Give a trial up: another device takes it, or nobody."""

    trial: str
    fence: int
    drop: bool = False  # nobody: it is at its end, or on disk


@dataclass(frozen=True, slots=True)
class Halt:
    """End the turn at the next step boundary."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Close everything and end."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is done; `done` is the runner's StepDone."""

    trial: str
    fence: int
    done: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """A turn is over."""

    trial: str
    fence: int
    step: int
    finished: bool  # there is no step left
    metrics: dict[str, float] | None = None
    saved: SavedCheckpoint | None = None
    saving: bool = False  # a checkpoint is being written; `CheckpointWritten` follows
    snapshot: Any = None  # where the coordinator writes the checkpoint
    save_s: float = 0.0  # that the device waited for it
    verified: str = ""  # of the first step, where it was compared with the plain model


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """A trial cannot go on; its memory is given back."""

    trial: str
    fence: int
    kind: str  # exception, memory, nan, loader, verify
    text: str  # message and traceback
    device_broken: bool = False  # the device answers nobody any more


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A checkpoint could not be written; the trial itself is well."""

    trial: str
    fence: int
    problem: Exception


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint that was written beside the training, under the fence of its turn; or why it was not."""

    trial: str
    fence: int
    saved: SavedCheckpoint | None
    problem: Exception | None = None


@dataclass(frozen=True, slots=True)
class TrialReleased:
    """A trial was given up."""

    trial: str
    fence: int
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone, and with it what it held."""

    reason: str


Message = Task | Release | Halt | Quit
Event = StepEnded | TurnEnded | TrialFailed | SaveFailed | CheckpointWritten | TrialReleased | WorkerLost

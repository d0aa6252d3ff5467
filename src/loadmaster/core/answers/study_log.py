"""Study log: what the journal of a study says happened, trial by trial and turn by turn; `report` draws
it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnLog:
    """A trial on a device for a number of steps; times since the first turn that was written down."""

    trial: str
    device: str  # '' = an older journal, which does not say
    step: int  # at its end
    loss: float | None
    start_s: float
    end_s: float
    seconds: float  # of its steps
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class TrialLog:
    """One trial."""

    name: str
    status: str
    step: int
    num_steps: int
    seconds: float
    num_tokens: int
    losses: tuple[tuple[int, float], ...]  # (step, loss) at the end of every turn
    metrics: Mapping[str, float]  # of its last report
    bytes_up: int
    bytes_down: int
    error: str


@dataclass(frozen=True, slots=True)
class StudyLog:
    """A study."""

    name: str
    trials: tuple[TrialLog, ...]
    turns: tuple[TurnLog, ...]  # those of which device and time are known
    wall_s: float
    notes: tuple[str, ...] = ()

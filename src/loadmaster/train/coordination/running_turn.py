"""A turn under way, as the coordinator counts it, and what its steps leave for the trace."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadmaster.shards.spec.engine import StepDone
from loadmaster.train.coordination.result import Span
from loadmaster.train.workers.messages import CheckpointWritten


@dataclass
class RunningTurn:
    """A turn under way."""

    device: int
    fence: int
    seconds: float = 0.0
    num_tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    began: float = field(default_factory=time.monotonic)
    loss: float | None = None
    written: CheckpointWritten | None = None  # sooner than the turn was over

    def add(self, done: StepDone) -> None:
        """One step more."""
        self.seconds += done.seconds
        self.num_tokens += done.num_tokens
        self.bytes_up += done.bytes_up
        self.bytes_down += done.bytes_down
        self.loss = done.loss


def convert_spans(done: StepDone, *, device: str, trial: str, began: float) -> Iterator[Span]:
    """What a step did, on the clock of the study."""
    for lane, label, start_s, end_s in done.spans:
        yield Span(device, lane, label, trial, start_s - began, end_s - began)

"""Clock: the spans of one rank's step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class RankSpan:
    """Something this rank did: 'F', 'B', 'WAIT', 'REDUCE' or 'UPDATE' of ops of one share."""

    work: str
    share: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Clock:
    """Spans of the last step on this rank's clock."""

    where: torch.device
    synchronize: bool = False  # GPUs are waited for after every span
    spans: list[RankSpan] = field(default_factory=list)

    @contextmanager
    def span(self, work: str, share: int) -> Iterator[None]:
        """Time something."""
        begun = time.monotonic()
        try:
            yield
        finally:
            if self.synchronize and self.where.type == "cuda":
                torch.cuda.synchronize(self.where)
            self.spans.append(RankSpan(work, share, begun, time.monotonic()))

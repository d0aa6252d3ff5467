"""Busy machine: whether other work took the processors while something was measured here.

Linux counts the time of all processors (/proc/stat, with what a hypervisor stole from them). Less this
process's own, that is what others used. They disturb as soon as the processors that they leave free are
fewer than the threads that run here: threads of one op then wait for each other, and an op of microseconds
takes as long as the scheduler's turn. Where the system does not say, nothing is claimed.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CALM, BUSY, UNKNOWN = "calm", "busy", ""  # what a row of the database says of its moment
TOLERATED_CORES = 0.3  # of other work: an idle machine's own chores take a few hundredths
LEAST_S = 0.25  # shorter windows are too few ticks of the system's clock to judge by
_STAT = Path("/proc/stat")
_WORKING = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle, iowait


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Seconds so far."""

    wall_s: float
    all_s: float | None  # of every processor together, whoever used it; None: unknown
    own_s: float  # of this process


def read_processor_times() -> ProcessorTimes:
    """Now."""
    used = os.times()
    try:
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        all_s: float | None = sum(ticks[at] for at in _WORKING) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        all_s = None
    return ProcessorTimes(time.perf_counter(), all_s, used.user + used.system)


def count_cores() -> int:
    """All processors of the machine: the times are those of all."""
    return os.cpu_count() or 1


@dataclass(slots=True)
class BusyWatch:
    """Watches the machine from when it is made."""

    threads: int = 1  # that run here at a time
    cores: int = field(default_factory=count_cores)
    read: Callable[[], ProcessorTimes] = read_processor_times
    _began: ProcessorTimes = field(init=False)
    _lap: ProcessorTimes = field(init=False)
    _lap_busy: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Begin."""
        self._began = self._lap = self.read()

    @property
    def others_cores(self) -> float:
        """How many processors other work has used since the beginning, on average."""
        return _others_between(self._began, self.read())

    @property
    def is_busy(self) -> bool:
        """Whether other work left too few processors since the beginning."""
        return self._disturbs(self.others_cores)

    def is_busy_now(self) -> bool:
        """Whether it does of late: over the last stretch that is long enough to tell."""
        now = self.read()
        if now.wall_s - self._lap.wall_s >= LEAST_S:
            self._lap_busy = self._disturbs(_others_between(self._lap, now))
            self._lap = now
        return self._lap_busy

    def wait_to_tell(self) -> None:
        """Wait until there is a stretch long enough to tell."""
        left_s = LEAST_S - (self.read().wall_s - self._lap.wall_s)
        if left_s > 0:
            time.sleep(left_s)

    def _disturbs(self, others_cores: float) -> bool:
        return others_cores > max(0, self.cores - self.threads) + TOLERATED_CORES


def _others_between(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """Processors that others used between two readings; 0 where nobody knows or it was too short."""
    wall_s = after.wall_s - before.wall_s
    if before.all_s is None or after.all_s is None or wall_s < LEAST_S:
        return 0.0
    return max(0.0, (after.all_s - before.all_s - (after.own_s - before.own_s)) / wall_s)

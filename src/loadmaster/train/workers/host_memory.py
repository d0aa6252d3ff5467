"""Where the states of trials are, and whether one more fits into host memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadmaster.train.workers.messages import Parcel


@dataclass
class TrialLocations:
    """A device's number: its worker holds the trial. A parcel: between workers. Missing: on disk, or new."""

    host_bytes: Mapping[str, int]  # of each trial
    cap_bytes: int
    where: dict[str, int | Parcel] = field(default_factory=dict)

    def admits(self, trial: str) -> bool:
        """Whether it is open, or may be opened beside those that are."""
        if trial in self.where:
            return True
        return self.taken_bytes + self.host_bytes[trial] <= self.cap_bytes

    @property
    def taken_bytes(self) -> int:
        """Of all trials that are open."""
        return sum(self.host_bytes[name] for name in self.where)

    def free(self, trial: str) -> None:
        """Its memory is free."""
        self.where.pop(trial, None)

"""A job that asks for devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadmaster.advisor.jobs.curve import ScalingCurve
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is known of a job when it arrives; times are seconds, the deadline counts from the state's
    clock."""

    name: str
    curve: ScalingCurve
    deadline_s: float = math.inf
    value: float = 1.0
    requested: int = 1  # what its owner asked for
    sequential_s: float = 0.0  # on one device; 0: the curve's point of 1 device
    needs: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # published placer: blocks taken by a degree

    def __post_init__(self) -> None:
        """Nothing negative."""
        if math.isnan(self.deadline_s) or self.deadline_s < 0:
            raise InputError(f"job {self.name!r} has a deadline of {self.deadline_s!r} s; give a time >= 0")
        if not math.isfinite(self.value) or self.value < 0:
            raise InputError(f"job {self.name!r} has a value of {self.value!r}; give a number >= 0")
        if isinstance(self.requested, bool) or self.requested != int(self.requested) or self.requested < 1:
            raise InputError(
                f"job {self.name!r} asks for {self.requested!r} devices; give a whole number >= 1"
            )

    @property
    def work_s(self) -> float:
        """Time on one device, or on the fewest it runs on times their number."""
        if self.sequential_s > 0:
            return self.sequential_s
        fewest = self.curve.degrees[0]
        return fewest * self.curve.best(fewest)

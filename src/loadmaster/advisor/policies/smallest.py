"""The smallest number of devices that meets the deadline and is free; fewest devices for each job."""

from dataclasses import dataclass

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Smallest:
    """Not below a floor; without `go_on`, a job whose number is not free is rejected rather than given
    more."""

    floor: int = 1
    go_on: bool = True

    def __post_init__(self) -> None:
        """A number of devices."""
        if self.floor < 1:
            raise InputError(f"policy smallest has a floor of {self.floor} devices; give a whole number >= 1")

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.MEETS, self.floor, self.go_on)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """Scan the numbers upward."""
        for n in job.curve.degrees:
            if n < self.floor:
                continue
            if not self.go_on and state.layout.blocks:
                first = state.layout.blocks[n][0]
                if job.curve.time(n, first.kind, first.form) <= job.deadline_s:
                    return Decision(n)
                continue
            block, time = state.best_block(job, n)
            if block is not None and time <= job.deadline_s:
                return Decision(n, block if not state.layout.blocks else None)
            if not self.go_on and job.curve.best(n) <= job.deadline_s:
                return REJECT
        return REJECT


POLICY = Smallest

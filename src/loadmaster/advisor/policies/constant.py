"""Always the same number of devices; the best constant is the baseline that everything must beat."""

from dataclasses import dataclass

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Constant:
    """The number."""

    degree: int = 4

    def __post_init__(self) -> None:
        """A number of devices."""
        if self.degree < 1:
            raise InputError(f"policy constant has {self.degree} devices; give a whole number >= 1")

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.CONSTANT, self.degree)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """The number where it is offered."""
        offered = self.degree in job.curve.degrees and state.offers(self.degree)
        return Decision(self.degree) if offered else REJECT


POLICY = Constant

"""Always the largest number of devices that is offered (PAC-ML's Para_max)."""

from dataclasses import dataclass

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run


@dataclass(frozen=True, slots=True)
class ParaMax:
    """No parameters."""

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.PARA_MAX)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """The largest that is offered."""
        offered = [n for n in job.curve.degrees if state.offers(n)]
        return Decision(offered[-1]) if offered else REJECT


POLICY = ParaMax

"""Any number of devices that is offered, each as likely as the others."""

from dataclasses import dataclass

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run


@dataclass(frozen=True, slots=True)
class RandomDegree:
    """No parameters."""

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.RANDOM)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """One draw for every decision."""
        offered = [n for n in job.curve.degrees if state.offers(n)]
        draw = run.rng.random()
        return Decision(offered[int(draw * len(offered))]) if offered else REJECT


POLICY = RandomDegree

"""The smallest number of devices that would do if speed-up were perfect, else the largest (PAC-ML's
Para_min)."""

import math
from dataclasses import dataclass

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run


@dataclass(frozen=True, slots=True)
class ParaMin:
    """No parameters."""

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.PARA_MIN)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """The smallest offered number that is at least work / deadline."""
        offered = [n for n in job.curve.degrees if state.offers(n)]
        if not offered:
            return REJECT
        least = math.ceil(job.work_s / job.deadline_s) if job.deadline_s > 0 else math.inf
        return Decision(next((n for n in offered if n >= least), offered[-1]))


POLICY = ParaMin

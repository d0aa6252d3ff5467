"""ElasticFlow's minimum satisfactory share: the least number that meets the deadline, now or reserved for
later."""

import math
from dataclasses import dataclass

import numpy as np

from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run


@dataclass(frozen=True, slots=True)
class ElasticFlow:
    """No parameters; reservations are devices that are taken until a time (ASPLOS 2023, rigid form)."""

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """Raise the number until some start keeps the deadline; a later start is a reservation."""
        due = state.now_s + job.deadline_s
        starts = np.unique(np.maximum(state.free_at_s[np.isfinite(state.free_at_s)], state.now_s))
        for n in job.curve.degrees:
            if n > state.layout.num_devices:
                break
            best = job.curve.best(n)
            for start in starts[starts + best <= due + 1e-9] if math.isfinite(best) else ():
                block, time = state.at(float(start)).best_block(job, n)
                if block is not None and start + time <= due:
                    later = float(start) if start > state.now_s + 1e-7 else None
                    return Decision(n, block, later)
        return REJECT


POLICY = ElasticFlow

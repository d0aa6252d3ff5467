"""The smallest number that meets the deadline, on the block that spoils fewest larger blocks (buddy and
tiling)."""

import math
from dataclasses import dataclass

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class BestFit:
    """Not below a floor; `go_on` to larger numbers where none is free."""

    floor: int = 1
    go_on: bool = True

    def __post_init__(self) -> None:
        """A number of devices."""
        if self.floor < 1:
            raise InputError(f"policy best_fit has a floor of {self.floor} devices; give a whole number >= 1")

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.BEST_FIT, self.floor, self.go_on)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """On hosts the tightest host is the best fit already."""
        larger = [n for n in sorted(state.layout.blocks) if n > 0]
        free = {n: [set(b.devices) for b in state.free_blocks(n)] for n in larger}
        for n in (n for n in job.curve.degrees if n >= self.floor):
            best, best_cost = None, math.inf
            for block in state.free_blocks(n):
                if job.curve.time(n, block.kind, block.form) > job.deadline_s:
                    continue
                taken = set(block.devices)
                above = [m for m in larger if m > n]
                cost = sum(100.0**i * sum(bool(b & taken) for b in free[m]) for i, m in enumerate(above))
                if cost < best_cost:
                    best, best_cost = block, cost
            if best is not None:
                return Decision(n, best)
            if not self.go_on and job.curve.best(n) <= job.deadline_s:
                return REJECT
        return REJECT


POLICY = BestFit

"""Tries every answer on sampled futures under a base policy and takes the one with most jobs in time."""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, Block, ClusterState, Decision
from loadmaster.advisor.policies.registry import Policy, Run, policy


@dataclass(frozen=True, slots=True)
class Rollout:
    """How far and how often to look ahead, and under which base; ties keep the base's answer."""

    horizon: int = 30
    futures: int = 20
    base: str = "smallest"

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        base: Rule = policy(self.base).rule  # type: ignore[attr-defined]
        if base.kind >= Kind.GIVEN:
            raise ValueError("a rollout needs a base that is a rule")
        return replace(base, rollout=(self.horizon, self.futures))

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """Without jobs that may come (`run.future`) the base policy answers."""
        base = policy(self.base)
        first = base(job, state, run)
        if not run.future or run.mean_gap_s <= 0:
            return first
        options: list[tuple[Decision, ClusterState, float]] = [_after(first, job, state)]
        for n in job.curve.degrees:
            block, time = state.best_block(job, n)
            if block is not None and time <= job.deadline_s and n != first.degree:
                options.append((Decision(n, block), _take(state, block, time), job.value))
        if first.admit:
            options.append((REJECT, state, 0.0))
        seed = int(run.rng.integers(2**62))
        values = [
            gain * self.futures
            + sum(
                self._future(after, base, run, np.random.default_rng([seed, f])) for f in range(self.futures)
            )
            for _, after, gain in options
        ]
        return options[int(np.argmax(values))][0]

    def _future(self, state: ClusterState, base: Policy, run: Run, rng: np.random.Generator) -> float:
        """Value of the jobs a future lets in."""
        total = 0.0
        for _ in range(self.horizon):
            state = state.at(state.now_s + rng.exponential(run.mean_gap_s))
            job = run.future[int(rng.integers(len(run.future)))]
            _, state, gain = _after(base(job, state, Run(rng)), job, state)
            total += gain
        return total


def _after(decision: Decision, job: Job, state: ClusterState) -> tuple[Decision, ClusterState, float]:
    """The decision, the state after it, and the value it brings."""
    if not decision.admit:
        return decision, state, 0.0
    block = decision.block or state.place(job, decision.degree)
    if block is None:
        return decision, state, 0.0
    time = job.curve.time(decision.degree, block.kind, block.form)
    if time > job.deadline_s:
        return decision, state, 0.0
    return decision, _take(state, block, time), job.value


def _take(state: ClusterState, block: Block, time: float) -> ClusterState:
    return state.taking(block.devices, state.now_s + time)


POLICY = Rollout

"""Tries every answer on sampled futures under a base policy and takes the one with most jobs in time."""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.environments.host_futures import Futures, draw_futures, future_value, job_table
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, Block, ClusterState, Decision
from loadmaster.advisor.policies.registry import Policy, Run, policy
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Rollout:
    """How far and how often to look ahead, and under which base; ties keep the base's answer."""

    horizon: int = 30
    futures: int = 20
    base: str = "smallest"

    def __post_init__(self) -> None:
        """At least one arrival in at least one future."""
        if self.horizon < 1 or self.futures < 1:
            raise InputError(
                f"policy rollout looks at {self.horizon} arrivals in {self.futures} futures;"
                " give at least 1 of each"
            )

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        base: Rule = policy(self.base).rule  # type: ignore[attr-defined]
        if base.kind >= Kind.GIVEN:
            raise InputError(
                f"a rollout in replays cannot be based on {self.base!r}; take smallest, for example"
            )
        return replace(base, rollout=(self.horizon, self.futures))

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """Without jobs that may come (`run.future`) the base policy answers, and says so."""
        base = policy(self.base)
        first = base(job, state, run)
        if not run.future or run.mean_gap_s <= 0:
            told = f"no future jobs are given, so there is nothing to look ahead to: {self.base} answered"
            return replace(first, warning=told)
        options: list[tuple[Decision, ClusterState, float]] = [_after(first, job, state)]
        for n in job.curve.degrees:
            block, time = state.best_block(job, n)
            if block is not None and time <= job.deadline_s and n != first.degree:
                options.append((Decision(n, block), _take(state, block, time), job.value))
        if first.admit:
            options.append((REJECT, state, 0.0))
        futures = draw_futures(run.rng, len(run.future), run.mean_gap_s, (self.futures, self.horizon))
        values = self._values([after for _, after, _ in options], base, run, futures)
        totals = [gain * self.futures + value for (_, _, gain), value in zip(options, values, strict=True)]
        return options[int(np.argmax(totals))][0]

    def _values(self, states: list[ClusterState], base: Policy, run: Run, futures: Futures) -> list[float]:
        """Value of the jobs that the futures let in, from each state on."""
        if self.base == "smallest" and not states[0].layout.blocks:
            table = job_table(run.future, states[0].layout)
            return [future_value(state, table, futures) for state in states]
        return [play_futures(state, base, run.future, futures) for state in states]


def play_futures(state: ClusterState, base: Policy, jobs: tuple[Job, ...], futures: Futures) -> float:
    """The same as `host_futures.future_value`, for any base and any layout."""
    total = 0.0
    for gaps, drawn in zip(futures.gap_s, futures.job, strict=True):
        then = state
        for gap, j in zip(gaps, drawn, strict=True):
            then = then.at(then.now_s + float(gap))
            _, then, gain = _after(base(jobs[j], then, Run()), jobs[j], then)
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

"""Jobs arrive one by one at a cluster of eight GPUs, each with a deadline. How many GPUs should each get?

Three policies decide for the same jobs: as many GPUs as possible, one each, and the smallest number that
meets the deadline. `loadmaster advise replay` does this for recorded traces of thousands of jobs.
"""

import random
from dataclasses import replace

import numpy as np

import loadmaster as lm
from loadmaster.advisor.ask import layout_of
from loadmaster.advisor.jobs.state import idle
from loadmaster.advisor.policies.registry import Policy, policy

chance = random.Random(0)
jobs = []
for at in range(60):
    seconds = chance.uniform(1000, 6000)
    scaling = {n: seconds / n**0.8 for n in (1, 2, 4, 8)}
    jobs.append((at * 300.0, scaling, seconds * chance.uniform(0.3, 1.2)))


def count_met(by: Policy) -> int:
    """How many of the jobs end in time."""
    state = idle(layout_of("8xA100-80GB"))
    free_at_s = np.zeros(8)
    met = 0
    for now_s, scaling, deadline_s in jobs:
        state = replace(state, free_at_s=free_at_s, now_s=now_s)
        advice = lm.advise(scaling, state, deadline_s=deadline_s, by=by)
        if advice.admit:
            met += 1
            free_at_s[list(advice.devices)] = now_s + advice.finish_s
    return met


for name, by in {
    "as many as possible": policy("para_max"),
    "one each": policy("constant", degree=1),
    "the smallest that meets the deadline": policy("smallest"),
}.items():
    print(f"{name:37} {count_met(by)} of {len(jobs)} jobs in time")

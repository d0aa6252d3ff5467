"""An algorithm of your own, judged by the same simulator and the same bound as all others."""

from dataclasses import dataclass

import numpy as np

import loadmaster as lm
from loadmaster.core.placement import Placement
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_of
from loadmaster.placers.placement_units import load_cargo


@dataclass(frozen=True, slots=True)
class RandomRestarts:
    """Random placements of the forward order cut into blocks; the best of `tries`."""

    tries: int = 50

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Draw cuts, keep the best plan."""
        cargo = load_cargo(problem)  # units that must move as one, and the devices that can hold each
        num_units, num_devices = cargo.fits.shape
        plans = []
        for _ in range(self.tries):
            cuts = np.sort(run.rng.integers(0, num_units, num_devices - 1))
            device = np.searchsorted(cuts, np.arange(num_units), side="right")
            plans.append(plan_of(device[cargo.of_op].astype(np.int32)))
        return best_of(problem, run, plans, algorithm="random_restarts")


problem = lm.problem("gen:transformer:300", "V100-16GB, T4, RTX2080")
for algorithm in (RandomRestarts(), "chain_balance", "auto"):
    placement = lm.plan(problem, algorithm=algorithm, budget="300x")
    gap = f"at most {placement.gap:.0%} above the best"
    print(f"{placement.algorithm:28} {placement.score_s * 1e3:8.2f} ms, {gap}")

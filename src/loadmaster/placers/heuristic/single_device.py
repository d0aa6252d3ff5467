"""Everything on the best single device that has room for it.

The baseline every plan must beat. Ops that cannot run there, or are pinned elsewhere, go to their
fastest allowed device. One simulation for each device that differs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import FREE, Problem
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_of
from loadmaster.placers.placement_units import load_cargo
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """No parameters."""

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Try every device, the one with the least total time first."""
        cargo = load_cargo(problem)
        fastest = cargo.seconds.argmin(axis=1)
        here = np.where(cargo.fits, np.arange(problem.cluster.num_devices), fastest[:, None])
        units = np.arange(cargo.num_units)[:, None]
        order = np.argsort(cargo.seconds[units, here].sum(axis=0), kind="stable")

        look = np.stack([problem.cluster.kind, problem.cluster.usable_bytes], axis=1)
        if (problem.pinned == FREE).all():  # then devices that look alike do alike
            order = order[np.sort(np.unique(look[order], axis=0, return_index=True)[1])]

        def plans() -> Iterable[Plan]:
            for d in order:
                run.progress(f"single device {problem.cluster.device_name[d]}", 0.0)
                yield plan_of(here[:, d][cargo.of_op].astype(np.int32))

        return best_of(problem, run, plans(), algorithm="single_device", mend=False)


PLACER: type[Placer] = SingleDevice

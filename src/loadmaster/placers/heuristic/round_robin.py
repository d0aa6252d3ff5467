"""Puts units on the devices in turn, and skips devices that are full.

The classic naive baseline: balanced counts, no thought for time or transfers. O(U) and a few
simulations. It makes free splits only.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_repaired
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """No parameters."""

    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Deal, and deal again with less room where memory overflows."""
        cargo = load_cargo(problem)
        builders = [lambda unit_bytes, room: deal_units(cargo, unit_bytes, room)]
        return best_repaired(problem, run, cargo, builders, algorithm="round_robin")


def deal_units(cargo: Cargo, unit_bytes: Floats, room: Floats) -> Ints:
    """[U] the next device in turn that is allowed and has room, else the allowed one with most room."""
    free = room.tolist()
    num = len(free)
    device = np.empty(cargo.num_units, dtype=np.int32)
    size, fits = unit_bytes.tolist(), cargo.fits.tolist()
    turn = 0
    for u in range(cargo.num_units):
        choices = [(turn + k) % num for k in range(num) if fits[u][(turn + k) % num]]
        d = next((c for c in choices if free[c] >= size[u]), max(choices, key=lambda c: free[c]))
        device[u] = d
        free[d] -= size[u]
        turn = (d + 1) % num
    return device


PLACER: type[Placer] = RoundRobin

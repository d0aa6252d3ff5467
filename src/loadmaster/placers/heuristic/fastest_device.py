"""Puts each unit on the device that computes it fastest, while there is room.

Minimum execution time: greedy in time and memory, blind to transfers and to queues. O(U D) and a
few simulations. It makes free splits only.
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
class FastestDevice:
    """No parameters."""

    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Choose, and choose again with less room where memory overflows."""
        cargo = load_cargo(problem)
        builders = [lambda unit_bytes, room: choose_devices(cargo, unit_bytes, room)]
        return best_repaired(problem, run, cargo, builders, algorithm="fastest_device")


def choose_devices(cargo: Cargo, unit_bytes: Floats, room: Floats) -> Ints:
    """[U] the fastest allowed device with room (the lower index on ties), else the one with most room."""
    free = room.tolist()
    preference = np.argsort(cargo.seconds, axis=1, kind="stable").tolist()
    size, fits = unit_bytes.tolist(), cargo.fits.tolist()
    device = np.empty(cargo.num_units, dtype=np.int32)
    for u in range(cargo.num_units):
        choices = [d for d in preference[u] if fits[u][d]]
        d = next((c for c in choices if free[c] >= size[u]), max(choices, key=lambda c: free[c]))
        device[u] = d
        free[d] -= size[u]
    return device


PLACER: type[Placer] = FastestDevice

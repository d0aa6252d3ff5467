"""m-TOPO: fills device after device in topological order, up to an even share of memory.

Baechi (Jeon et al., SoCC 2020). The published cap is total / n + the largest unit, blind to what a device
really has; here each device's cap is its share of the total by its own memory plus the largest unit, never
more than its memory, and the last device takes what is left. O(U log U) and a few simulations.
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
class MTopo:
    """No parameters."""

    splits: ClassVar[tuple[Split, ...]] = (Split.FREE,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Fill, and fill again with less room where memory overflows."""
        cargo = load_cargo(problem)
        return best_repaired(
            problem, run, cargo, [lambda size, room: fill_devices(cargo, size, room)], algorithm="m_topo"
        )


def fill_devices(cargo: Cargo, unit_bytes: Floats, room: Floats) -> Ints:
    """[U] the current device until its cap is reached, then the next; never back."""
    share = room / room.sum() if room.sum() > 0 else np.full(len(room), 1.0 / len(room))
    cap = np.minimum(share * unit_bytes.sum() + unit_bytes.max(initial=0.0), room).tolist()
    size, fits = unit_bytes.tolist(), cargo.fits.tolist()
    used, left = [0.0] * len(cap), room.tolist()
    device = np.empty(cargo.num_units, dtype=np.int32)
    d = 0
    for u in range(cargo.num_units):
        while d < len(cap) - 1 and used[d] + size[u] > cap[d]:
            d += 1
        here = d
        if not fits[u][d] or used[d] + size[u] > left[d]:
            choices = [c for c in range(len(cap)) if fits[u][c]]
            here = max(choices, key=lambda c: left[c] - used[c])
        device[u] = here
        used[here] += size[u]
    return device


PLACER: type[Placer] = MTopo

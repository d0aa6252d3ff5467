"""Seconds as whole ticks, rounded down, so that what a solver proves in ticks holds in seconds.

Let floor map every moment of a real run to ticks. It keeps every order of moments, and floor(a + b) >=
floor(a) + floor(b): what takes p seconds takes floor(p) ticks or more. So the run is a solution of the
model in ticks, and the model's bound is one of the run.

A step is less than 2**30 ticks: with more than 2**32, CP-SAT (9.15) was seen to call models infeasible that
have a solution. Where all durations are whole numbers of a decimal or binary fraction of a second, that is
the tick, and nothing is lost; else a step is cut into 2**29 ticks, and each op loses less than one.
"""

import math
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Longs

_MOST = 2.0**30
_SAME = 1e-12  # relative: a float is that near the fraction it stands for


@dataclass(frozen=True, slots=True)
class Ticks:
    """`per_s` ticks a second."""

    per_s: float
    exact: bool  # no duration was rounded, but for the last bits of floats

    def down(self, seconds: Floats) -> Longs:
        """Whole ticks, rounded down; infinite is 0 (and forbidden elsewhere)."""
        scaled = np.where(np.isfinite(seconds), seconds, 0.0) * self.per_s
        near = np.rint(scaled)
        whole: Longs = np.where(_is_near_whole(scaled), near, np.floor(scaled)).astype(np.int64)
        return whole

    def one(self, seconds: float) -> int:
        """Of one duration."""
        return int(self.down(np.array([seconds]))[0])

    def seconds(self, ticks: float) -> float:
        """Back, less what floats may hide."""
        return ticks / self.per_s * (1.0 - 4 * _SAME)


def choose_ticks(durations: Floats, horizon_s: float) -> Ticks:
    """The tick for durations of a step that takes at most `horizon_s`."""
    known = np.unique(durations[np.isfinite(durations)])
    finest = _MOST / max(horizon_s, 1e-300)
    for base in (2.0, 10.0):
        power = math.floor(math.log(finest, base))
        for per_s in (base ** (power - step) for step in range(10, -1, -1)):
            if per_s <= finest and _is_near_whole(known * per_s).all():
                return Ticks(per_s, True)
    return Ticks(2.0 ** math.floor(math.log2(finest) - 1), False)


def _is_near_whole(scaled: Floats) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """Where a number of ticks is whole, but for the last bits."""
    return np.asarray(np.abs(scaled - np.rint(scaled)) <= _SAME * scaled)

"""How a cluster was used over the time of a stream: what was busy, and when free devices were scattered.

Both are taken between the first and the last arrival. Scattered (fragmented) means: four devices are free,
and no four of them stand together.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.blocks import NUM_SERVERS
from loadmaster.advisor.environments.engine import Outcome
from loadmaster.advisor.environments.trace_engine import TraceOutcome

BINS = 40
_TOGETHER = 4


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Shares of the devices and of the time."""

    utilisation: float
    fragmented: float
    utilisation_over_time: NDArray[np.float64]  # [BINS]
    fragmented_over_time: NDArray[np.float64]  # [BINS]


def history_of_decisions(outcome: Outcome) -> History:
    """Of the published cluster, which is seen at arrivals."""
    decided = outcome.num_free >= 0
    busy = 1 - outcome.num_free[decided] / NUM_SERVERS
    scattered = outcome.is_fragmented[decided].astype(np.float64)
    return History(outcome.utilisation, outcome.fragmented, _binned(busy), _binned(scattered))


def _binned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([part.mean() if len(part) else np.nan for part in np.array_split(values, BINS)])


def history_of_trace(outcome: TraceOutcome, arrival_s: NDArray[np.float64], num_devices: int) -> History:
    """Of a trace, weighted by time."""
    notes = outcome.history
    first, last = float(arrival_s.min()), float(arrival_s.max())
    if last <= first or not len(notes):
        empty = np.zeros(BINS)
        return History(0.0, 0.0, empty, empty)
    until = np.clip(notes[:, 0], first, last)
    length = np.diff(until, prepend=first)
    busy = 1 - notes[:, 1] / num_devices
    scattered = ((notes[:, 1] >= _TOGETHER) & (notes[:, 2] < _TOGETHER)).astype(np.float64)
    edges = np.linspace(first, last, BINS + 1)
    curves = []
    for values in (busy, scattered):
        sums = np.interp(
            edges, np.concatenate([[first], until]), np.concatenate([[0], np.cumsum(values * length)])
        )
        curves.append(np.diff(sums) / np.diff(edges))
    total = float(last - first)
    return History(
        float((busy * length).sum() / total), float((scattered * length).sum() / total), curves[0], curves[1]
    )

"""Streams of arriving jobs: which model, when, and with which deadline (section 2.6 of PAC-ML's rules).

A stream is drawn once for a seed and given to every policy, so that comparisons are paired.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.errors import InputError, UnknownNameError

INTERVAL = 1000.0
HORIZON = 1e6
_SKEW: Final = {"B": 5.0, "C": 0.0, "D": -5.0}
DISTRIBUTIONS = ("A", "B", "C", "D")
_DRAWS = 50_000
_BINS = 1000
_LEAST = 0.1
COPIES = 201


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """J arrivals; the last one is counted and never decided, as the published environment does."""

    model: NDArray[np.int64]  # [J]
    beta: NDArray[np.float64]  # [J] deadline over the time on one device
    arrival: NDArray[np.float64]  # [J]
    uniform: NDArray[np.float64]  # [J] for policies that draw
    future_beta: NDArray[np.float64]  # [F] sample of the distribution, for policies that look ahead
    horizon: float
    period: float  # time between arrivals where it is fixed, else 0

    @property
    def num_decided(self) -> int:
        """Arrivals that are decided."""
        return len(self.model) - 1


def draw_stream(
    distribution: str, seed: int, *, num_models: int = 5, poisson: bool = False, copies: int = COPIES
) -> Stream:
    """The stream of a seed: the pool's deadlines, the order of its jobs, their arrivals."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}; give a whole number >= 0")
    rng = np.random.default_rng([seed, _index(distribution)])
    draw = _sampler(distribution, rng)
    pool_model = np.tile(np.arange(num_models), copies)
    pool_beta = draw(len(pool_model))
    arrival = _poisson_arrivals(rng) if poisson else np.arange(0.0, HORIZON + INTERVAL / 2, INTERVAL)
    rounds = -(-len(arrival) // len(pool_model))
    order = np.concatenate([rng.permutation(len(pool_model)) for _ in range(rounds)])[: len(arrival)]
    return Stream(
        model=pool_model[order],
        beta=pool_beta[order],
        arrival=arrival,
        uniform=rng.random(len(arrival)),
        future_beta=draw(4096),
        horizon=HORIZON,
        period=0.0 if poisson else INTERVAL,
    )


def _index(distribution: str) -> int:
    if distribution not in DISTRIBUTIONS:
        raise UnknownNameError("deadline distribution", distribution, DISTRIBUTIONS)
    return DISTRIBUTIONS.index(distribution)


def _sampler(distribution: str, rng: np.random.Generator):  # type: ignore[no-untyped-def]
    """A function that draws deadline fractions."""
    if distribution == "A":
        return lambda count: rng.integers(10, 101, count) / 100.0
    shape = _SKEW[distribution]
    delta = shape / np.sqrt(1 + shape**2)
    values = delta * np.abs(rng.standard_normal(_DRAWS)) + np.sqrt(1 - delta**2) * rng.standard_normal(_DRAWS)
    values -= values.min()
    values = np.maximum(values / values.max(), _LEAST)
    counts, edges = np.histogram(values, bins=_BINS)
    upper = np.round(edges[1:], 2)
    return lambda count: rng.choice(upper, count, p=counts / counts.sum())


def _poisson_arrivals(rng: np.random.Generator) -> NDArray[np.float64]:
    gaps = rng.exponential(INTERVAL, int(2 * HORIZON / INTERVAL))
    arrival = np.concatenate([[0.0], np.cumsum(gaps)])
    arrival = arrival[arrival < HORIZON]
    return np.append(arrival, HORIZON)

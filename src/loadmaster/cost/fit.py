"""Fit: the roofline that comes nearest to what was measured, for the ops that were not.

    seconds = max(flops / (share_d x peak rate of dtype d), bytes / (share_m x memory rate)) + overhead

The shares and the overhead minimise the sum of |log(predicted / measured)|: every op counts alike, small
or large, and a few that are far off do not pull the rest (the fit is a median in disguise). A pattern search
over the logarithms: halve the step when no parameter helps any more. It takes milliseconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Bytes8, Floats

LEAST_SAMPLES = 4
LEAST_ERROR = 0.1
_LOW, _HIGH = np.log(1e-6), np.log(4.0)  # of a share; a kind may be a little better than its name says
_LEAST_OVERHEAD_S, _MOST_OVERHEAD_S = 1e-8, 1e-2
_FIRST_STEP, _LAST_STEP = 1.0, 0.005
_MOST_SWEEPS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """S measured ops of one device kind."""

    seconds: Floats  # [S]
    flops: Floats  # [S]
    bytes_moved: Floats  # [S]
    dtype: Bytes8  # [S]


@dataclass(frozen=True, slots=True, eq=False)
class RooflineFit:
    """What a device kind achieves."""

    flops_per_s: Floats  # [Dtype]
    bytes_per_s: float
    overhead_s: float
    rel_error: float  # the median over the samples

    def seconds(self, flops: Floats, bytes_moved: Floats, dtype: Bytes8) -> Floats:
        """What ops take."""
        work: Floats = np.maximum(flops / self.flops_per_s[dtype], bytes_moved / self.bytes_per_s)
        return work + self.overhead_s


def fit_roofline(samples: Samples, flops_per_s: Floats, bytes_per_s: float) -> RooflineFit | None:
    """The fit from published rates [Dtype] as a start; None where there are too few samples."""
    usable = (samples.seconds > 0) & ((samples.flops > 0) | (samples.bytes_moved > 0))
    if int(usable.sum()) < LEAST_SAMPLES:
        return None
    measured = np.log(samples.seconds[usable])
    dtypes, row = np.unique(samples.dtype[usable], return_inverse=True)
    math_s = samples.flops[usable] / flops_per_s[samples.dtype[usable]]  # at the published rate
    memory_s = samples.bytes_moved[usable] / bytes_per_s
    num = len(dtypes)

    def loss(logs: Floats) -> float:
        work = np.maximum(math_s / np.exp(logs[row]), memory_s / np.exp(logs[num]))
        return float(np.abs(np.log(work + np.exp(logs[num + 1])) - measured).sum())

    logs = _pattern_search(loss, _starting_point(samples.seconds[usable], math_s, memory_s, row, num))
    rates = flops_per_s.copy()
    pooled = float(np.exp(np.median(logs[:num])))  # dtypes that were not seen are as far from their peak
    rates *= pooled
    rates[dtypes] = flops_per_s[dtypes] * np.exp(logs[:num])
    error = loss(logs) / len(measured)
    return RooflineFit(
        flops_per_s=rates,
        bytes_per_s=bytes_per_s * float(np.exp(logs[num])),
        overhead_s=float(np.exp(logs[num + 1])),
        rel_error=max(LEAST_ERROR, float(np.expm1(error))),
    )


def _starting_point(
    seconds: Floats, math_s: Floats, memory_s: Floats, row: NDArray[np.intp], num: int
) -> Floats:
    """The best that any sample reached; the quickest sample as overhead."""
    shares = [np.max(math_s[row == d] / seconds[row == d], initial=0.0) or 1.0 for d in range(num)]
    shares.append(float(np.max(memory_s / seconds)) or 1.0)
    overhead_s = np.clip(float(np.quantile(seconds, 0.1)), _LEAST_OVERHEAD_S, _MOST_OVERHEAD_S)
    return np.append(np.clip(np.log(shares), _LOW, _HIGH), np.log(overhead_s))


def _pattern_search(loss: Callable[[Floats], float], start: Floats) -> Floats:
    """A pattern search: one parameter at a time, up or down."""
    low = np.append(np.full(len(start) - 1, _LOW), np.log(_LEAST_OVERHEAD_S))
    high = np.append(np.full(len(start) - 1, _HIGH), np.log(_MOST_OVERHEAD_S))
    best, least, step = start, loss(start), _FIRST_STEP
    for _ in range(_MOST_SWEEPS):
        if step < _LAST_STEP:
            break
        before = least
        for at in range(len(start)):
            for way in (step, -step):
                tried = best.copy()
                tried[at] = np.clip(tried[at] + way, low[at], high[at])
                found = loss(tried)
                if found < least:
                    best, least = tried, found
        if least == before:
            step /= 2
    return best

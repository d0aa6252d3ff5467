"""Fit of a link: seconds = latency + bytes / rate, through measured transfers of many sizes.

The sum of squared *relative* errors is least, so that a kilobyte counts as much as 256 megabytes; the latency
is never negative. Weights that shrink with the error keep a few disturbed transfers from pulling the line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.errors import ClusterError

MOST_BYTES_PER_S = 1e15
_ROUNDS = 20
_NOISE = 0.02  # errors below this count alike


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link as it was measured."""

    latency_s: float
    bytes_per_s: float
    rel_error: float  # mean over the sizes
    worst_error: float
    small_s: float  # what the smallest transfer took, measured, not fitted

    def seconds(self, num_bytes: float) -> float:
        """What a transfer takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """The line through at least two sizes."""
    sizes, times = np.asarray(num_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if len(sizes) != len(times) or len(np.unique(sizes)) < 2:
        raise ClusterError(f"{len(sizes)} sizes and {len(times)} times fit no link; give two sizes or more")
    if not (np.isfinite(times).all() and (times > 0).all() and (sizes >= 0).all()):
        raise ClusterError("a transfer time is zero or infinite; measure it again")
    weight = np.ones(len(sizes))
    for _ in range(_ROUNDS):
        latency_s, per_byte_s = _fit_line(sizes, times, weight)
        error = np.abs((latency_s + per_byte_s * sizes) / times - 1)
        weight = 1 / np.maximum(error, _NOISE)
    return LinkFit(
        latency_s=latency_s,
        bytes_per_s=min(MOST_BYTES_PER_S, 1 / per_byte_s if per_byte_s > 0 else MOST_BYTES_PER_S),
        rel_error=float(error.mean()),
        worst_error=float(error.max()),
        small_s=float(np.median(times[sizes == sizes.min()])),
    )


def _fit_line(sizes: Floats, times: Floats, weight: Floats) -> tuple[float, float]:
    """Least squares of (latency + per_byte x size) / time - 1, neither of the two negative."""
    u, v = 1 / times, sizes / times
    uu, uv, vv = (float((weight * a * b).sum()) for a, b in ((u, u), (u, v), (v, v)))
    bu, bv = float((weight * u).sum()), float((weight * v).sum())
    determinant = uu * vv - uv * uv
    if determinant > 0:
        latency, per_byte = (bu * vv - bv * uv) / determinant, (bv * uu - bu * uv) / determinant
        if latency >= 0 and per_byte >= 0:
            return latency, per_byte
        if latency >= 0:
            return bu / uu, 0.0
    return 0.0, bv / vv

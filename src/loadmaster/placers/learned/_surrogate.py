"""Gradient steps on a surrogate of the expected advantage of samples, compiled. O(steps U B D)."""

from typing import Any

import numpy as np

from loadmaster.simulator.jit import kernel

_MOST_LOG_RATIO = 20.0


@kernel
def climb_surrogate(
    probability: Any,
    rows: Any,
    advantage: Any,
    steps: int,
    rate: float,
    joint: bool,
    clipped: bool,
    clip: float,
    beta: float,
) -> Any:
    """[U, D] the table after some steps; what has no probability keeps none.

    Ratios are of whole rows (`joint`) or of each group; they are clipped, or else the divergence from the
    first table is charged with `beta`.
    """
    count, (num, devices) = len(rows), probability.shape
    logits, now = np.empty((num, devices)), probability.copy()
    log_now, slope = np.empty((num, devices)), np.empty((num, devices))
    for u in range(num):
        for d in range(devices):
            logits[u, d] = np.log(max(probability[u, d], 1e-300)) if probability[u, d] > 0.0 else -np.inf
    first = logits.copy()
    for _ in range(steps):
        for u in range(num):
            for d in range(devices):
                log_now[u, d] = np.log(max(now[u, d], 1e-300))
                slope[u, d] = 0.0
        for b in range(count):
            whole = 0.0
            if joint:
                for u in range(num):
                    whole += log_now[u, rows[b, u]] - first[u, rows[b, u]]
            for u in range(num):
                change = whole if joint else log_now[u, rows[b, u]] - first[u, rows[b, u]]
                if u == 0 or not joint:
                    ratio = np.exp(min(max(change, -_MOST_LOG_RATIO), _MOST_LOG_RATIO))
                    push = ratio * advantage[b] / count
                    if clipped and (
                        (advantage[b] > 0.0 and ratio > 1.0 + clip)
                        or (advantage[b] < 0.0 and ratio < 1.0 - clip)
                    ):
                        push = 0.0
                if push != 0.0:
                    for d in range(devices):
                        slope[u, d] -= push * now[u, d]
                    slope[u, rows[b, u]] += push
        for u in range(num):
            most = -np.inf
            for d in range(devices):
                if not clipped:
                    slope[u, d] += beta * (probability[u, d] - now[u, d])
                logits[u, d] += rate * slope[u, d]
                most = max(most, logits[u, d])
            total = 0.0
            for d in range(devices):
                now[u, d] = np.exp(logits[u, d] - most)
                total += now[u, d]
            for d in range(devices):
                now[u, d] /= total
    return now

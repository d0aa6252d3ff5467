"""The physical limits of a step: compute, bus, host memory, optimizer. No step beats the slowest.

T_step >= max( compute, up / B_up, down / B_down, host / D, host-stepped parameters / U )
"""

import math
from dataclasses import dataclass

from loadmaster.shards.plan.rates import Rates

_SHARPNESS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step moves and computes."""

    flops: float
    up_bytes: float
    down_bytes: float
    host_stepped: float  # parameters stepped on the host
    host_bytes: float  # all traffic of host memory


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time of a step and what binds it."""

    seconds: float
    bound_by: str
    terms: dict[str, float]

    @property
    def predicted_s(self) -> float:
        """What a step is expected to take: resources nearly as busy as the binding one get in its way.

        The exponent is fitted to one measured step (1.64 B parameters, a cap of 6.5 GiB, one H200).
        """
        if self.seconds <= 0:
            return 0.0
        ratios = [term / self.seconds for term in self.terms.values()]
        return self.seconds * math.fsum(ratio**_SHARPNESS for ratio in ratios) ** (1 / _SHARPNESS)


def find_step_limit(work: Work, rates: Rates) -> Limit:
    """The least time a step can take at these rates."""
    terms = {
        "compute": work.flops / rates.flops_per_s if rates.compute_s is None else rates.compute_s,
        "bus up": work.up_bytes / rates.up_bytes_per_s,
        "bus down": work.down_bytes / rates.down_bytes_per_s,
        "host memory": work.host_bytes / rates.host_bytes_per_s,
        "optimizer": work.host_stepped / rates.most_params_per_s,
    }
    bound_by = max(terms, key=lambda name: terms[name])
    return Limit(terms[bound_by], bound_by, terms)

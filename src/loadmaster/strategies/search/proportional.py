"""Every device, rows in proportion to its speed, gradients summed."""

from dataclasses import dataclass

from loadmaster.strategies.scoring.shares import PROPORTIONAL
from loadmaster.strategies.search.data_parallel import DataParallel


@dataclass(frozen=True, slots=True)
class Proportional(DataParallel):
    """Data parallelism whose rows follow the speed of the devices."""

    shares: str = PROPORTIONAL


SEARCH = Proportional

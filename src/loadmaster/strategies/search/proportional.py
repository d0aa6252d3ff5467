"""Every device, rows in proportion to its speed, gradients summed."""

from dataclasses import dataclass

from loadmaster.strategies.search.data_parallel import DataParallel
from loadmaster.strategies.shares import PROPORTIONAL


@dataclass(frozen=True, slots=True)
class Proportional(DataParallel):
    """Data parallelism whose rows follow the speed of the devices."""

    shares: str = PROPORTIONAL


SEARCH = Proportional

"""Stage numbers of a chain from the devices of its classes."""

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Floats, Ints


def device_ranks(source: Ints, target: Ints, device: NDArray[np.int64]) -> Floats:
    """[D] the longest way to each device in the graph of devices; a circle is gone round D times at most."""
    count = int(device.max()) + 1
    pair = np.unique(device[source] * count + device[target])
    one, other = pair // count, pair % count
    apart = one != other
    one, other = one[apart], other[apart]
    rank = np.zeros(count)
    for _ in range(count):
        before = rank.copy()
        np.maximum.at(rank, other, rank[one] + 1.0)
        if (rank == before).all():
            break
    return np.asarray(np.minimum(rank, count))

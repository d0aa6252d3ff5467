"""Copies: what it takes to send a tensor from one part of a CPU to another.

Parts of one CPU share their memory, so that no wire lies between them; but a placed model makes a copy of
its own for each part, with new memory and a few calls of Python. A copy of three sizes is timed once a
machine (`gaps`). What lies between two sizes is on the line between them, and what is larger takes as long
per byte as the largest.
"""

from collections.abc import Mapping

import numpy as np

from loadmaster.core.arrays import Floats, Longs
from loadmaster.core.cluster import Cluster
from loadmaster.cost.database import CostRow
from loadmaster.cost.keys import COPIES


def copy_seconds(num_bytes: Longs, known: Mapping[str, CostRow]) -> Floats | None:
    """[T] seconds of tensors of so many bytes; None where copies were not measured."""
    rows = [known.get(key) for key in COPIES]
    seconds = [row.seconds for row in rows if row is not None and row.seconds is not None]
    if len(seconds) < len(COPIES):
        return None
    sizes, largest = list(COPIES.values()), max(COPIES.values())
    found: Floats = np.interp(num_bytes, sizes, np.maximum.accumulate(seconds))
    return found * np.maximum(1.0, num_bytes / largest)


def is_one_cpu(cluster: Cluster) -> bool:
    """Whether all devices are parts of one host's CPU."""
    return bool(cluster.on_host.all()) and len(set(cluster.host)) == 1 and len(cluster.kind_name) == 1

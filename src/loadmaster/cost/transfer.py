"""Transfer: how long a tensor is under way between two devices when nothing else is.

A transfer holds every link of its route for the sum of their latencies plus bytes / slowest link.
"""

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.cluster import Cluster


def route_latency_s(cluster: Cluster) -> Floats:
    """[D, D] sum of the latencies of each route, 0 on the diagonal."""
    latency_s = np.append(cluster.link_latency_s, 0.0)  # NO_LINK reads the last entry
    total: Floats = latency_s[cluster.route].sum(axis=2)
    return total


def route_bytes_per_s(cluster: Cluster) -> Floats:
    """[D, D] the slowest link of each route, infinite on the diagonal."""
    bytes_per_s = np.append(cluster.link_bytes_per_s, np.inf)  # NO_LINK reads the last entry
    slowest: Floats = bytes_per_s[cluster.route].min(axis=2, initial=np.inf)
    return slowest

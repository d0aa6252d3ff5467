"""Transfer: how long a tensor is under way between two devices when nothing else is.

A transfer holds every link of its route for the sum of their latencies plus bytes / slowest link.
"""

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import CostError


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


def transfer_s(cluster: Cluster, num_bytes: int, source: int, target: int) -> float:
    """Seconds to send that many bytes from one device to another, 0 to itself."""
    for device in (source, target):
        if not 0 <= device < cluster.num_devices:
            raise CostError(f"no device {device}; the cluster has 0 to {cluster.num_devices - 1}")
    if num_bytes < 0:
        raise CostError(f"{num_bytes} bytes cannot be sent; a size is 0 or more")
    links = cluster.route[source, target]
    links = links[links >= 0]
    if len(links) == 0:
        return 0.0
    return float(cluster.link_latency_s[links].sum() + num_bytes / cluster.link_bytes_per_s[links].min())

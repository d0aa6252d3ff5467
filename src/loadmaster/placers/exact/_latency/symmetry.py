"""Devices that may change places: relabelling them turns plans into plans of the same time."""

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.cluster import NO_LINK, Cluster
from loadmaster.core.problem import FREE, Links, Problem
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s


def find_alike_devices(problem: Problem) -> list[list[int]]:
    """Sets of two or more devices of which any two may change places; none if an op is pinned."""
    cluster = problem.cluster
    alone = len(np.unique(cluster.engine)) == cluster.num_devices
    if (problem.pinned != FREE).any() or not alone:
        return []
    tables = np.stack([route_latency_s(cluster), route_bytes_per_s(cluster)])
    sets: list[list[int]] = []
    for d in range(cluster.num_devices):
        home = next((known for known in sets if all(_can_swap(problem, tables, k, d) for k in known)), None)
        if home is None:
            sets.append([d])
        else:
            home.append(d)
    return [known for known in sets if len(known) > 1]


def _can_swap(problem: Problem, tables: Floats, a: int, b: int) -> bool:
    """Whether exchanging two devices changes nothing but names."""
    cluster = problem.cluster
    if cluster.kind[a] != cluster.kind[b] or cluster.usable_bytes[a] != cluster.usable_bytes[b]:
        return False
    if problem.links == Links.HOST and cluster.on_host[cluster.kind[a]]:
        return False  # the first of the host-side devices is where host memory hangs
    swapped = np.arange(cluster.num_devices)
    swapped[[a, b]] = b, a
    if not (tables == tables[:, swapped][:, :, swapped]).all():
        return False
    return problem.links != Links.SHARED or _links_follow(cluster, swapped.tolist())


def _links_follow(cluster: Cluster, swapped: list[int]) -> bool:
    """Whether routes go over the same links when every link gets one other name."""
    name: dict[int, int] = {}
    for i in range(cluster.num_devices):
        for j in range(cluster.num_devices):
            for one, two in zip(cluster.route[i, j], cluster.route[swapped[i], swapped[j]], strict=True):
                if (one == NO_LINK) != (two == NO_LINK) or name.setdefault(int(one), int(two)) != two:
                    return False
    return len(set(name.values())) == len(name)

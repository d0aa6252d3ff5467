"""Ray: the state of a running cluster, and the placement group it would advise. Needs the extra `ray`."""

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadmaster.advisor.adapters.log import AdviceEntry, append_entry
from loadmaster.advisor.adapters.requests import Pending, advise_pending
from loadmaster.advisor.jobs.curve import ScalingCurve
from loadmaster.advisor.jobs.state import ClusterState, host_layout
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Bundles:
    """Arguments of `ray.util.placement_group`."""

    bundles: tuple[dict[str, float], ...]
    strategy: str

    def create(self) -> Any:
        """Reserve it; only where a user asks for it."""
        from ray.util import placement_group

        return placement_group([dict(b) for b in self.bundles], strategy=self.strategy)


def ray_state(resource: str = "GPU") -> ClusterState:
    """Units of a resource on the nodes of the connected cluster; what is taken comes free at an unknown
    time."""
    import ray

    if not ray.is_initialized():
        raise InputError("not connected to a Ray cluster; call ray.init() first")
    nodes = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(resource, 0) >= 1]
    if not nodes:
        raise InputError(f"no node of the Ray cluster has {resource}")
    available = _available()
    layout = host_layout([int(n["Resources"][resource]) for n in nodes], [resource] * len(nodes))
    free_at = np.zeros(layout.num_devices)
    for h, node in enumerate(nodes):
        members = np.flatnonzero(layout.host == h)
        free = int(available.get(node["NodeID"], node["Resources"]).get(resource, 0))
        free_at[members[free:]] = np.inf
    names = tuple(f"{nodes[int(h)]['NodeManagerHostname']}/{i}" for i, h in enumerate(layout.host))
    return ClusterState(replace(layout, name=names), free_at)


def _available() -> dict[str, dict[str, float]]:
    """Resources that are free by node, where this version of Ray tells them."""
    try:
        from ray._private.state import available_resources_per_node

        found: dict[str, dict[str, float]] = available_resources_per_node()
    except ImportError:
        return {}
    return found


def advise_ray(
    name: str,
    curve: ScalingCurve,
    *,
    requested: int = 1,
    deadline_s: float | None = None,
    resource: str = "GPU",
    log: str | os.PathLike[str] | None = None,
) -> tuple[AdviceEntry, Bundles | None]:
    """Advice on one job of the connected cluster, and the placement group for it; appended to `log`."""
    entry, bundles = _advise_ray(name, curve, requested, deadline_s, resource)
    if log is not None:
        append_entry(os.fspath(log), entry)
    return entry, bundles


def _advise_ray(
    name: str, curve: ScalingCurve, requested: int, deadline_s: float | None, resource: str
) -> tuple[AdviceEntry, Bundles | None]:
    state = ray_state(resource)
    pending = Pending(name, name, requested, deadline_s, {})
    answer, entry = advise_pending(pending, state, curve, "ray")
    if answer is None or not answer.admit:
        return entry, None
    one_host = len({int(state.layout.host[d]) for d in answer.devices}) == 1
    bundles = Bundles(tuple({resource: 1.0} for _ in answer.devices), "STRICT_PACK" if one_host else "PACK")
    shown = f"placement_group({[dict(b) for b in bundles.bundles]}, strategy={bundles.strategy!r})"
    return replace(entry, action=shown), bundles

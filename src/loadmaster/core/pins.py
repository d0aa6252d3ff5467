"""Pins: ops or whole modules that a user wants on a device, by name."""

from collections.abc import Mapping

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError, ProblemError, UnknownNameError
from loadmaster.core.graph import Graph, units
from loadmaster.core.problem import FREE


def resolve_pins(graph: Graph, cluster: Cluster, pin: Mapping[str, str], already: Ints | None) -> Ints:
    """[N] device of every pinned op; what belongs together is pinned together."""
    pinned = np.full(graph.num_ops, FREE, dtype=np.int32) if already is None else already.copy()
    if not isinstance(pin, Mapping):
        raise InputError(f"pin is {pin!r}; give op or module and device, e.g. {{'lm_head': 'gpu0'}}")
    unit, _ = units(graph)
    for name, device in pin.items():
        if device not in cluster.device_name:
            raise UnknownNameError("device", device, cluster.device_name)
        hit = np.array([op == name for op in graph.op_name], dtype=np.bool_)
        if not hit.any():
            hit = np.array([m == name or m.startswith(f"{name}.") for m in graph.module], dtype=np.bool_)
        if not hit.any():
            known = (*set(graph.module), *graph.op_name)
            see = "loadmaster show SOURCE --ops 100 lists some"
            raise UnknownNameError("op or module to pin", name, known[:20000], see=see)
        where = cluster.device_name.index(device)
        chosen = np.isin(unit, unit[hit])
        clash = chosen & (pinned != FREE) & (pinned != where)
        if clash.any():
            op, other = graph.op_name[int(np.flatnonzero(clash)[0])], cluster.device_name[pinned[clash][0]]
            raise ProblemError(f"op {op!r} is pinned to {other} and to {device}; pin it once")
        pinned[chosen] = where
    return pinned

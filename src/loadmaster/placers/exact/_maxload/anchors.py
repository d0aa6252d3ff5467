"""Least loads of devices by what they hold, for all classes and types at once (see `cuts.py`)."""

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Floats, Longs
from loadmaster.core.problem import Load
from loadmaster.placers.exact._maxload.cuts import ENDLESS, least_loads
from loadmaster.placers.exact._maxload.model import MaxLoad, allowed_types

_UNITS = 2.0**44  # of the limit
_SHARE = {Load.SUM: 1.0, Load.MAX2: 0.5, Load.MAX3: 1 / 3}  # the largest of n parts is their mean at least
MOST_WORK = 30_000_000  # cuts times network: beyond, cuts are not looked at


def held_loads(model: MaxLoad, limit_s: float) -> Floats:
    """[C, T] the least load of a device of a type that holds a class; above the limit it may be less."""
    if class_work(model) > MOST_WORK:
        return np.where(allowed_types(model), model.seconds * _SHARE[model.load], np.inf)
    every = np.arange(model.num_classes, dtype=np.int64)
    return least_parted_loads(model, every, np.full(model.num_classes, -1, dtype=np.int64), limit_s)


def least_parted_loads(model: MaxLoad, inside: Longs, outside: Longs, limit_s: float) -> Floats:
    """[P, T] the least load of a device that holds one class and not another (-1: whatever else)."""
    found = np.full((len(inside), model.num_types), np.inf)
    known: dict[bytes, int] = {}
    allowed = allowed_types(model)
    for t in range(model.num_types):
        costs = (model.nets.read_s[t], model.nets.write_s[t])
        key = b"".join(column.tobytes() for column in (*costs, model.seconds[:, t]))
        if key in known:
            found[:, t] = found[:, known[key]]
        elif not any(column.any() for column in costs):
            found[:, t] = model.seconds[inside, t]
        else:
            found[:, t] = _compute_loads(model, t, inside, outside, limit_s)
        known[key] = t
    return np.where(allowed[inside], found, np.inf)


def class_work(model: MaxLoad) -> int:
    """Classes times the size of the network."""
    return model.num_classes * _network_size(model)


def pair_work(model: MaxLoad) -> int:
    """Pairs of a net's home and user, both ways, times the size of the network."""
    return 2 * len(model.nets.user) * _network_size(model)


def _network_size(model: MaxLoad) -> int:
    return model.num_classes + model.nets.num + len(model.nets.user)


def _compute_loads(model: MaxLoad, kind: int, inside: Longs, outside: Longs, limit_s: float) -> Floats:
    scale = _UNITS / max(limit_s, 1e-200)  # a limit of nothing still has finite units
    ptr, arc, head, capacity, sink = _build_network(model, kind, scale * _SHARE[model.load])
    units = least_loads(ptr, arc, head, capacity, inside, outside, sink, int(limit_s * scale))
    loads: Floats = units / scale
    return loads


def _build_network(
    model: MaxLoad, kind: int, scale: float
) -> tuple[Longs, Longs, Longs, NDArray[np.int64], int]:
    """Arcs out of each node, and head and capacity of each arc; arc 2v leads from class v to the sink."""
    nets, num = model.nets, model.num_classes
    count = nets.num
    of_use = np.repeat(np.arange(count), np.diff(nets.ptr))
    every, sink = np.arange(count), num + 2 * count
    tail = np.concatenate([np.arange(num), nets.home, num + of_use, nets.user, num + count + every])
    head = np.concatenate([np.full(num, sink), num + every, nets.user, num + count + of_use, nets.home])
    endless = np.full(len(of_use), ENDLESS)
    parts = (
        _to_whole_units(model.seconds[:, kind], scale),
        _to_whole_units(nets.write_s[kind], scale),
        endless,
        endless,
        _to_whole_units(nets.read_s[kind], scale),
    )
    both = np.stack([tail, head], axis=1).reshape(-1)
    ends = np.stack([head, tail], axis=1).reshape(-1)
    capacity = np.zeros(len(both), dtype=np.int64)
    capacity[0::2] = np.concatenate(parts)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(both, minlength=sink + 1))])
    return ptr.astype(np.int64), np.argsort(both, kind="stable"), ends.astype(np.int64), capacity, sink


def _to_whole_units(seconds: Floats, scale: float) -> Longs:
    """Seconds in units, rounded down so that a cut is never above the truth."""
    finite = np.isfinite(seconds) & (seconds * scale < float(ENDLESS))
    whole: Longs = np.where(finite, np.floor(np.where(finite, seconds, 0.0) * scale), float(ENDLESS)).astype(
        np.int64
    )
    return whole

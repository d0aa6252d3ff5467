"""What every split with all loads within a limit must do: classes that stay together, types they avoid.

With prices (see `prices.py`) all devices carry so much worth within the limit, and all classes are worth so
much; what is left over is slack. A class on a type that is not its cheapest wastes the difference; a net
that is cut costs its home a write and its user a read, at the price of their types. What wastes more than
the slack no split within the limit does. Nor does a device hold a class, or one class without another, if
every set that does is too much for it, which minimum cuts tell (`cuts.py`). So types are barred, classes
fused, and fused classes are larger, so that more follows. If nothing is left for a class, there is no such
split at all, and the limit is a lower bound.
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, offsets, sorted_unique
from loadmaster.core.problem import Load
from loadmaster.placers.exact._maxload.anchors import MOST_WORK, held_loads, least_parted_loads, pair_work
from loadmaster.placers.exact._maxload.model import MaxLoad, allowed_types
from loadmaster.placers.exact._maxload.prices import Prices, find_prices

_MARGIN = 1e-12  # of a limit, for rounding
_SLACK = 1e-10  # of all that devices carry: sums of many prices
_ROUNDS = 50


@dataclass(frozen=True, slots=True, eq=False)
class ReducedModel:
    """A model with fewer classes that has every split within the limit, and the new class of each."""

    model: MaxLoad
    of_class: Ints  # [C]


def reduce_model(model: MaxLoad, limit_s: float) -> ReducedModel | None:
    """The model for splits with all loads within a limit; None where there is none."""
    label = np.arange(model.num_classes, dtype=np.int32)
    for _ in range(_ROUNDS):
        price = find_prices(model)
        if price.bound_s > limit_s * (1 + _MARGIN):
            return None
        waste, slack = _compute_waste(model, price, limit_s)
        load_s = held_loads(model, limit_s * (1 + _MARGIN))
        barred = ((waste > slack) | (load_s > limit_s * (1 + _MARGIN))) & np.isfinite(model.seconds)
        if barred.any():
            model = replace(model, seconds=np.where(barred, np.inf, model.seconds))
            waste = np.where(barred, np.inf, waste)
        if not allowed_types(model).any(axis=1).all():
            return None
        together = _find_unparted(model, price, waste, slack, limit_s)
        if not together.any() and not barred.any():
            together = _find_uncut(model, limit_s * (1 + _MARGIN)) | _find_too_costly(
                model, price, waste, slack
            )
        if together.any():
            joined = _join_classes(model, together)
            model = contract_classes(model, joined, int(joined.max()) + 1)
            label = joined[label]
        elif not barred.any():
            break
    return ReducedModel(model, label)


def least_busiest_s(model: MaxLoad) -> float:
    """What the device that holds some class does at least, whatever else it holds: a bound of all splits."""
    most_s = float(np.where(np.isfinite(model.seconds), model.seconds, 0.0).max(axis=1).sum())
    return float(held_loads(model, most_s).min(axis=1).max(initial=0.0)) * (1 - 1e-12)


def _compute_waste(model: MaxLoad, price: Prices, limit_s: float) -> tuple[Floats, float]:
    """[C, T] worth lost when a class is on a type, inf where it cannot be; and how much may be lost."""
    carries = float(price.carries(model, limit_s) @ model.count)
    total = float(price.worth.sum())
    allowed = allowed_types(model) & (model.seconds <= limit_s * (1 + _MARGIN))
    cost = np.where(allowed, price.second * np.where(allowed, model.seconds, 0.0), np.inf)
    cost = cost + price.byte * model.num_bytes[:, None]
    return cost - price.worth[:, None], carries - total + _SLACK * max(carries, total)


def _find_unparted(model: MaxLoad, price: Prices, waste: Floats, slack: float, limit_s: float) -> Bools:
    """[uses] whether a net's home and user are together because cutting the net wastes too much."""
    nets, types = model.nets, model.num_types
    home = np.repeat(nets.home, np.diff(nets.ptr))
    net = np.repeat(np.arange(nets.num), np.diff(nets.ptr))
    least = np.full(len(home), np.inf)
    room = limit_s * (1 + _MARGIN)
    for a in range(types):
        write_s = nets.write_s[a, net]
        out = np.where(_least_load_alone(model, a, home, write_s) <= room, waste[home, a], np.inf)
        for b in range(types):
            if a == b and len(model.devices[a]) < 2:
                continue
            read_s = nets.read_s[b, net]
            into = np.where(
                _least_load_alone(model, b, nets.user, read_s) <= room, waste[nets.user, b], np.inf
            )
            paid = price.second[a] * write_s + price.second[b] * read_s if model.load == Load.SUM else 0.0
            least = np.minimum(least, out + into + paid)
    return least > slack


def _find_uncut(model: MaxLoad, limit_s: float) -> Bools:
    """[uses] whether they are together because a device with one and not the other does too much."""
    nets, types = model.nets, model.num_types
    home = np.repeat(nets.home, np.diff(nets.ptr)).astype(np.int64)
    user = nets.user.astype(np.int64)
    if pair_work(model) > MOST_WORK:
        return np.zeros(len(user), dtype=np.bool_)
    out = least_parted_loads(model, home, user, limit_s) <= limit_s
    into = least_parted_loads(model, user, home, limit_s) <= limit_s
    parted = np.zeros(len(user), dtype=np.bool_)
    for a in range(types):
        for b in range(types):
            if a != b or len(model.devices[a]) > 1:
                parted |= out[:, a] & into[:, b]
    return ~parted


def _find_too_costly(model: MaxLoad, price: Prices, waste: Floats, slack: float) -> Bools:
    """[uses] whether they are together because all that is cut between them wastes too much."""
    nets, types = model.nets, model.num_types
    home = np.repeat(nets.home, np.diff(nets.ptr)).astype(np.int64)
    user = nets.user.astype(np.int64)
    if pair_work(model) > MOST_WORK or model.load != Load.SUM or (price.second <= 0).any():
        return np.zeros(len(user), dtype=np.bool_)
    wasted = replace(model, seconds=np.maximum(waste, 0.0) / price.second)
    most = max(slack, 0.0) / float(price.second.min())
    out = price.second * least_parted_loads(wasted, home, user, most)
    into = price.second * least_parted_loads(wasted, user, home, most)
    least = np.full(len(user), np.inf)
    for a in range(types):
        for b in range(types):
            if a != b or len(model.devices[a]) > 1:
                least = np.minimum(least, out[:, a] + into[:, b])
    return least > slack


def _join_classes(model: MaxLoad, together: Bools) -> Ints:
    """[C] labels that are equal for classes joined by such uses."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    num = model.num_classes
    home = np.repeat(model.nets.home, np.diff(model.nets.ptr))
    ends = (home[together], model.nets.user[together])
    matrix = csr_array((np.ones(len(ends[0]), dtype=np.int8), ends), shape=(num, num))
    _, label = connected_components(matrix, directed=False)
    return np.asarray(label, dtype=np.int32)


def _least_load_alone(model: MaxLoad, kind: int, classes: Ints, transfer_s: Floats) -> Floats:
    """What a class and one transfer load a device with at least."""
    seconds: Floats = model.seconds[classes, kind]
    return seconds + transfer_s if model.load == Load.SUM else np.maximum(seconds, transfer_s)


def contract_classes(model: MaxLoad, label: Ints, num: int) -> MaxLoad:
    """The model with classes of one label as one; nets with the same ends are one, order is kept."""
    seconds = np.zeros((num, model.num_types))
    np.add.at(seconds, label, model.seconds)
    num_bytes = np.zeros(num, dtype=np.int64)
    np.add.at(num_bytes, label, model.num_bytes)
    nets = model.nets
    of_use = np.repeat(np.arange(nets.num, dtype=np.int64), np.diff(nets.ptr))
    away: Bools = label[nets.user] != label[nets.home[of_use]]
    pair = sorted_unique(of_use[away] * num + label[nets.user[away]])
    kept = sorted_unique(pair // num)
    user, ptr = pair % num, offsets(np.searchsorted(kept, pair // num).astype(np.int32), len(kept))
    same: dict[tuple[int, bytes], int] = {}
    home = label[nets.home[kept]]
    of_net = np.array(
        [
            same.setdefault((int(home[e]), user[ptr[e] : ptr[e + 1]].tobytes()), len(same))
            for e in range(len(kept))
        ],
        dtype=np.int64,
    )
    _, first = np.unique(of_net, return_index=True)
    costs = []
    for table in (nets.read_s, nets.write_s):
        total = np.zeros((model.num_types, len(same)))
        for t in range(model.num_types):
            np.add.at(total[t], of_net, table[t, kept])
        costs.append(total)
    users = [user[ptr[e] : ptr[e + 1]] for e in first]
    ends = sorted_unique(label[model.source].astype(np.int64) * num + label[model.target])
    ends = ends[ends // num != ends % num]
    return replace(
        model,
        of_op=label[model.of_op],
        seconds=seconds,
        num_bytes=num_bytes,
        nets=replace(
            nets,
            home=home[first].astype(np.int32),
            ptr=np.concatenate([[0], np.cumsum([len(part) for part in users])]).astype(np.int32),
            user=np.concatenate(users).astype(np.int32) if users else np.zeros(0, dtype=np.int32),
            read_s=costs[0],
            write_s=costs[1],
        ),
        source=(ends // num).astype(np.int32),
        target=(ends % num).astype(np.int32),
    )

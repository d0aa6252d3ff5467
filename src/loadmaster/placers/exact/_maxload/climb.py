"""Local search for a split of any shape: annealing runs from a start and from the best, at several heats.

Starts from the best cut of an order, not at random: on operator graphs runs from random starts end up to 71 %
above the best known. Heats are shares of the mean load, hot and mild runs in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.problem import Problem
from loadmaster.placers.exact._maxload.contract import chain_model
from loadmaster.placers.exact._maxload.lines import best_line
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.exact._maxload.moves import anneal
from loadmaster.placers.exact._maxload.packed import LOAD_CODE, loads_s, pack_model

_HEATS = (0.01, 0.05, 0.003, 0.03, 0.001, 0.1)  # of the mean load; every other run starts from the best
_COLDEST = 1e-3  # of the heat it began with
_LOSS = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A device for every class and the busiest load."""

    device: Ints  # [C]
    value_s: float


def make_assignment(model: MaxLoad, device: Ints) -> Assignment:
    """An assignment with the value that its loads have."""
    return Assignment(device, float(loads_s(model, device).max()))


def kind_of_device(model: MaxLoad) -> Ints:
    """[D] type of each device."""
    kind = np.zeros(sum(len(alike) for alike in model.devices), dtype=np.int32)
    for t, alike in enumerate(model.devices):
        kind[list(alike)] = t
    return kind


def fits(model: MaxLoad, device: Ints) -> bool:
    """Whether every class may be where it is and every device has room."""
    kind = kind_of_device(model)
    held = np.zeros(len(kind), dtype=np.int64)
    np.add.at(held, device, model.num_bytes)
    runs = np.isfinite(model.seconds[np.arange(len(device)), kind[device]]).all()
    return bool(runs and (held <= model.room[kind]).all())


def first_split(
    problem: Problem, model: MaxLoad, rng: np.random.Generator, *, bound_s: float
) -> Assignment | None:
    """The best cut of an order as an assignment of the model's classes, else a packing that fits."""
    chain = chain_model(problem)
    stages = best_line(chain.model, rng, rounds=0, bound_s=bound_s)
    if stages is not None:
        device = np.zeros(model.num_classes, dtype=np.int32)
        device[model.of_op] = stages.device(chain.model)[chain.model.of_op]
        if fits(model, device):
            return make_assignment(model, device)
    packing = _pack_largest_first(model)
    return None if packing is None else make_assignment(model, packing)


def _pack_largest_first(model: MaxLoad) -> Ints | None:
    """The largest class first, each where most room is left; None where one has no room."""
    kind = kind_of_device(model)
    left = model.room[kind].astype(np.float64)
    device = np.zeros(model.num_classes, dtype=np.int32)
    for v in np.argsort(-model.num_bytes, kind="stable").tolist():
        free = np.where(np.isfinite(model.seconds[v, kind]), left, -1.0)
        d = int(free.argmax())
        if free[d] < model.num_bytes[v]:
            return None
        device[v] = d
        left[d] -= model.num_bytes[v]
    return device


def anneal_repeatedly(
    model: MaxLoad,
    start: Assignment,
    rng: np.random.Generator,
    *,
    runs: int,
    tries: int,
    bound_s: float,
    spent: Callable[[int], bool] = lambda _tries: False,
) -> Assignment:
    """The best of several annealing runs, never worse than the start."""
    arrays, kind, best = pack_model(model), kind_of_device(model), start
    code, good_s = LOAD_CODE[model.load], bound_s * (1 + _LOSS)
    for run in range(runs):
        if best.value_s <= good_s or spent(run * tries):
            break
        begin = start if run % 2 == 0 else best
        hot = _HEATS[run % len(_HEATS)] * max(float(loads_s(model, begin.device).mean()), 1e-300)
        device, value = anneal(
            begin.device,
            kind,
            model.seconds,
            model.num_bytes,
            model.room[kind],
            code,
            arrays.home_ptr,
            arrays.home_net,
            arrays.user_ptr,
            arrays.user_net,
            model.nets.home,
            model.nets.ptr,
            model.nets.user,
            model.nets.read_s,
            model.nets.write_s,
            hot,
            hot * _COLDEST,
            tries,
            int(rng.integers(2**62)),
            good_s,
        )
        if value < best.value_s * (1 - _LOSS):
            best = make_assignment(model, device)
    return best

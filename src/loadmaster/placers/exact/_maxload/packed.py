"""A max-load model as arrays for compiled loops, and the states that count the devices used.

A state is a count of every type (`states_by_count`): prod(n_t + 1) of them, exact. Where that is too many,
devices are taken in one fixed sequence and a state is how many were taken (`states_in_sequence`): a
stated heuristic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs, offsets
from loadmaster.core.problem import Load
from loadmaster.placers.exact._maxload.model import MaxLoad, Nets

LOAD_CODE = {Load.SUM: 0, Load.MAX2: 1, Load.MAX3: 2}


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """Nets by class, and what they cost each of Q different ports."""

    home_ptr: Ints  # [C + 1] into home_net
    home_net: Ints
    user_ptr: Ints  # [C + 1] into user_net
    user_net: Ints
    column: Ints  # [T] row of read_s and write_s
    read_s: Floats  # [Q, E]
    write_s: Floats  # [Q, E]


def pack_model(model: MaxLoad) -> PackedModel:
    """The arrays of a model."""
    nets, num = model.nets, model.num_classes
    of_use = np.repeat(np.arange(nets.num, dtype=np.int32), np.diff(nets.ptr))
    by_user = np.argsort(nets.user, kind="stable")
    both = np.concatenate([nets.read_s, nets.write_s], axis=1)
    _, first, column = np.unique(both, axis=0, return_index=True, return_inverse=True)
    return PackedModel(
        home_ptr=offsets(nets.home, num),
        home_net=np.argsort(nets.home, kind="stable").astype(np.int32),
        user_ptr=offsets(nets.user, num),
        user_net=of_use[by_user],
        column=column.reshape(-1).astype(np.int32),
        read_s=np.ascontiguousarray(nets.read_s[first]),
        write_s=np.ascontiguousarray(nets.write_s[first]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """S states of T types."""

    used: Longs  # [T, S] devices of each type that a state has used
    stride: Longs  # [T] from a state to the one with a device more of that type
    step_ptr: Longs  # [T + 1] into step
    step: Longs  # states that may take a device of a type, in order
    exact: bool  # any order of types is among them

    @property
    def num(self) -> int:
        """S."""
        return int(self.used.shape[1])


def states_by_count(count: Sequence[int]) -> States:
    """One state for every count of every type."""
    types, stride, num = len(count), np.zeros(len(count), dtype=np.int64), 1
    for t in range(types):
        stride[t] = num
        num *= int(count[t]) + 1
    used = np.stack([np.arange(num) // stride[t] % (int(count[t]) + 1) for t in range(types)])
    return _with_steps(used, stride, [np.flatnonzero(used[t] < count[t]) for t in range(types)], exact=True)


def states_in_sequence(sequence: Sequence[int], num_types: int) -> States:
    """One state for every number of devices taken; `sequence` has the type of each."""
    taken = np.array(sequence, dtype=np.int64)
    used = np.stack([np.concatenate([[0], np.cumsum(taken == t)]) for t in range(num_types)])
    steps = [np.flatnonzero(taken == t) for t in range(num_types)]
    return _with_steps(used, np.ones(num_types, dtype=np.int64), steps, exact=len(set(sequence)) <= 1)


def _with_steps(used: Longs, stride: Longs, steps: list[Longs], *, exact: bool) -> States:
    ptr = np.concatenate([[0], np.cumsum([len(part) for part in steps])]).astype(np.int64)
    step = np.concatenate(steps).astype(np.int64)
    return States(used.astype(np.int64), stride, ptr, step, exact)


def num_states(count: Sequence[int]) -> int:
    """States that `states_by_count` would make."""
    total = 1
    for devices in count:
        total *= int(devices) + 1
    return total


def user_words(nets: Nets) -> tuple[Ints, Ints, "np.typing.NDArray[np.uint64]"]:
    """The users of each net as (word, mask) pairs: ptr [E + 1], word, mask."""
    of_use = np.repeat(np.arange(nets.num, dtype=np.int64), np.diff(nets.ptr))
    words = int(nets.user.max(initial=0)) // 64 + 1
    key = of_use * words + nets.user // 64
    bit = np.left_shift(np.uint64(1), (nets.user % 64).astype(np.uint64))
    first = (
        np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, np.int64)
    )
    mask = np.bitwise_or.reduceat(bit, first) if len(key) else np.zeros(0, np.uint64)  # users are sorted
    ptr = offsets((key[first] // words).astype(np.int32), nets.num)
    return ptr, (key[first] % words).astype(np.int32), mask


def loads_s(model: MaxLoad, device: Ints) -> Floats:
    """[D] load of every device under an assignment of classes [C] to devices."""
    num = sum(len(alike) for alike in model.devices)
    kind = np.zeros(num, dtype=np.int64)
    for t, alike in enumerate(model.devices):
        kind[list(alike)] = t
    compute, reads, writes = np.zeros(num), np.zeros(num), np.zeros(num)
    np.add.at(compute, device, model.seconds[np.arange(len(device)), kind[device]])
    nets = model.nets
    of_use = np.repeat(np.arange(nets.num, dtype=np.int64), np.diff(nets.ptr))
    away = device[nets.user] != device[nets.home[of_use]]
    pair = np.unique(of_use[away] * num + device[nets.user[away]])
    net, reader = pair // num, pair % num
    np.add.at(reads, reader, nets.read_s[kind[reader], net])
    sent = np.unique(net)
    np.add.at(writes, device[nets.home[sent]], nets.write_s[kind[device[nets.home[sent]]], sent])
    if model.load == Load.SUM:
        return compute + reads + writes
    if model.load == Load.MAX2:
        return np.maximum(compute, reads + writes)
    return np.maximum(compute, np.maximum(reads, writes))

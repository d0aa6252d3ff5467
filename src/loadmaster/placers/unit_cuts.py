"""Cuts: runs of units in some order, as blocks for devices, ended where little is copied."""

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.placers._partition import Standing
from loadmaster.placers.resident_memory import standing_bytes

_WIDEST = 0.1  # of a block: how far from its share a cut may be at most


def cut_into_blocks(
    standing: Standing, allowed: Bools, order: Longs, room_bytes: Longs, *, devices: Longs | None = None
) -> Ints:
    """[U] contiguous blocks of an order of units, as large as the rooms of `devices` (all, in their order).

    Each cut is the lightest near its share; where there is more memory than units need, near means further.
    """
    devices = np.arange(len(room_bytes)) if devices is None else devices
    taken = np.cumsum(standing.unit_bytes[order].astype(np.float64))
    room = np.maximum(room_bytes[devices].astype(np.float64), 1e-9)
    share = room / room.sum()
    slack = min(max(1.0 - taken[-1] / room.sum(), 0.0), _WIDEST)
    ends = _find_lightest_cuts(cut_bytes(standing, order), taken, share, slack)
    device = np.empty(len(order), dtype=np.int32)
    device[order] = devices[np.searchsorted(ends, np.arange(len(order)))]
    return _move_to_allowed(allowed, device, room_bytes)


def _find_lightest_cuts(cost: Longs, taken: Floats, share: Floats, slack: float) -> Longs:
    """Places after which to cut, in order."""
    ends = [-1]
    for aim, own in zip(np.cumsum(share)[:-1], share, strict=False):
        about = taken[-1] * (aim + np.array([-0.5, 0.5]) * slack * own)
        low, high = np.minimum(np.searchsorted(taken, about), len(cost) - 1)
        low, high = max(int(low), ends[-1]), max(int(high), ends[-1])
        ends.append(low + int(np.argmin(cost[low : high + 1])) if low >= 0 else low)
    return np.array(ends[1:], dtype=np.int64)


def cut_bytes(standing: Standing, order: Longs) -> Longs:
    """[U] bytes of the tensors that a cut after each place of an order of units would have copied."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    change = np.zeros(len(order) + 1, dtype=np.int64)
    if len(standing.net_bytes):
        begin, at = standing.pin_ptr[:-1], place[standing.pin]
        root = np.where(standing.net_root >= 0, place[standing.net_root], at[begin])
        np.add.at(change, np.minimum(np.minimum.reduceat(at, begin), root), standing.net_bytes)
        np.add.at(change, np.maximum(np.maximum.reduceat(at, begin), root), -standing.net_bytes)
    return np.cumsum(change)[:-1]


def _move_to_allowed(allowed: Bools, device: Ints, room_bytes: Longs) -> Ints:
    """[U] the same; a unit that may not be there goes to the roomiest device that may run it."""
    barred = np.flatnonzero(~allowed[np.arange(len(device)), device])
    moved = device.copy()
    moved[barred] = np.where(allowed[barred], room_bytes, -1).argmax(axis=1)
    return moved


def move_overflow(standing: Standing, allowed: Bools, device: Ints, room_bytes: Longs) -> Ints:
    """[U] devices after the last units of every overfull device went where there is room for them."""
    device = device.copy()
    free = room_bytes - standing_bytes(standing, device, len(room_bytes))
    for a in np.argsort(free, kind="stable"):
        for b in np.argsort(-free, kind="stable"):
            share = min(-int(free[a]), int(free[b]))
            if share <= 0:
                break
            movable = np.flatnonzero((device == a) & allowed[:, b])[::-1]
            taken = np.cumsum(standing.unit_bytes[movable])
            run = movable[: int(np.searchsorted(taken, share)) + 1]
            device[run] = b
            gone = int(standing.unit_bytes[run].sum())
            free[a] += gone
            free[b] -= gone
    return device

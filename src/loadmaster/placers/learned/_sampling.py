"""Rows of devices drawn from a table of probabilities, compiled: rules and room are kept while drawing."""

from typing import Any

import numpy as np

from loadmaster.simulator.jit import kernel


@kernel
def draw_rows(probability: Any, chance: Any, order: Any, num_bytes: Any, room: Any, allowed: Any) -> Any:
    """[B, U] devices: groups in `order`, each from the devices that are allowed and still have room.

    Where none has room, the allowed device with most room left is taken: such a row does not fit.
    """
    count, num, devices = chance.shape[0], chance.shape[1], len(room)
    rows = np.empty((count, num), dtype=np.int32)
    left = np.empty(devices)
    for b in range(count):
        for d in range(devices):
            left[d] = room[d]
        for at in range(num):
            u = order[at]
            total = 0.0
            for d in range(devices):
                if allowed[u, d] and left[d] >= num_bytes[u]:
                    total += probability[u, d]
            chosen = -1
            if total > 0.0:
                rest = chance[b, u] * total
                for d in range(devices):
                    if allowed[u, d] and left[d] >= num_bytes[u] and probability[u, d] > 0.0:
                        chosen = d
                        rest -= probability[u, d]
                        if rest < 0.0:
                            break
            if chosen < 0:
                for d in range(devices):
                    if allowed[u, d] and (chosen < 0 or left[d] > left[chosen]):
                        chosen = d
            rows[b, u] = chosen
            left[chosen] -= num_bytes[u]
    return rows


@kernel
def relabel_rows(rows: Any, alike: Any) -> Any:
    """The rows with devices of one set named in the order of their first use."""
    count, num, devices = rows.shape[0], rows.shape[1], len(alike)
    named = np.empty_like(rows)
    label = np.empty(devices, dtype=np.int32)
    taken = np.empty(devices, dtype=np.bool_)
    for b in range(count):
        for d in range(devices):
            label[d] = -1
            taken[d] = False
        for u in range(num):
            d = rows[b, u]
            if alike[d] < 0:
                named[b, u] = d
                continue
            if label[d] < 0:
                for other in range(devices):
                    if alike[other] == alike[d] and not taken[other]:
                        label[d] = other
                        taken[other] = True
                        break
            named[b, u] = label[d]
    return named

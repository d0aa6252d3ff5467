"""A relaxed decision diagram over the layers of a spine, compiled.

A *label* is what a choice of devices from the last layer down to some layer has cost: chain (ticks from
the start of m_k to the end of B_k), two *rows* for each engine (the most that some layer's chain and either
the forward pass up to there and the engine's work after it, or the engine's work before and after it, take
together), bytes on each device, and the *priced* cost, where bytes and rows have prices. Of a layer and
device the best labels are kept; the others are merged, a merged label has the least of everything, so every
plan is still at or above one of them. Without merging labels are dropped instead: then it finds plans.

Prices prove a bound on their own: T >= priced cost - price of all room, whatever the prices (Lagrange).
All numbers are whole, prices too (in 1/ONE ticks), so nothing is rounded the wrong way.
"""

from typing import Any

import numpy as np

from loadmaster.simulator.bounds.window_options import INFINITE
from loadmaster.simulator.jit import kernel

ONE = 1 << 12
NEVER = 1 << 61


@kernel
def _price_of(engine: int, work_price: Any) -> Any:
    """Of an engine's two rows together."""
    return work_price[engine] + work_price[len(work_price) // 2 + engine]


@kernel
def price_steps(
    ptr: Any,
    start: Any,
    end: Any,
    span: Any,
    work: Any,
    num_bytes: Any,
    first: Any,
    first_work: Any,
    first_bytes: int,
    last: Any,
    before: Any,
    engine: Any,
    byte_price: Any,
    work_price: Any,
    open_at: Any,
    up: Any,
    down: Any,
    chosen: Any,
) -> Any:
    """The least priced cost over all choices; fills up, down [K + 1, D] and the chosen options [K].

    `up` counts from the last layer, `down` to the end. Layers are numbered in the order of the steps here.
    """
    steps, num = len(ptr) - 1, len(first)
    num_rows = work.shape[1]
    for d in range(num):
        up[0, d] = NEVER
        if open_at[0, d] and first[d] < INFINITE:
            later = (first_work[d] - first[d]) * _price_of(engine[d], work_price[0])
            up[0, d] = first[d] * ONE + later + first_bytes * byte_price[d]
    for k in range(steps):
        weight = ONE
        for e in range(num_rows):
            weight -= work_price[k, e]
        for d in range(num):
            up[k + 1, d] = NEVER
        for o in range(ptr[k], ptr[k + 1]):
            if up[k, start[o]] >= NEVER or not open_at[k + 1, end[o]]:
                continue
            cost = span[o] * weight
            for e in range(num_rows):
                cost += work[o, e] * work_price[k, e]
            for d in range(num):
                cost += num_bytes[o, d] * byte_price[d]
            up[k + 1, end[o]] = min(up[k + 1, end[o]], up[k, start[o]] + cost)
    weight = ONE
    for e in range(num_rows):
        weight -= work_price[steps, e]
    best, at = NEVER, -1
    for d in range(num):
        down[steps, d] = NEVER
        if last[d] < INFINITE and open_at[steps, d]:
            down[steps, d] = last[d] * weight
            for e in range(num_rows):
                down[steps, d] += before[e, d] * work_price[steps, e]
            if up[steps, d] < NEVER and up[steps, d] + down[steps, d] < best:
                best, at = up[steps, d] + down[steps, d], d
    for k in range(steps - 1, -1, -1):
        weight = ONE
        for e in range(num_rows):
            weight -= work_price[k, e]
        for d in range(num):
            down[k, d] = NEVER
        option = -1
        for o in range(ptr[k], ptr[k + 1]):
            if down[k + 1, end[o]] >= NEVER or not open_at[k, start[o]]:
                continue
            cost = span[o] * weight
            for e in range(num_rows):
                cost += work[o, e] * work_price[k, e]
            for d in range(num):
                cost += num_bytes[o, d] * byte_price[d]
            down[k, start[o]] = min(down[k, start[o]], down[k + 1, end[o]] + cost)
            if end[o] == at and up[k, start[o]] < NEVER and up[k, start[o]] + cost == up[k + 1, at]:
                option = o
        chosen[k] = option
        if option >= 0:
            at = start[option]
    return best


@kernel
def keep_options(
    ptr: Any,
    start: Any,
    end: Any,
    span: Any,
    work: Any,
    num_bytes: Any,
    byte_price: Any,
    work_price: Any,
    up: Any,
    down: Any,
    limit: int,
    keep: Any,
) -> Any:
    """Mark the options through which the priced cost may stay below a limit; how many."""
    num_rows, num = work.shape[1], num_bytes.shape[1]
    kept = 0
    for k in range(len(ptr) - 1):
        weight = ONE
        for e in range(num_rows):
            weight -= work_price[k, e]
        for o in range(ptr[k], ptr[k + 1]):
            if not keep[o]:
                continue
            if up[k, start[o]] >= NEVER or down[k + 1, end[o]] >= NEVER:
                keep[o] = False
                continue
            cost = span[o] * weight
            for e in range(num_rows):
                cost += work[o, e] * work_price[k, e]
            for d in range(num):
                cost += num_bytes[o, d] * byte_price[d]
            keep[o] = up[k, start[o]] + cost + down[k + 1, end[o]] < limit
            kept += keep[o]
    return kept


@kernel
def search_layers(
    ptr: Any,
    start: Any,
    end: Any,
    span: Any,
    work: Any,
    num_bytes: Any,
    first: Any,
    first_work: Any,
    first_bytes: int,
    last: Any,
    before: Any,
    engine: Any,
    room: Any,
    rest_bytes: int,
    byte_price: Any,
    work_price: Any,
    open_at: Any,
    down: Any,
    down_plain: Any,
    limit: int,
    width: int,
    merge: bool,
    parent: Any,
    taken: Any,
) -> Any:
    """The least bound over the labels of the end, `limit` if none is below it; and the best label of the end.

    By row of a label: chain, priced, rows of the engines, bytes. With `merge` off, `parent` and `taken`
    [K, labels] say whence each label came.
    """
    steps, num, num_rows = len(ptr) - 1, len(first), work.shape[1]
    size = 2 + num_rows + num
    budget = 0
    for d in range(num):
        budget += room[d] * byte_price[d]
    labels = np.zeros((num * width, size), dtype=np.int64)
    at = np.zeros(num + 1, dtype=np.int64)  # labels of each device, one device after the other
    count = 0
    for d in range(num):
        at[d] = count
        if first[d] < INFINITE and open_at[0, d] and first_bytes <= room[d]:
            labels[count] = 0
            labels[count, 0] = first[d]
            later = (first_work[d] - first[d]) * _price_of(engine[d], work_price[0])
            labels[count, 1] = first[d] * ONE + later + first_bytes * byte_price[d]
            for e in range(num_rows):
                labels[count, 2 + e] = first_work[d] if e % (num_rows // 2) == engine[d] else first[d]
            labels[count, 2 + num_rows + d] = first_bytes
            count += 1
    at[num] = count
    capacity = 4096
    made = np.zeros((capacity, size), dtype=np.int64)
    key = np.zeros(capacity, dtype=np.int64)
    whence = np.zeros((capacity, 2), dtype=np.int64)
    for k in range(steps):
        weight = ONE
        for e in range(num_rows):
            weight -= work_price[k, e]
        fresh = np.zeros((num * width, size), dtype=np.int64)
        fresh_at = np.zeros(num + 1, dtype=np.int64)
        total = 0
        for target in range(num):
            fresh_at[target] = total
            if not open_at[k + 1, target] or down[k + 1, target] >= NEVER:
                continue
            found = 0
            for o in range(ptr[k], ptr[k + 1]):
                if end[o] != target:
                    continue
                cost = span[o] * weight
                for e in range(num_rows):
                    cost += work[o, e] * work_price[k, e]
                for d in range(num):
                    cost += num_bytes[o, d] * byte_price[d]
                for label in range(at[start[o]], at[start[o] + 1]):
                    chain = labels[label, 0] + span[o]
                    bound = chain + down_plain[k + 1, target]
                    if bound >= limit:
                        continue
                    priced = labels[label, 1] + cost
                    whole = priced + down[k + 1, target] - budget
                    bound = max(bound, -((-whole) // ONE))
                    if bound >= limit:
                        continue
                    if found == capacity:
                        capacity *= 2
                        wider = np.zeros((capacity, size), dtype=np.int64)
                        wider[:found] = made
                        made = wider
                        longer = np.zeros(capacity, dtype=np.int64)
                        longer[:found] = key
                        key = longer
                        other = np.zeros((capacity, 2), dtype=np.int64)
                        other[:found] = whence
                        whence = other
                    fits, left = True, 0
                    for d in range(num):
                        used = labels[label, 2 + num_rows + d] + num_bytes[o, d]
                        made[found, 2 + num_rows + d] = used
                        left += room[d] - used
                        if used > room[d]:
                            fits = False
                            break
                    if not fits or left < rest_bytes:
                        continue
                    for e in range(num_rows):
                        busy = labels[label, 2 + e] + work[o, e]
                        made[found, 2 + e] = max(busy, chain)
                        bound = max(bound, busy)
                    if bound >= limit:
                        continue
                    made[found, 0] = chain
                    made[found, 1] = priced
                    key[found] = bound
                    whence[found, 0] = label
                    whence[found, 1] = o
                    found += 1
            order = np.argsort(key[:found])
            kept = 0
            exact = width if not merge or found <= width else width // 2
            used_up = 0
            for i in range(found):
                one = order[i]
                if kept >= exact:
                    break
                used_up = i + 1
                worse = False
                for j in range(total, total + kept):
                    worse = True
                    for c in range(size):
                        if c != 1 and fresh[j, c] > made[one, c]:
                            worse = False
                            break
                    if worse:
                        if fresh[j, 1] > made[one, 1]:
                            fresh[j, 1] = made[one, 1]
                        break
                if worse:
                    continue
                fresh[total + kept] = made[one]
                if not merge:
                    parent[k, total + kept] = whence[one, 0]
                    taken[k, total + kept] = whence[one, 1]
                kept += 1
            if merge and used_up < found:
                rest = order[used_up:found]
                many = width - kept
                held = np.zeros(len(rest), dtype=np.int64)
                for i in range(len(rest)):
                    held[i] = made[rest[i], 2 + num_rows]
                    for d in range(1, num):
                        held[i] = max(held[i], made[rest[i], 2 + num_rows + d])
                rest = rest[np.argsort(held)]
                for group in range(many):
                    low, high = group * len(rest) // many, (group + 1) * len(rest) // many
                    if low == high:
                        continue
                    row = total + kept
                    fresh[row] = made[rest[low]]
                    for i in range(low + 1, high):
                        for c in range(size):
                            fresh[row, c] = min(fresh[row, c], made[rest[i], c])
                    kept += 1
            total += kept
        fresh_at[num] = total
        labels = fresh
        at = fresh_at
        if total == 0:
            return limit, -1
    best, best_label = limit, -1
    for d in range(num):
        for label in range(at[d], at[d + 1]):
            bound = labels[label, 0] + last[d]
            whole = labels[label, 1] + down[steps, d] - budget
            bound = max(bound, -((-whole) // ONE))
            for e in range(num_rows):
                bound = max(bound, labels[label, 2 + e] + before[e, d])
            if bound < best:
                best, best_label = bound, label
    return best, best_label

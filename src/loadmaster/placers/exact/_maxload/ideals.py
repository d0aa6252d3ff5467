"""Every ideal of an order, compiled: sets of classes that are closed under predecessors.

Level by level from the empty set, so that an ideal's number is above those of all ideals inside it. An ideal
is a row of 64-bit words; a hash that adds up over classes finds duplicates. With each ideal come its links
up: which ideals have one class more, and which class that is. Nothing is kept for pairs of ideals.
"""

from typing import Any

import numpy as np

from loadmaster.placers._copies import copy_into
from loadmaster.simulator.jit import kernel

_ONE = np.uint64(1)
_EMPTY = -1


@kernel
def enumerate_ideals(
    num_words: Any, pred_ptr: Any, pred: Any, succ_ptr: Any, succ: Any, key: Any, most: Any, most_links: Any
) -> Any:
    """Rows [I, W], links up (ptr [I + 1], ideal, class), and whether that is all within the limits."""
    num = len(key)
    size, links = 1024, 4096
    rows = np.zeros((size, num_words), np.uint64)
    ready = np.zeros((size, num_words), np.uint64)  # classes that may be added
    code = np.zeros(size, np.uint64)
    above = np.empty(links, np.int32)
    below = np.empty(links, np.int32)
    gone = np.empty(links, np.int32)
    table = np.full(4 * size, _EMPTY, np.int32)
    for v in range(num):
        if pred_ptr[v] == pred_ptr[v + 1]:
            ready[0, v >> 6] |= _ONE << np.uint64(v & 63)
    table[0] = 0
    count, made, at, complete = 1, 0, 0, True
    while at < count and complete:
        v = -1
        while True:
            v = _next_ready(ready, at, v + 1, num)
            if v == num:
                break
            word, bit = v >> 6, _ONE << np.uint64(v & 63)
            mixed = code[at] ^ key[v]
            slot = np.int64(mixed >> np.uint64(1)) & (len(table) - 1)
            found = _EMPTY
            while table[slot] != _EMPTY:
                other = table[slot]
                if code[other] == mixed:
                    same = True
                    for w in range(num_words):
                        own = rows[at, w] | bit if w == word else rows[at, w]
                        if rows[other, w] != own:
                            same = False
                            break
                    if same:
                        found = other
                        break
                slot = (slot + 1) & (len(table) - 1)
            if found == _EMPTY:
                if count >= most:
                    complete = False
                    break
                if count == size:
                    size *= 2
                    rows = _grow_rows(rows, size)
                    ready = _grow_rows(ready, size)
                    longer = np.zeros(size, np.uint64)
                    copy_into(longer, code)
                    code = longer
                found = count
                count += 1
                code[found] = mixed
                for w in range(num_words):
                    rows[found, w] = rows[at, w]
                    ready[found, w] = ready[at, w]
                rows[found, word] |= bit
                ready[found, word] ^= bit
                for i in range(succ_ptr[v], succ_ptr[v + 1]):
                    u = succ[i]
                    free = True
                    for j in range(pred_ptr[u], pred_ptr[u + 1]):
                        p = pred[j]
                        if rows[found, p >> 6] >> np.uint64(p & 63) & _ONE == 0:
                            free = False
                            break
                    if free:
                        ready[found, u >> 6] |= _ONE << np.uint64(u & 63)
                table[slot] = found
                if 2 * count > len(table):
                    table = _rehash(code, count, 2 * len(table))
            if made == links:
                if links >= most_links:
                    complete = False
                    break
                links = min(2 * links, most_links)
                above = _grow_column(above, links)
                below = _grow_column(below, links)
                gone = _grow_column(gone, links)
            above[made], below[made], gone[made] = found, at, v
            made += 1
        at += 1
    ptr = np.full(count + 1, made, np.int64)
    for i in range(made - 1, -1, -1):  # links were made ideal by ideal
        ptr[below[i]] = i
    for i in range(count - 1, -1, -1):
        ptr[i] = min(ptr[i], ptr[i + 1])
    return rows[:count].copy(), ptr, above[:made].copy(), gone[:made].copy(), complete


@kernel
def _next_ready(ready: Any, at: Any, v: Any, num: Any) -> Any:
    """The first class from `v` on that may be added, `num` if there is none."""
    while v < num:
        part = ready[at, v >> 6] >> np.uint64(v & 63)
        if part == 0:
            v = (v | 63) + 1
            continue
        while part & np.uint64(255) == 0:
            part >>= np.uint64(8)
            v += 8
        while part & _ONE == 0:
            part >>= _ONE
            v += 1
        return v
    return num


@kernel
def _grow_rows(rows: Any, size: Any) -> Any:
    more = np.zeros((size, rows.shape[1]), np.uint64)
    for at in range(len(rows)):
        copy_into(more[at], rows[at])
    return more


@kernel
def _grow_column(column: Any, size: Any) -> Any:
    more = np.empty(size, np.int32)
    copy_into(more, column)
    return more


@kernel
def _rehash(code: Any, count: Any, size: Any) -> Any:
    table = np.full(size, _EMPTY, np.int32)
    for i in range(count):
        slot = np.int64(code[i] >> np.uint64(1)) & (size - 1)
        while table[slot] != _EMPTY:
            slot = (slot + 1) & (size - 1)
        table[slot] = i
    return table


@kernel
def sum_by_ideal(ptr: Any, up: Any, more: Any, seconds: Any, barred: Any, num_bytes: Any, price: Any) -> Any:
    """Of each ideal: seconds [I, T], classes barred from a type [I, T], bytes [I] and price [I]."""
    num, types = len(ptr) - 1, seconds.shape[1]
    of_seconds = np.zeros((num, types))
    of_barred = np.zeros((num, types), np.int32)
    of_bytes = np.zeros(num, np.int64)
    of_price = np.zeros(num)
    for i in range(num):
        for link in range(ptr[i], ptr[i + 1]):
            j, v = up[link], more[link]
            for t in range(types):
                of_seconds[j, t] = of_seconds[i, t] + seconds[v, t]
                of_barred[j, t] = of_barred[i, t] + barred[v, t]
            of_bytes[j] = of_bytes[i] + num_bytes[v]
            of_price[j] = of_price[i] + price[v]
    return of_seconds, of_barred, of_bytes, of_price

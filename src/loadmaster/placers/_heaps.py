"""Many binary heaps side by side in two flat arrays, compiled: least key first, then least item.

Heap h of capacity C stands at `root` = h * C. Its length is kept by the caller.
"""

from typing import Any

from loadmaster.simulator.jit import kernel


@kernel
def heap_push(keys: Any, items: Any, root: int, size: int, key: float, item: int) -> None:
    """Add an item to the heap of `size` items at `root`."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        above = keys[root + parent]
        if above < key or (above == key and items[root + parent] <= item):
            break
        keys[root + at] = above
        items[root + at] = items[root + parent]
        at = parent
    keys[root + at] = key
    items[root + at] = item


@kernel
def heap_drop(keys: Any, items: Any, root: int, size: int) -> None:
    """Remove the first of `size` items at `root`."""
    size -= 1
    key, item = keys[root + size], items[root + size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            keys[root + right] < keys[root + child]
            or (keys[root + right] == keys[root + child] and items[root + right] < items[root + child])
        ):
            child = right
        below = keys[root + child]
        if key < below or (key == below and item <= items[root + child]):
            break
        keys[root + at] = below
        items[root + at] = items[root + child]
        at = child
    keys[root + at] = key
    items[root + at] = item

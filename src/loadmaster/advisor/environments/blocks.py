"""Shapes of blocks of servers in the published RAMP cluster, as bit masks (section 2.3 of PAC-ML's rules).

A server (c, r, s) is bit (c * racks + r) * servers + s. A shape is scanned over every origin where it
fits, c outermost.
"""

from dataclasses import dataclass
from functools import cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

GROUPS, RACKS, SERVERS = 4, 4, 2
NUM_SERVERS = GROUPS * RACKS * SERVERS
DEGREES = (1, 2, 4, 6, 8, 16)  # of 1 and the even numbers to 16, those with a shape
MAX_DEGREE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Every block, by degree and in the order in which they are tried."""

    degree: NDArray[np.int64]  # [B] index into DEGREES
    mask: NDArray[np.uint64]  # [B]
    shape: NDArray[np.int64]  # [B] index into shapes
    first: NDArray[np.int64]  # [K + 1] blocks of degree k are first[k] to first[k + 1]
    servers: NDArray[np.int64]  # [B, 16] in the order of sub-ops, -1 beyond the degree
    shapes: tuple[str, ...]


def list_shapes(k: int) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """Named shapes for k servers as offsets from an origin, in the order in which they are tried."""
    boxes: list[tuple[int, int, int]] = []
    for i in (d for d in range(1, k + 1) if k % d == 0):
        p = k // i
        root = isqrt(p)
        if root * root == p and root <= min(GROUPS, RACKS) and i <= SERVERS:
            boxes.append((root, root, i))
        if p <= min(GROUPS, RACKS) and i <= SERVERS:
            boxes += [(p, 1, i), (p, i, 1)]
    shapes = [(str(box).replace(" ", ""), _fill(box)) for box in dict.fromkeys(boxes)]
    if 1 < k <= min(GROUPS, RACKS):
        shapes.append(("diagonal", [(j, j, 0) for j in range(k)]))
        if (k, 1, 1) not in boxes:
            shapes.append((f"({k},1,1)", _fill((k, 1, 1))))
    return shapes


def _fill(box: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    return [(c, r, s) for c in range(box[0]) for r in range(box[1]) for s in range(box[2])]


@cache
def all_blocks() -> Blocks:
    """The 195 blocks of the published cluster."""
    degree: list[int] = []
    masks: list[int] = []
    shape_of: list[int] = []
    servers: list[list[int]] = []
    first = [0]
    names: list[str] = []
    for index, k in enumerate(DEGREES):
        seen: set[int] = set()
        for name, offsets in list_shapes(k):
            names.append(f"{k}:{name}")
            for members in _positions(offsets):
                mask = sum(1 << server for server in members)
                if mask in seen:
                    continue
                seen.add(mask)
                degree.append(index)
                masks.append(mask)
                shape_of.append(len(names) - 1)
                servers.append(members + [-1] * (MAX_DEGREE - k))
        first.append(len(masks))
    return Blocks(
        degree=np.array(degree),
        mask=np.array(masks, dtype=np.uint64),
        shape=np.array(shape_of),
        first=np.array(first),
        servers=np.array(servers),
        shapes=tuple(names),
    )


def _positions(offsets: list[tuple[int, int, int]]) -> list[list[int]]:
    """The servers of a shape at every origin where it fits without wrapping around."""
    spans = [max(o[axis] for o in offsets) for axis in range(3)]
    return [
        [((c + dc) * RACKS + r + dr) * SERVERS + s + ds for dc, dr, ds in offsets]
        for c in range(GROUPS - spans[0])
        for r in range(RACKS - spans[1])
        for s in range(SERVERS - spans[2])
    ]

"""Layouts: where the rows of a group are, and which pieces go where between two groups.

A shard is one run of a group's ops: a device with rows of its own, a device with the whole batch, or one
micro-batch of a pipeline. Groups with equal shards have one layout and nothing is sent between them.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from loadmaster.core.strategy import Mode, OpGroup, microbatch_bounds

Piece = tuple[int, int, int]  # shard of the source, first row, row after the last


@dataclass(frozen=True, slots=True)
class Layout:
    """Shards of a group: Q of them."""

    devices: tuple[int, ...]  # [Q]
    start: tuple[int, ...]  # [Q] first row
    rows: tuple[int, ...]  # [Q]
    parts: bool  # shards have rows of their own; else each has the whole batch
    stage: int = -1  # of a pipeline

    @property
    def num_shards(self) -> int:
        """Q."""
        return len(self.devices)


def layout_of(group: OpGroup, batch: int, stage: int = -1) -> Layout:
    """The layout of a group."""
    if group.mode == Mode.PIPELINE:
        bounds = microbatch_bounds(batch, group.microbatches)
        rows = tuple(b - a for a, b in pairwise(bounds))
        return Layout(group.devices * len(rows), bounds[:-1], rows, parts=True, stage=stage)
    parts = group.mode == Mode.REPLICATE and len(group.devices) > 1
    return Layout(group.devices, group.starts, group.rows, parts)


@lru_cache(maxsize=4096)
def find_pieces(source: Layout, target: Layout, batch: int, part: bool) -> tuple[tuple[Piece, ...], ...]:
    """For each shard of the target the pieces it is made of; `part`: the tensor has rows.

    Where several shards hold the same, a shard on the same device is taken, else the first.
    """
    found = []
    for at, device in enumerate(target.devices):
        low, high = 0, batch
        if part and target.parts:
            low, high = target.start[at], target.start[at] + target.rows[at]
        if part and source.parts:
            pieces = []
            for s, (start, rows) in enumerate(zip(source.start, source.rows, strict=True)):
                first, last = max(low, start), min(high, start + rows)
                if first < last:
                    pieces.append((s, first, last))
            found.append(tuple(pieces))
            continue
        own = source.devices.index(device) if device in source.devices else 0
        found.append(((own, low, high),))
    return tuple(found)

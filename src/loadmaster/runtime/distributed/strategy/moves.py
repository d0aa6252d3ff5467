"""Moves: which rows of a tensor go from whom to whom, where two groups run on other devices or rows.

    5 | 3 | 1 | 1   ->   1 | 2 | 3 | 4        rows of ranks 0 to 3, before and after
    rank 0 keeps row 0, sends rows 1-2 to rank 1 and rows 3-4 to rank 2; and so on

A rank that needs rows it has computes nothing and sends nothing. Of ranks that all have the whole batch the
first one sends. The way back is the same rule the other way round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadmaster.runtime.distributed.strategy.layout import RowShare


@dataclass(frozen=True, slots=True)
class Move:
    """Rows [begin, end) of the batch from one rank to another, or kept by one."""

    source: int
    target: int
    begin: int
    end: int

    @property
    def is_local(self) -> bool:
        """Nothing is sent."""
        return self.source == self.target

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.begin


def moves_of_rows(before: RowShare, after: RowShare) -> tuple[Move, ...]:
    """What every rank of `after` needs, in order of its rows."""
    found = []
    for target in after.ranks:
        begin, end = after.bounds(target)
        if before.whole:
            found.append(Move(target if target in before.ranks else before.ranks[0], target, begin, end))
            continue
        for source in before.ranks:
            first, last = before.bounds(source)
            if max(first, begin) < min(last, end):
                found.append(Move(source, target, max(first, begin), min(last, end)))
    return tuple(found)


def moves_of_whole(before: RowShare, after: RowShare) -> tuple[tuple[int, int], ...]:
    """(source, target) of a tensor that all ranks of `before` have."""
    return tuple((target if target in before.ranks else before.ranks[0], target) for target in after.ranks)


def moves_back_of_whole(before: RowShare, after: RowShare) -> tuple[tuple[int, int], ...]:
    """(source, target) of the gradients of such a tensor; what a target is given is added up.

    Of ranks of `after` that compute the same, one sends. Where all ranks of `before` compute the same, each
    needs the whole sum; else the sum over them counts, and each part goes where its tensor came from.
    """
    same = after.whole
    if before.whole and len(before.ranks) > 1:
        if same:
            return tuple((one if one in after.ranks else after.ranks[0], one) for one in before.ranks)
        return tuple((source, one) for one in before.ranks for source in after.ranks)
    senders: Sequence[int] = after.ranks[:1] if same else after.ranks
    return tuple((one, one if one in before.ranks else before.ranks[0]) for one in senders)

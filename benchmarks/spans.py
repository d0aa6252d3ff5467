"""How much of the time of some spans lies inside others."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in intervals that do not touch."""
    found: list[Interval] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        elif last > first:
            found.append((first, last))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals that do not touch."""
    return sum(last - first for first, last in intervals)


def covered(inner: Iterable[Interval], outer: Iterable[Interval]) -> float:
    """The share of the one's time during which the other runs too."""
    mine, theirs = union(inner), union(outer)
    total, both, at = length(mine), 0.0, 0
    for first, last in mine:
        while at < len(theirs) and theirs[at][1] <= first:
            at += 1
        near = at
        while near < len(theirs) and theirs[near][0] < last:
            both += min(last, theirs[near][1]) - max(first, theirs[near][0])
            near += 1
    return both / total if total else 1.0

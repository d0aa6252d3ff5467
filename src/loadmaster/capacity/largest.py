"""Largest: the largest batch that fits, guessed on a line through two captures, confirmed by two more."""

from collections.abc import Callable
from dataclasses import replace

from loadmaster.capacity.fit_search import FitSearch
from loadmaster.capacity.step_setting import StepSetting
from loadmaster.core.answers.fit_answer import LargestBatch
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import LoadmasterError
from loadmaster.core.problem import Problem

MOST = 2**20  # samples; models take no more
Judge = Callable[[Problem], bool]


def find_largest(fits: Callable[[int], bool], start: int, *, most: int = MOST) -> int:
    """The largest number up to `most` that fits, 0 if 1 does not: by steps that double from `start`, then
    by halves. Asks for no more than `start` and one more where `start` is the answer."""
    low, high, step = 0, most + 1, 1  # fits, fits not
    at = min(max(start, 1), most)
    while low < at < high:
        if fits(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def guess_largest_batch(
    search: FitSearch, setting: StepSetting, cluster: Cluster, judge: Judge
) -> int | None:
    """The largest batch by the line through two captures; None where they are not alike."""
    assert setting.batch is not None
    if search.guess(setting, setting.batch, cluster) is None:
        return None

    def fits(batch: int) -> bool:
        problem = search.guess(setting, batch, cluster)
        return problem is not None and judge(problem)

    return find_largest(fits, setting.batch)


def find_largest_batch(
    search: FitSearch, setting: StepSetting, cluster: Cluster, judge: Judge
) -> LargestBatch:
    """The largest batch that `judge` says fits on a cluster, captured at that batch and at one more."""
    if setting.batch is None:
        return LargestBatch(None, False, "give a batch to ask for the largest")

    def fits(batch: int) -> bool:
        return judge(search.problem(replace(setting, batch=batch), cluster))

    try:
        guess = guess_largest_batch(search, setting, cluster, judge)
        found = find_largest(fits, setting.batch if guess is None else guess)
    except LoadmasterError as problem:  # the user's own function takes no batch, or none that large
        return LargestBatch(None, False, str(problem))
    if found == MOST:
        return LargestBatch(None, True, f"more than {MOST}")
    return LargestBatch(found, True)

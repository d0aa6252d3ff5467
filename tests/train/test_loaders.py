"""Feeds: the same batches after a stop at any point, states that are JSON, the rest refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loadmaster.core.errors import InputError
from loadmaster.shards.model.loaders import Feed, LoaderError, open_source, with_timeout


class Stateful:
    """A loader that knows where it is."""

    def __init__(self, *, bad: bool = False) -> None:
        self.at, self.skipped, self.bad = 0, 0, bad

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            self.skipped += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": {self.at} if self.bad else self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True)


def noisy() -> Iterator[float]:
    for _ in range(4):
        yield torch.rand(()).item()


def some(feed: Feed, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        for batch in feed.batches():
            found.append(batch[0].tolist() if isinstance(batch, list) else batch)
            if len(found) == count:
                return found
    return found


@pytest.mark.parametrize("data", [Stateful, shuffled, noisy, lambda: [1, 2, 3]])
def test_a_feed_goes_on_with_the_same_batches_from_anywhere(data: Any) -> None:
    whole = some(Feed(data, trial="a", seed=3), 13)
    for stop in range(1, 13):
        feed = Feed(data, trial="a", seed=3)
        begun = some(feed, stop)
        again = Feed(data, trial="a", seed=3)
        torch.rand(stop)  # what others draw does not matter
        again.seek(feed.position())
        assert begun + some(again, 13 - stop) == whole


def test_epochs_are_shuffled_anew_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    feed = Feed(shuffled, trial="a")
    first, second = list(feed.batches()), list(feed.batches())
    assert str(first) != str(second)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_with_a_state_skips_nothing() -> None:
    made: list[Stateful] = []

    def data() -> Stateful:
        made.append(Stateful())
        return made[-1]

    feed = Feed(data, trial="a")
    some(feed, 3)
    again = Feed(data, trial="a")
    again.seek(feed.position())
    assert some(again, 1) == [3]
    assert made[-1].skipped == 1


def test_a_state_that_is_not_json_is_refused_by_name() -> None:
    feed = Feed(lambda: Stateful(bad=True), trial="mine")
    some(feed, 2)
    with pytest.raises(
        LoaderError, match=r"loader of trial 'mine' \(Stateful\) has a state that is not JSON"
    ):
        feed.position()


def test_data_that_shrank_is_found_when_it_is_skipped() -> None:
    feed = Feed(lambda: [1, 2, 3, 4], trial="a")
    some(feed, 3)
    with pytest.raises(LoaderError, match="gave 2 batches where it had given 3"):
        Feed(lambda: [1, 2], trial="a").seek(feed.position())


def test_what_cannot_be_read_twice_is_refused_by_name() -> None:
    made = noisy()
    with pytest.raises(InputError, match="same generator every time"):
        open_source(lambda: made, trial="a")
    with pytest.raises(InputError, match="is a list; give a function"):
        open_source([1], trial="a")  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="gave no batch in epoch 0"):
        list(Feed(lambda: [], trial="a").batches())
    with pytest.raises(InputError, match="gives int"):
        list(Feed(lambda: 3, trial="a").batches())  # type: ignore[arg-type, return-value]
    open_source(shuffled, trial="a")


def test_a_timed_loader_gives_the_same_batches_and_keeps_its_length() -> None:
    timed = with_timeout(lambda: [1, 2, 3], 5.0, trial="a")
    assert list(Feed(timed, trial="a").batches()) == [1, 2, 3]
    assert len(timed()) == 3  # type: ignore[arg-type]


def test_an_error_in_the_data_says_where() -> None:
    def bad() -> Iterator[int]:
        yield 1
        raise ValueError("no such file")

    with pytest.raises(LoaderError, match="raised ValueError after 1 batches of epoch 0: no such file"):
        list(Feed(bad, trial="a").batches())

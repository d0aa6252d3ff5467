"""Data of trials: states that are JSON, what cannot be read twice is refused, batches within a limit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loadmaster.core.errors import InputError
from loadmaster.shards.model.loaders import (
    LoaderError,
    decode_loader_state,
    encode_loader_state,
    open_source,
    with_timeout,
)


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


def test_a_state_that_is_not_json_is_refused_by_name() -> None:
    with pytest.raises(
        LoaderError, match=r"loader of trial 'mine' \(Stateful\) has a state that is not JSON"
    ):
        encode_loader_state(Stateful(bad=True), trial="mine")
    state = encode_loader_state(Stateful(), trial="mine")
    assert decode_loader_state(state) == {"at": 0}


def test_what_cannot_be_read_twice_is_refused_by_name() -> None:
    made = noisy()
    with pytest.raises(InputError, match="same generator every time"):
        open_source(lambda: made, trial="a")
    with pytest.raises(InputError, match="is a list; give a function"):
        open_source([1], trial="a")  # type: ignore[arg-type]
    open_source(shuffled, trial="a")


def test_a_timed_loader_gives_the_same_batches_and_keeps_its_length() -> None:
    timed = with_timeout(lambda: [1, 2, 3], 5.0, trial="a")
    assert list(timed()) == [1, 2, 3]
    assert len(timed()) == 3  # type: ignore[arg-type]

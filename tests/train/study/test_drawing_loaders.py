"""Loaders that draw from the global generators with every batch go on with the same data after a resume."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import loadmaster.train as lt
from loadmaster.train.execute import micro_batches
from tests.train.lora_trials import lora, tokens
from tests.train.small_trials import Rows, digest, trial
from tests.train.study.test_study import Stop


def pick(way: str, count: int) -> int:
    if way == "torch":
        return int(torch.randint(count, ()))
    return random.randrange(count) if way == "python" else int(np.random.randint(count))


class Buffer(IterableDataset[Any]):
    """A shuffle buffer of three."""

    def __init__(self, rows: list[Any], way: str) -> None:
        self.rows, self.way = rows, way

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for row in self.rows:
            held.append(row)
            if len(held) > 3:
                yield held.pop(pick(self.way, len(held)))
        while held:
            yield held.pop(pick(self.way, len(held)))


def study(folder: Path, one: Any, **options: Any) -> lt.Study:
    return lt.Study([one], dir=folder, devices="cpu", **options)


@pytest.mark.parametrize("way", ["torch", "python", "numpy"])
@pytest.mark.parametrize("after", [1, 7, 13])
def test_a_shuffle_buffer_beside_dropout_goes_on_with_the_same_data(
    way: str, after: int, tmp_path: Path
) -> None:
    rows = Rows(10)
    pairs = list(zip(rows._x, rows._y, strict=True))
    one = trial("a", data=lambda: DataLoader(Buffer(pairs, way), batch_size=None), evaluate=None)
    for stops in (after, 2):  # also twice within an epoch
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path, one, callbacks=[Stop(stops, "interrupt")]).fit()
    result = study(tmp_path, one).fit()
    assert digest(result["a"].state_dict()) == digest(lt.reference(one).state_dict)


def test_a_member_of_a_group_with_a_shuffle_buffer_goes_on_with_the_same_data(tmp_path: Path) -> None:
    one = lora("a", data=lambda: Buffer(tokens(3), "torch"))
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, one, callbacks=[Stop(2, "interrupt")]).fit()
    assert digest(study(tmp_path, one).fit()["a"].state_dict()) == digest(lt.reference(one).state_dict)


def test_more_draws_than_can_be_kept_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batches, "MOST_DRAWS", 4)
    rows = Rows(10)
    pairs = list(zip(rows._x, rows._y, strict=True))
    one = trial("a", data=lambda: Buffer(pairs, "torch"), evaluate=None)
    with (
        pytest.warns(RuntimeWarning, match="the data of trial 'a' draws from the global generators"),
        pytest.raises(KeyboardInterrupt),
    ):
        study(tmp_path, one, callbacks=[Stop(8, "interrupt")]).fit()
    result = study(tmp_path, one).fit()
    assert result["a"].error_kind == "loader"
    assert "cannot be resumed; give it a generator of its own" in result["a"].error
    with pytest.warns(RuntimeWarning):  # without a stop it trains as before
        whole = study(tmp_path / "whole", one).fit()
    assert digest(whole["a"].state_dict()) == digest(lt.reference(one).state_dict)

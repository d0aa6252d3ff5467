"""A process of a DataLoader that dies fails its own trial, by kind `loader`, and no other."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from loadmaster.shards.model.loaders import confine_worker_deaths, is_worker_death
from loadmaster.train.coordination.result import TrialStatus
from tests.train.small_trials import Rows, digest, trial
from tests.train.test_by_call import batches, trial_of


class Deadly(Dataset[Any]):
    """Its process ends when a row is read; None: never."""

    def __init__(self, at: int | None, how: str = "exit") -> None:
        self.rows, self.at, self.how = Rows(12), at, how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Any:
        if at == self.at and torch.utils.data.get_worker_info() is not None:
            time.sleep(0.2)  # what it read before is on its way
            if self.how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows._x[at], self.rows._y[at]


def one(name: str, at: int | None, how: str = "exit", num_workers: int = 1) -> lt.Trial:
    def data() -> Any:
        return DataLoader(Deadly(at, how), batch_size=None, num_workers=num_workers)

    return trial(name, data=data, evaluate=None, epochs=2)


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ("exit", "cpu"),
        pytest.param("kill", "cpu", marks=pytest.mark.slow),
        pytest.param("exit", ["cpu#0", "cpu#1"], marks=pytest.mark.slow),
    ],
)
def test_a_dying_loader_process_fails_its_trial_alone(how: str, devices: Any, tmp_path: Path) -> None:
    trials = [one("good", None), one("bad", 4, how), one("better", None)]
    result = lt.Study(trials, dir=tmp_path, devices=devices).fit()
    assert result["bad"].status == TrialStatus.FAILED
    assert result["bad"].error_kind == "loader"
    assert "DataLoader worker" in result["bad"].error
    wanted = digest(lt.reference(one("x", None, num_workers=0)).state_dict)
    for name in ("good", "better"):
        assert result[name].status == TrialStatus.DONE
        assert digest(result[name].state_dict()) == wanted


def test_a_process_that_dies_elsewhere_raises_nothing_here() -> None:
    with confine_worker_deaths():
        batches = iter(DataLoader(Deadly(2), batch_size=None, num_workers=1, prefetch_factor=4))
        next(batches)
        worker = batches._workers[0]
        worker.join(20)
        assert not worker.is_alive()
        sum(range(10**6))  # no handler raises here
    del batches


def test_what_a_dataset_raises_in_a_worker_is_not_a_death() -> None:
    assert not is_worker_death(RuntimeError("Caught ValueError in DataLoader worker process 0."))
    assert is_worker_death(RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"))


class Raising(Dataset[Any]):
    """Its first row cannot be read while a file is there."""

    def __init__(self, flag: Path) -> None:
        self.rows, self.flag = Rows(12), flag

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Any:
        if self.flag.exists():
            raise OSError("the disk is gone")
        return self.rows._x[at], self.rows._y[at]


@pytest.mark.parametrize(
    "how", [pytest.param("dies", marks=pytest.mark.slow), "raises", "no loader", "by call"]
)
def test_a_loader_that_fails_while_the_study_is_planned_fails_its_trial_alone(
    how: str, tmp_path: Path
) -> None:
    flag = tmp_path / "gone"
    flag.touch()

    def data() -> Any:
        if how == "dies":
            return DataLoader(Deadly(0 if flag.exists() else None), batch_size=None, num_workers=1)
        if how == "no loader" and flag.exists():
            raise FileNotFoundError("no such file: train.bin")
        return DataLoader(Raising(flag), batch_size=None)

    def rows() -> Any:
        if flag.exists():
            raise OSError("the disk is gone")
        return batches()

    bad = trial("bad", data=data, evaluate=None, epochs=2)
    if how == "by call":
        bad = replace(trial_of(data=rows), name="bad")

    def make() -> lt.Study:
        return lt.Study([one("good", None), bad, one("better", None)], dir=tmp_path / "run", devices="cpu")

    result = make().fit()
    assert result["bad"].status == TrialStatus.FAILED
    assert result["bad"].error_kind == "loader"
    assert "bad" in result["bad"].error
    wanted = digest(lt.reference(one("x", None, num_workers=0)).state_dict)
    for name in ("good", "better"):
        assert digest(result[name].state_dict()) == wanted
    flag.unlink()
    assert make().fit()["bad"].status == TrialStatus.FAILED  # until it is asked for
    again = make().fit(retry_failed=True)
    assert again["bad"].status == TrialStatus.DONE
    assert again["bad"].step > 0


def test_a_study_of_which_no_data_can_be_read_is_refused_at_once(tmp_path: Path) -> None:
    flag = tmp_path / "gone"
    flag.touch()
    bad = trial("bad", data=lambda: DataLoader(Raising(flag), batch_size=None), evaluate=None)
    with pytest.raises(InputError, match="the disk is gone"):
        lt.Study([bad], dir=tmp_path / "run", devices="cpu").fit()


def test_a_worker_that_dies_before_it_hands_over_its_batch_is_a_dead_worker() -> None:
    loader = DataLoader(torch.ones(8, 4), num_workers=1, batch_size=1, prefetch_factor=2)
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers  # type: ignore[attr-defined]
    time.sleep(0.5)  # the next batches are in the queue, their memory is still the worker's
    worker.kill()
    worker.join()
    with pytest.raises((RuntimeError, EOFError, OSError)) as found:
        next(batches)
    assert is_worker_death(found.value)
    assert not is_worker_death(FileNotFoundError("data/0017.jpg"))

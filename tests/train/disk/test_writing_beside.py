"""Checkpoints are written beside the training: steps go on, and what is written is the boundary's state."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.background_writer import copy_snapshot, count_copy_bytes
from loadmaster.train.disk.checkpoints import Snapshot
from loadmaster.train.disk.journal import DiskFullError, read_journal
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial


class Held:
    """The first checkpoint stays in the middle of its writing until so many more steps have been done."""

    def __init__(self, until: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.until, self.reached, self.most, self._now = until, threading.Event(), 0, 0
        self.was_reached = False
        write, lock = checkpoints.write_tensors, threading.Lock()

        def slow(path: Path, tensors: Any) -> tuple[int, int]:
            with lock:
                self._now += 1
                self.most = max(self.most, self._now)
            self.was_reached |= self.reached.wait(20)
            with lock:
                self._now -= 1
            return write(path, tensors)

        monkeypatch.setattr(checkpoints, "write_tensors", slow)

    def on_step(self, name: str, done: Any) -> None:
        if done.step == self.until:
            self.reached.set()


def study(folder: Path, *trials: Any, **options: Any) -> Study:
    given = {"engine": Plain(), "launcher": "inline", "checkpoint_every": 4}
    return Study(trials, dir=folder / "run", **(given | options))


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(7, monkeypatch)
    result = study(tmp_path, trial("a"), callbacks=[held]).fit()
    assert held.was_reached  # step 7 was done while the checkpoint of step 4 was not
    assert held.most == 1  # one at a time
    assert digest(result["a"].state_dict()) == plainly(trial("a"))
    commits = [r["step"] for r in read_journal(tmp_path / "run/journal").records if r["kind"] == "commit"]
    assert commits == [4, 8, 12, 16, 20]


def test_what_is_written_beside_is_the_state_of_its_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(7, monkeypatch)
    kept: list[str] = []

    class Look:
        def on_checkpoint(self, name: str, step: int) -> None:
            if step == 4:
                folder = next((tmp_path / "run/checkpoints/a").glob("00000001-*"))
                kept.append(digest(checkpoints.read_snapshot(folder).model))

    study(tmp_path, trial("a", evaluate=None), callbacks=[held, Look()]).fit()
    assert kept == [plainly(trial("a", max_steps=4))]


def test_without_room_for_a_copy_the_device_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    write = checkpoints.write_tensors

    def noted(path: Path, tensors: Any) -> tuple[int, int]:
        seen.append(threading.current_thread() is threading.main_thread())
        return write(path, tensors)

    monkeypatch.setattr(checkpoints, "write_tensors", noted)
    study(tmp_path, trial("a", max_steps=6), host_cap=1000).fit()
    assert seen
    assert all(seen)


def test_a_disk_that_is_full_beside_the_training_is_said_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    write, calls = checkpoints.write_tensors, [0]

    def full(path: Path, tensors: Any) -> tuple[int, int]:
        calls[0] += 1
        if calls[0] > 4:
            assert threading.current_thread() is not threading.main_thread()
            raise checkpoints.make_write_error(path, OSError(errno.ENOSPC, "No space left on device"))
        return write(path, tensors)

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    with pytest.raises(DiskFullError, match="free some space"):
        study(tmp_path, trial("a"), trial("b")).fit()
    monkeypatch.undo()
    result = study(tmp_path, trial("a"), trial("b")).fit()
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


def test_a_copy_keeps_what_is_shared_shared_and_leaves_frozen_tensors_where_they_are() -> None:
    weight, frozen, moment = torch.ones(3), torch.ones(5), torch.zeros(3)
    model = {"w": weight, "f": frozen}
    tensors = {"model/w": weight, "model/f": frozen, "optim/w/m": moment}
    snapshot = Snapshot(1, model, tensors, {"rates": [1]}, frozenset({"f"}))
    copy = copy_snapshot(snapshot)
    assert count_copy_bytes(snapshot) == weight.nbytes + moment.nbytes
    weight.add_(1)
    snapshot.facts["rates"].append(2)
    assert copy.model["w"].tolist() == [1, 1, 1]
    assert copy.facts == {"rates": [1]}
    assert copy.model["w"].data_ptr() == copy.tensors["model/w"].data_ptr()
    assert copy.model["f"].data_ptr() == frozen.data_ptr()

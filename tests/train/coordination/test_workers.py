"""One process a device: the same weights, a worker killed is replaced, a late one changes nothing."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.disk.journal import read_journal
from loadmaster.train.study import Study
from loadmaster.train.workers import process_workers as workers
from loadmaster.train.workers.messages import (
    Release,
    StepEnded,
    Task,
    TrialReleased,
    TurnEnded,
    WorkerLost,
)
from loadmaster.train.workers.process_workers import FolderParcel, ProcessWorkerPool, pickle_by_value
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial


def study(tmp_path: Path, trials: list[Any], **options: Any) -> Study:
    given = {"engine": Plain(2), "launcher": "processes", "checkpoint_every": 3}
    return Study(trials, dir=tmp_path / "run", **(given | options))


def children() -> set[int]:
    me = os.getpid()
    found = set()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if int((each / "stat").read_text().rsplit(")", 1)[1].split()[1]) == me:
                    found.add(int(each.name))
            except (OSError, IndexError):
                continue
    return found


class KillOne:
    """Kills a worker after so many steps."""

    def __init__(self, after: int) -> None:
        self.left, self.before = after, children()

    def on_step(self, name: str, done: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(min(children() - self.before), signal.SIGKILL)


def test_two_processes_train_to_the_weights_of_the_plain_loop_and_survive_a_kill(tmp_path: Path) -> None:
    trials = [trial("a"), trial("b", lr=0.1), trial("c", lr=0.001, num_batches=6)]
    result = study(tmp_path, trials, callbacks=[KillOne(9)]).fit()
    for one in trials:
        assert result[one.name].status == TrialStatus.DONE
        assert digest(result[one.name].state_dict()) == plainly(one)
    assert not list(Path("/dev/shm").glob("loadmaster-*/*"))


@pytest.mark.slow
def test_a_trial_that_fails_in_a_process_leaves_the_others(tmp_path: Path) -> None:
    from tests.train.study.test_study import Bomb

    bad = trial("bad", build=lambda: Bomb("exception"))
    result = study(tmp_path, [trial("a"), bad]).fit()
    assert result["bad"].error_kind == "exception"
    assert "user code broke" in result["bad"].error
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


class Deadly:
    """A loader that takes its whole process with it."""

    def __iter__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        yield None

    def __len__(self) -> int:
        return 3


@pytest.mark.slow
def test_a_trial_that_kills_its_worker_every_time_fails_alone(tmp_path: Path) -> None:
    result = study(tmp_path, [trial("bad", data=Deadly), trial("a")]).fit()
    assert result["bad"].status == TrialStatus.FAILED
    assert "died 3 times" in result["bad"].error
    assert "signal 9" in result["bad"].error
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_and_the_next_call_goes_on(tmp_path: Path) -> None:
    from tests.train.study.test_study import Stop

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [trial("a"), trial("b", lr=0.1)], callbacks=[Stop(9, "interrupt")]).fit()
    commits = {r["trial"] for r in read_journal(tmp_path / "run/journal").records if r["kind"] == "commit"}
    assert commits == {"a", "b"}
    result = study(tmp_path, [trial("a"), trial("b", lr=0.1)]).fit()
    assert digest(result["b"].state_dict()) == plainly(trial("b", lr=0.1))


def drained(crew: ProcessWorkerPool, until: type) -> tuple[int, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = crew.receive(1.0)
        if found is not None and isinstance(found[1], until):
            return found
    raise AssertionError("nothing came")


@pytest.mark.slow
def test_a_trial_moves_between_processes_at_a_step_boundary_bit_for_bit(tmp_path: Path) -> None:
    one = trial("a", eval_every=None)
    crew = ProcessWorkerPool(Plain(2), {"a": one}, {}, ["cpu#0", "cpu#1"], tmp_path)
    try:
        crew.send(0, Task(trial="a", fence=1, num_steps=7, fresh=True))
        assert drained(crew, TurnEnded)[1].step == 7
        crew.send(0, Release("a", 2))
        released = drained(crew, TrialReleased)[1]
        assert isinstance(released.parcel.content, FolderParcel)
        crew.send(1, Task(trial="a", fence=3, num_steps=99, parcel=released.parcel, generation=1))
        device, turned = drained(crew, TurnEnded)
        assert (device, turned.step, turned.finished) == (1, 20, True)
        from loadmaster.train.disk.checkpoints import load

        assert digest(load(tmp_path, turned.saved).model) == plainly(one)
        os.kill(crew.process_ids[0], signal.SIGKILL)
        assert "signal 9" in drained(crew, WorkerLost)[1].reason
        crew.restart(0)
        crew.send(0, Task(trial="a", fence=4, num_steps=2, fresh=True))
        assert drained(crew, StepEnded)[1].done.step == 1
    finally:
        crew.close()


def test_events_under_an_old_fencing_number_change_nothing(tmp_path: Path) -> None:
    from loadmaster.train.coordination.coordinator import Coordinator

    seen: list[Coordinator] = []

    class Late:
        """A worker thought dead speaks up in the middle."""

        def on_step(self, name: str, done: Any) -> None:
            coordinator = seen[0]
            before = coordinator.state.entries["a"].step
            stale = TurnEnded(trial="a", fence=1, step=999, finished=True)
            coordinator._handle(0, stale)
            assert coordinator.state.entries["a"].step == before

    one = study(tmp_path, [trial("a")], launcher="inline", callbacks=[Late()])
    make = one._coordinator

    def made(*given: Any, **options: Any) -> Coordinator:
        seen.append(make(*given, **options))
        return seen[0]

    one._coordinator = made  # type: ignore[method-assign]
    assert digest(one.fit()["a"].state_dict()) == plainly(trial("a"))


def test_runs_of_one_folder_never_share_a_fencing_number(tmp_path: Path) -> None:
    from tests.train.study.test_study import Stop

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [trial("a")], launcher="inline", callbacks=[Stop(9, "interrupt")]).fit()
    study(tmp_path, [trial("a")], launcher="inline").fit()
    fences = [r["fence"] for r in read_journal(tmp_path / "run/journal").records if r["kind"] == "commit"]
    runs = {fence // 10**9 for fence in fences}
    assert runs == {1, 2}
    assert len(set(fences)) == len(fences)


def test_what_cannot_be_sent_to_a_worker_is_said() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent to the workers"):
        pickle_by_value({"a": trial("a", data=lambda: [lock])})
    assert workers.__doc__

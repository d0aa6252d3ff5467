"""Worker processes: nobody is left behind, and the first cause is told."""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the runtime needs the extra [torch]")

from loadmaster.core.errors import InputError, RunError
from loadmaster.runtime.distributed.processes import WorkerError, WorkerGroup
from tests.distributed.run_workers import enter

LIMIT_S = 10.0


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@pytest.fixture(name="group")
def _group() -> Iterator[WorkerGroup]:
    made = WorkerGroup(enter, [0, 1])
    made.start()
    yield made
    made.kill()


def test_workers_answer_in_the_order_of_their_ranks_and_end(group: WorkerGroup) -> None:
    answers = group.ask("pid")
    assert [spec for _, spec in answers] == [0, 1]
    group.close()
    assert not any(_alive(pid) for pid, _ in answers)
    with pytest.raises(RunError, match="has ended"):
        group.ask("pid")


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="/proc says that a process was stopped")
@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "was stopped")]
)
def test_a_worker_that_is_killed_or_stopped_brings_all_down(
    group: WorkerGroup, how: signal.Signals, words: str
) -> None:
    pids = [pid for pid, _ in group.ask("pid")]
    threading.Timer(0.2, os.kill, (pids[1], how)).start()
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=rf"rank 1 \(process {pids[1]}\) {words}"):
        group.ask("sleep", 60)
    assert time.monotonic() - begun < LIMIT_S
    assert not any(_alive(pid) for pid in pids)


def test_a_worker_that_raises_is_told_with_its_own_traceback(group: WorkerGroup) -> None:
    pids = [pid for pid, _ in group.ask("pid")]
    with pytest.raises(WorkerError) as raised:
        group.ask("raise", 1)
    text = str(raised.value)
    assert text.startswith("rank 1 raised ValueError: the disk is full")
    assert "--- traceback of rank 1 ---" in text
    assert "run_workers.py" in text
    assert not any(_alive(pid) for pid in pids)


def test_a_worker_that_ends_by_itself_is_told_with_its_exit_code(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 .* ended with exit code 3"):
        group.ask("exit", 0)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="/proc says who is alive")
def test_workers_end_when_their_parent_is_killed() -> None:
    words = [sys.executable, "-m", "tests.distributed.run_workers"]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + LIMIT_S
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def test_workers_that_are_killed_leave_no_warnings_below_their_error() -> None:
    program = (
        "from loadmaster.runtime.distributed.processes import WorkerGroup\n"
        "from tests.distributed.run_workers import enter\n"
        "group = WorkerGroup(enter, [0])\ngroup.start()\ngroup.ask('lock')\ngroup.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "leaked" not in done.stderr


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    made = WorkerGroup(enter, [lambda: None])
    with pytest.raises(InputError, match="top level of a module"):
        made.start()
    assert not made.processes


def test_what_was_defined_in_a_notebook_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed() -> None: ...

    typed.__module__, typed.__qualname__ = "__main__", "typed"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "typed", typed, raising=False)
    monkeypatch.setattr(main, "__file__", None, raising=False)
    made = WorkerGroup(enter, [typed])
    with pytest.raises(InputError, match=r"put it in a file, e\.g\. net\.py"):
        made.start()
    assert not made.processes


def test_a_script_without_a_guard_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mp.current_process(), "_inheriting", True, raising=False
    )  # a worker imports the script
    with pytest.raises(InputError, match='if __name__ == "__main__":'):
        WorkerGroup(enter, [None]).start()

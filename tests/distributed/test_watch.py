"""Processes of torchrun look after one another: one that is lost, stopped or has failed is named."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import loadmaster as lm
from loadmaster.core.errors import FileError
from loadmaster.runtime.distributed.peers import Meeting, open_meeting
from loadmaster.runtime.distributed.transports import Waits
from loadmaster.runtime.distributed.watch import PeerWatch, sign_of

SOON_S = 5.0


@pytest.fixture(name="store")
def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def _watch(rank: int, store: dist.Store, ends: list[str], **limits: float) -> PeerWatch:
    waits = Waits(rank, 5.0, "the gradients of micro-batch 0")
    made = PeerWatch(rank, 2, waits, store, ends.append, every_s=0.02, grace_s=0.1, **limits)
    made.start()
    return made


def _wait_for_end(ends: list[str]) -> str:
    until = time.monotonic() + SOON_S
    while not ends and time.monotonic() < until:
        time.sleep(0.01)
    return ends[0] if ends else ""


@pytest.fixture(name="sleeper")
def _sleeper() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    yield made
    made.kill()
    made.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says that a process was stopped")
def test_a_process_that_was_stopped_is_named_and_killed(
    store: dist.TCPStore, sleeper: "subprocess.Popen[bytes]"
) -> None:
    ends: list[str] = []
    store.set("loadmaster/alive/1", f"7|{sign_of(sleeper.pid)}|")
    watch = _watch(0, store, ends, stopped_s=0.1, lost_s=60.0)
    time.sleep(0.3)
    assert not ends
    sleeper.send_signal(signal.SIGSTOP)
    words = "rank 1 was stopped by a signal; rank 0 waited for the gradients of micro-batch 0"
    assert _wait_for_end(ends) == words
    assert sleeper.wait(SOON_S) == -signal.SIGKILL
    watch.stop()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says that a process runs")
def test_a_process_of_this_host_that_is_only_slow_is_not_lost(
    store: dist.TCPStore, sleeper: "subprocess.Popen[bytes]"
) -> None:
    ends: list[str] = []
    store.set("loadmaster/alive/1", f"7|{sign_of(sleeper.pid)}|")
    watch = _watch(0, store, ends, lost_s=0.1)
    time.sleep(0.4)
    assert not ends
    sleeper.kill()
    sleeper.wait()
    assert _wait_for_end(ends).startswith("rank 1 has given no sign of life for 0.1 s")
    watch.stop()


def test_a_process_of_another_host_that_gives_no_sign_is_lost(store: dist.TCPStore) -> None:
    ends: list[str] = []
    store.set("loadmaster/alive/1", "7|1 2 another machine|")
    watch = _watch(0, store, ends, lost_s=0.2)
    assert _wait_for_end(ends).startswith("rank 1 has given no sign of life for 0.2 s")
    watch.stop()


def test_a_process_that_has_failed_is_named_with_what_it_raised(store: dist.TCPStore) -> None:
    ends: list[str] = []
    first, second = _watch(0, store, ends), _watch(1, store, [])
    second.stop(ValueError("my own mistake"))
    assert _wait_for_end(ends) == "rank 1 failed: ValueError: my own mistake"
    first.stop()


def test_a_process_that_has_ended_is_not_missed(store: dist.TCPStore) -> None:
    ends: list[str] = []
    first, second = _watch(0, store, ends, lost_s=0.1), _watch(1, store, [])
    second.stop()
    time.sleep(0.4)
    assert not ends
    first.stop()


def _as_torchrun_starts_it(store: dist.TCPStore, patch: pytest.MonkeyPatch) -> Meeting:
    """This process is rank 1 of 2; gives how rank 0 meets it."""
    given: dict[str, Any] = {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "GROUP_RANK": 1,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    for name, value in given.items():
        patch.setenv(name, str(value))
    return Meeting(0, 2, "127.0.0.1", store.port, 5.0, restarts=0)


def test_an_error_before_the_processes_meet_is_told_to_those_who_wait(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends: list[str] = []
    meeting = _as_torchrun_starts_it(store, monkeypatch)
    watch = _watch(0, open_meeting(meeting), ends)
    with pytest.raises(FileError, match="cannot read"):
        lm.launch(tmp_path / "plan.json")
    assert _wait_for_end(ends).startswith("rank 1 failed: FileError: cannot read")
    watch.stop()


def test_runs_of_one_script_do_not_read_what_earlier_ones_have_written(store: dist.TCPStore) -> None:
    meetings = [Meeting(rank, 2, "127.0.0.1", store.port, 5.0, restarts=0) for rank in (0, 1)]
    open_meeting(meetings[1]).set("failed", "in the first run")
    assert open_meeting(meetings[0]).check(["failed"])
    again = [open_meeting(one) for one in meetings]
    assert not again[0].check(["failed"])
    again[1].set("word", "of the second run")
    assert again[0].check(["word"])

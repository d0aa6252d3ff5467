"""Watch: the processes of a run that torchrun started look after one another.

    alive/3    "17|4242 8190 9f3c...|the gradients of micro-batch 2 from rank 4": once a second
    failed/3   what rank 3 raised, from before it has met the others until it ends

One that sees no sign of a peer for some time, or that a peer has failed, says so and ends; torchrun then ends
the others, or starts all again (`--max-restarts`). So a process that was stopped, or a host that went away,
is noticed within seconds, even while this one stands in a wait of its own. A peer of this host that runs,
however slowly, is not lost. Torchrun asks a process to end and waits 30 s for it, which one that was stopped
cannot do: those of this host are killed.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from loadmaster.core.errors import RunError
from loadmaster.core.raised import shorten_error
from loadmaster.runtime.distributed.peers import Meeting, meeting_from_environment, open_meeting
from loadmaster.runtime.distributed.transports import Waits

EXIT_CODE = 71
_STOPPED = ("T", "t")
_GONE = ("", "-", "Z", "X")  # of another host, or dead
_AWAY = 4  # turns that this process has missed: it was stopped itself, all of them perhaps
_MEETING_S = 5.0  # for the one who has failed


@dataclass(slots=True)
class _Sign:
    """What was last seen of a peer."""

    words: str
    at_s: float
    stopped_s: float | None = None


@dataclass(slots=True)
class PeerWatch:
    """A thread that gives and looks for signs of life; `end` is called where all is over."""

    rank: int
    world: int
    waits: Waits
    store: Any
    end: Callable[[str], None]
    every_s: float = 1.0
    lost_s: float = 8.0
    stopped_s: float = 2.0
    grace_s: float = 3.0  # after a peer has failed: most ranks then raise an error of their own
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _seen: dict[int, _Sign] = field(default_factory=dict)
    _failed: dict[int, float] = field(default_factory=dict)

    def start(self) -> None:
        """Begin, over a connection of its own."""
        if self.world < 2:
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            self.store = self.store.clone()
        self._thread = threading.Thread(target=self._watch, name="loadmaster watch", daemon=True)
        self._thread.start()

    def stop(self, problem: BaseException | None = None) -> None:
        """This process ends as it should, and nobody shall miss it; or it has failed, and all shall know."""
        if self._thread is None:
            return
        self._ends.set()
        self._thread.join(2 * self.every_s)
        with contextlib.suppress(RuntimeError):
            if problem is None:
                self.store.set(_alive(self.rank), "ended")
            else:
                self.store.set(_failed(self.rank), shorten_error(problem))

    def _watch(self) -> None:
        count, last = 0, time.monotonic()
        while not self._ends.wait(self.every_s):
            count += 1
            now = time.monotonic()
            if now - last > _AWAY * self.every_s:
                self._seen.clear()
            last = now
            try:
                self.store.set(_alive(self.rank), f"{count}|{sign_of(os.getpid())}|{self.waits.now}")
                words = self._look(now)
            except RuntimeError as problem:
                words = f"rank {self.rank} lost the host where the processes meet: {problem}"
            if words and not self._ends.is_set():
                self.end(words)
                return

    def _look(self, now: float) -> str:
        """Why all is over; '' while the others live."""
        failed = self._read(_failed)
        for rank in sorted(failed):
            if now - self._failed.setdefault(rank, now) > self.grace_s:
                return f"rank {rank} failed: {failed[rank]}"
        said = self._read(_alive)
        for rank in sorted(said):
            words = self._find_loss(rank, said[rank], now)
            if words:
                _kill_stopped(said.values())
                return self._describe(rank, words, said)
        return ""

    def _find_loss(self, rank: int, words: str, now: float) -> str:
        """What has become of a peer; '' where it lives, or has ended as it should."""
        seen = self._seen.get(rank)
        if seen is None or seen.words != words:
            self._seen[rank] = _Sign(words, now)
            return ""
        if words == "ended":
            return ""
        state = _state_here(words)
        if state in _STOPPED:
            seen.stopped_s = now if seen.stopped_s is None else seen.stopped_s
            if now - seen.stopped_s > self.stopped_s:
                return "was stopped by a signal"
        elif state not in _GONE:  # of this host, and only slow: many processes share its cores
            seen.at_s, seen.stopped_s = now, None
        if now - seen.at_s > self.lost_s:
            return f"has given no sign of life for {self.lost_s:g} s; it was stopped, or its host is gone"
        return ""

    def _read(self, key: Any) -> dict[int, str]:
        found = {}
        for rank in range(self.world):
            if rank != self.rank and self.store.check([key(rank)]):
                found[rank] = self.store.get(key(rank)).decode()
        return found

    def _describe(self, lost: int, words: str, said: dict[int, str]) -> str:
        lines = [f"rank {lost} {words}"]
        waiting = {rank: text.rpartition("|")[2] for rank, text in said.items() if text != "ended"}
        waiting[self.rank] = self.waits.now
        lines += [
            f"rank {rank} waited for {what}"
            for rank, what in sorted(waiting.items())
            if what and rank != lost
        ]
        return "; ".join(lines)


def end_process(words: str) -> None:
    """Say why, and end at once, whatever the other threads wait for."""
    sys.stderr.write(f"error: {words}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def failure_told(timeout_s: float = _MEETING_S) -> Iterator[None]:
    """An error before this process has met the others is told to them, who would wait for it."""
    try:
        yield
    except Exception as problem:
        with contextlib.suppress(Exception):  # the error itself is what counts
            meeting = meeting_from_environment(timeout_s)
            if meeting is not None and not dist.is_initialized():
                _tell_failure(meeting, problem)
        raise


def _tell_failure(meeting: Meeting, problem: Exception) -> None:
    if meeting.is_server or isinstance(problem, RunError):  # nobody else serves the store; or all know
        return
    open_meeting(meeting).set(_failed(meeting.rank), shorten_error(problem))


def _alive(rank: int) -> str:
    return f"loadmaster/alive/{rank}"


def _failed(rank: int) -> str:
    return f"loadmaster/failed/{rank}"


def sign_of(pid: int) -> str:
    """Number and start of a process, and of which machine and container they are."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
        return f"{pid} {_state_of(pid)[1]} {machine} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{pid} - - -"


def _kill_stopped(said: Iterable[str]) -> None:
    for words in said:
        if _state_here(words) in _STOPPED:
            with contextlib.suppress(OSError):
                os.kill(int(words.split("|")[1].split()[0]), signal.SIGKILL)


def _state_here(words: str) -> str:
    """The state of a process of this machine that has given a sign of life; '' of another's."""
    parts = words.split("|")
    given = parts[1].split() if len(parts) > 1 else []
    if len(given) != 4 or "-" in given or given != sign_of(int(given[0])).split():
        return ""
    return _state_of(int(given[0]))[0]


def _state_of(pid: int) -> tuple[str, str]:
    """State and start of a process; '-' where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        return words[0].decode(), words[19].decode()
    except (OSError, IndexError):
        return "-", "-"

"""Processes: workers of one run on this machine, started, spoken to and minded.

    parent ── command ──► worker      one pipe each; a worker answers when it is done
           ◄── answer ───             or with its own traceback, and ends
           ── lifeline ─►             closed when the parent ends, however it ends: the worker ends at once

While the parent waits for answers it looks after the workers: one that died, failed or was stopped brings all
down, and the parent raises what that one said. The first cause is told, not what followed from it: that
others lost their connection.
"""

import io
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from loadmaster.core.errors import InputError, LoadmasterError, RunError
from loadmaster.runtime.distributed.network_space import enter_space
from loadmaster.runtime.distributed.peers import leave

_GRACE_S = 1.5  # for others to say what they know
_STOPPED_S = 2.0
_POLL_S = 0.25
_END_S = 5.0  # to end by themselves
_GUARD = (
    'Workers import your script again, so what calls lm.launch must stand below `if __name__ == "__main__":`'
)

Handler = Callable[[str, Any], Any]


class WorkerError(RunError):
    """A worker process failed, died or was stopped; the message has what it said."""


@dataclass(slots=True)
class _Failure:
    rank: int
    words: str
    text: str = ""  # its traceback
    is_input: bool = False  # bad input: its message says all
    follows: bool = False  # of another failure: a lost connection


@dataclass(slots=True)
class WorkerGroup:
    """The workers of one run; `close` or `kill` ends them."""

    entry: Callable[[Any], Handler]  # in the worker: from its spec to what answers commands
    specs: Sequence[Any]
    spaces: Sequence[str | None] = ()  # network namespaces
    environments: Sequence[Mapping[str, str]] = ()  # of each worker, beside the parent's
    processes: list[Any] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _lifelines: list[Connection] = field(default_factory=list)
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _has_begun: bool = False

    def start(self) -> None:
        """Start all; returns when each has made its handler."""
        _require_guarded_script()
        _start_tracker()
        context = mp.get_context("spawn")
        blobs = [_pickle_spec(spec) for spec in self.specs]
        try:
            for rank in range(len(blobs)):
                pipe, theirs = context.Pipe()
                line, ends = context.Pipe(duplex=False)
                space = self.spaces[rank] if self.spaces else None
                more = dict(self.environments[rank]) if self.environments else {}
                process = context.Process(
                    target=_work,
                    args=(theirs, line, rank, space, more),
                    name=f"loadmaster rank {rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                line.close()
                self.processes.append(process)
                self._pipes.append(pipe)
                self._lifelines.append(ends)
            for pipe, blob in zip(self._pipes, blobs, strict=True):  # once all are on their way up
                with suppress(OSError):  # it has died; that is found below
                    pipe.send_bytes(pickle.dumps((self.entry, blob)))
            self._collect()
            self._has_begun = True
        except BaseException:
            self.kill()
            raise

    def ask(self, command: str, arguments: Sequence[Any] | Any = None, *, each: bool = False) -> list[Any]:
        """The answers of all workers; `each`: every worker has arguments of its own."""
        if not self.processes:
            raise RunError("this run has ended; start another with lm.launch")
        try:
            for rank, pipe in enumerate(self._pipes):
                given = arguments[rank] if each else arguments
                with suppress(OSError):  # it has died; that is found below
                    pipe.send_bytes(pickle.dumps((command, given)))
            return self._collect()
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Let workers end by themselves; those that do not are killed."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(("end", None)))
        until = time.monotonic() + _END_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all at once."""
        for line in self._lifelines:
            line.close()
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes, self._lifelines = [], [], []

    # -------------------------------------------------------------------------------------- minding

    def _collect(self) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[_Failure] = []
        while len(answers) < len(self.processes) and not failures:
            failures = self._look(answers, _POLL_S)
        if not failures:
            return [answers[rank] for rank in range(len(self.processes))]
        until = time.monotonic() + _GRACE_S
        heard = {one.rank for one in failures}
        while time.monotonic() < until and len(heard | set(answers)) < len(self.processes):
            for one in self._look(answers, 0.1, skip=heard):
                failures.append(one)
                heard.add(one.rank)
        raise _make_error(failures)

    def _look(self, answers: dict[int, Any], for_s: float, skip: set[int] | None = None) -> list[_Failure]:
        """What happens within some time: answers are kept, failures are given."""
        failures: list[_Failure] = []
        waiting = [r for r in range(len(self.processes)) if r not in answers and r not in (skip or ())]
        by_object: dict[Any, int] = {self._pipes[rank]: rank for rank in waiting}
        by_object |= {self.processes[rank].sentinel: rank for rank in waiting}
        happened = wait(list(by_object), timeout=for_s)
        for rank in sorted({by_object[one] for one in happened}):
            found = self._hear(rank, answers)
            if found is not None:
                failures.append(found)
        for rank in waiting:
            if rank not in answers and self._is_stopped(rank):
                pid = self.processes[rank].pid
                failures.append(_Failure(rank, f"rank {rank} (process {pid}) was stopped by a signal"))
        return failures

    def _hear(self, rank: int, answers: dict[int, Any]) -> _Failure | None:
        try:
            if self._pipes[rank].poll():
                kind, given = pickle.loads(self._pipes[rank].recv_bytes())  # from our own worker
                if kind == "done":
                    answers[rank] = given
                    return None
                failure: _Failure = given
                return failure
        except (EOFError, OSError):
            pass
        process = self.processes[rank]
        process.join(1.0)
        words = f"rank {rank} (process {process.pid}) {_describe_end(process.exitcode)}"
        if not self._has_begun and process.exitcode == 1:
            words += f" before it could start; its output is above. {_GUARD}"
        return _Failure(rank, words)

    def _is_stopped(self, rank: int) -> bool:
        """Whether a process has been stopped for some time, as by SIGSTOP or Ctrl-Z."""
        pid = self.processes[rank].pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            return False
        if state not in (b"T", b"t"):
            self._stopped_since.pop(rank, None)
            return False
        since = self._stopped_since.setdefault(rank, time.monotonic())
        return time.monotonic() - since > _STOPPED_S


def _make_error(failures: list[_Failure]) -> Exception:
    """The first cause, with its own traceback."""
    causes = [one for one in failures if not one.follows] or failures
    first = causes[0]
    others = [one for one in failures if one is not first]
    if first.is_input:
        return InputError(first.words)
    lines = [first.words]
    if first.text:
        lines += ["", f"--- traceback of rank {first.rank} ---", first.text.rstrip()]
    lines += [f"then {one.words}" for one in others]
    return WorkerError("\n".join(lines))


def _describe_end(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else str(-code)
        hint = " (the kernel does so when memory is short)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


def _start_tracker() -> None:
    """Python's tracker cleans up after workers that are killed; it shall not warn of it below their error."""
    kept = os.environ.get("PYTHONWARNINGS")
    own = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{kept},{own}" if kept else own  # the tracker reads it when it starts
    try:
        resource_tracker.ensure_running()
    finally:
        if kept is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = kept


def _require_guarded_script() -> None:
    """A worker that imports the user's script again must not start workers of its own."""
    if getattr(mp.current_process(), "_inheriting", False):
        raise InputError(f"a worker process has imported a script that starts processes. {_GUARD}")


def _pickle_spec(spec: Any) -> bytes:
    try:
        blob = pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise InputError(
            f"what workers need cannot be sent to them ({problem}); functions and classes"
            " must stand at the top"
            " level of a module: no lambda, nothing defined within a function. Under torchrun nothing is sent"
        ) from None
    if b"__main__" in blob and getattr(sys.modules["__main__"], "__file__", None) is None:
        raise InputError(
            "the model or a function was defined in a notebook or at a prompt, which workers cannot import;"
            " put it in a file, e.g. net.py, and import it from there"
        )
    return blob


# ------------------------------------------------------------------------------------ in the worker


def _work(
    pipe: Connection, lifeline: Connection, rank: int, space: str | None, environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    try:
        entry, blob = pickle.loads(pipe.recv_bytes())  # from our own parent
        if space is not None:
            enter_space(space)
        handler = entry(pickle.loads(blob))
        pipe.send_bytes(pickle.dumps(("done", None)))
        while True:
            command, arguments = pickle.loads(pipe.recv_bytes())
            if command == "end":
                break
            pipe.send_bytes(pickle.dumps(("done", handler(command, arguments))))
    except (EOFError, BrokenPipeError):
        pass
    except BaseException as problem:
        _tell_failure(pipe, rank, problem)
        os._exit(1)
    leave()


def _end_with_parent(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _tell_failure(pipe: Connection, rank: int, problem: BaseException) -> None:
    from loadmaster.runtime.distributed.transports import WaitError

    text = io.StringIO()
    traceback.print_exception(problem, file=text)
    known = isinstance(problem, LoadmasterError)
    words = str(problem) if known else f"rank {rank} raised {type(problem).__name__}: {problem}"
    lost = isinstance(problem, WaitError) or "onnection closed by peer" in str(problem)
    failure = _Failure(rank, words, text.getvalue(), is_input=isinstance(problem, InputError), follows=lost)
    with suppress(OSError):
        pipe.send_bytes(pickle.dumps(("failed", failure)))

"""One process for each device, on this machine; the coordinator talks to each over a pipe of its own.

Workers are fresh Python processes, not forks: a fork after torch has used its threads hangs. What they need
(engine, trials, plans) is sent by value with cloudpickle: trials may hold lambdas, scripts need no `__main__`
guard.

A trial moves between workers through a folder in shared memory. A worker that dies is found by the end of its
pipe and started again; workers whose coordinator dies end by the same sign.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch

from loadmaster.core.errors import InputError
from loadmaster.shards.model.loaders import confine_worker_deaths
from loadmaster.shards.spec.engine import Engine, Runner, TrialPlan
from loadmaster.train.disk.checkpoints import read_snapshot, write_snapshot
from loadmaster.train.workers.device_worker import Worker, take_snapshot
from loadmaster.train.workers.messages import (
    Event,
    Halt,
    Message,
    Parcel,
    Quit,
    Release,
    Task,
    WorkerLost,
)

USER_MODULE = "loadmaster_user_"  # what the files of studies are imported as
_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_S = 10.0
# Not `python -m`: run as __main__, the classes of this module would be other classes than those sent here.
_START = "from loadmaster.train.workers.process_workers import main; main()"


def pickle_by_value(thing: Any) -> bytes:
    """Anything a trial may hold, as bytes; what cannot be sent is said."""
    try:
        import cloudpickle
    except ImportError:
        raise InputError(
            "several devices need cloudpickle to send trials to workers; install it: pip install cloudpickle"
        ) from None
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULE):  # it was read from a file, where workers cannot import it
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(thing))
    except (TypeError, pickle.PicklingError, AttributeError) as problem:
        raise InputError(
            f"a trial cannot be sent to the workers of several devices: {problem}; make such things (open"
            " files, locks, loaders with workers) inside its functions"
        ) from None


@dataclass(frozen=True, slots=True)
class FolderParcel:
    """A trial's state in a folder in shared memory."""

    folder: str

    def close(self) -> None:
        """Free the memory."""
        shutil.rmtree(self.folder, ignore_errors=True)


class ProcessWorker(Worker):
    """A worker whose neighbours are other processes."""

    parcels: Path

    def pack(self, runner: Runner) -> Parcel:
        """Write the state into shared memory and let go of it here."""
        folder = tempfile.mkdtemp(dir=self.parcels)
        write_snapshot(Path(folder), take_snapshot(runner))
        runner.close()
        return Parcel(FolderParcel(folder))

    def unpack(self, runner: Runner, parcel: Parcel) -> None:
        """Read what another worker wrote."""
        snapshot = read_snapshot(Path(parcel.content.folder))
        runner.restore(snapshot.tensors, snapshot.facts)
        parcel.content.close()


class ProcessWorkerPool:
    """Workers as processes of this machine."""

    writes_checkpoints = True

    def __init__(
        self,
        engine: Engine,
        trials: Mapping[str, Any],
        plans: Mapping[str, TrialPlan],
        devices: Sequence[str],
        root: Path,
    ) -> None:
        base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        self._parcels = Path(tempfile.mkdtemp(prefix="loadmaster-", dir=base))
        # The user's own number: with another one a sum is added in another order.
        given = engine, dict(trials), dict(plans), torch.get_num_threads()
        self._payloads = [
            pickle_by_value((*given, name, str(root.resolve()), str(self._parcels))) for name in devices
        ]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for payload in self._payloads:
            process, pipe = _start_process(payload)
            self._processes.append(process)
            self._pipes.append(pipe)
        self._dead: deque[tuple[int, Event]] = deque()

    @property
    def process_ids(self) -> list[int]:
        """Of every device's worker."""
        return [each.pid for each in self._processes]

    def send(self, device: int, message: Message) -> None:
        """Hand a message to a worker; that it is gone is found when its answer is awaited."""
        try:
            self._pipes[device].send(message)
        except OSError:
            return

    def receive(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event of any worker."""
        ready = wait(self._pipes, timeout_s)
        for device, pipe in enumerate(self._pipes):
            if pipe in ready:
                try:
                    return device, pipe.recv()
                except (EOFError, OSError):
                    return device, WorkerLost(
                        f"the worker of device {device} ended: {self._explain_exit(device)}"
                    )
        return None

    def _explain_exit(self, device: int) -> str:
        process = self._processes[device]
        try:
            code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return "it closed its pipe"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def restart(self, device: int) -> None:
        """A new process in place of one that is gone."""
        self._pipes[device].close()
        self._processes[device].kill()
        self._processes[device].wait()
        self._processes[device], self._pipes[device] = _start_process(self._payloads[device])

    def close(self) -> None:
        """End all workers, gently first."""
        for device in range(len(self._pipes)):
            self.send(device, Quit())
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            pipe.close()
        shutil.rmtree(self._parcels, ignore_errors=True)


def _start_process(payload: bytes) -> tuple[subprocess.Popen[bytes], Connection]:
    here, there = Pipe()
    path = os.pathsep.join(each for each in sys.path if each)
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(there.fileno())],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    there.close()
    here.send_bytes(payload)
    return process, here


def serve(pipe: Connection) -> None:
    """What a worker process does until it is told to quit, or its coordinator is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which tells us
    signal.signal(signal.SIGTERM, lambda *_: hear_termination())  # so is this, but it may come to us first
    payload = pipe.recv_bytes()
    try:
        engine, trials, plans, num_threads, device, root, parcels = pickle.loads(payload)
    except Exception as problem:  # an import that fails here: the record of the study is to say so
        pipe.send(WorkerLost(f"it cannot read its trials: {type(problem).__name__}: {problem}"))
        return
    torch.set_num_threads(num_threads)
    inbox: deque[Message] = deque()
    halted = terminated = False

    def hear_termination() -> None:
        nonlocal terminated
        terminated = True

    def is_halted() -> bool:
        """Also hear what came meanwhile: a trial that is not running may be given up between two steps."""
        nonlocal halted
        while pipe.poll():
            message = pipe.recv()
            if isinstance(message, Halt):
                halted = True
            elif isinstance(message, Release) and message.trial != running:
                _answer_release(tell, worker, message)
            else:
                inbox.append(message)
        return halted or terminated

    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            pipe.send(event)

    def tell_beside(event: Event) -> None:
        with suppress(OSError):  # the coordinator is gone; the main thread finds it out
            tell(event)

    worker = ProcessWorker(engine, trials, plans, device, Path(root), halted=is_halted, tell=tell_beside)
    worker.parcels = Path(parcels)
    running = ""
    while True:
        message = inbox.popleft() if inbox else pipe.recv()
        if isinstance(message, Quit):
            worker.close()
            return
        if isinstance(message, Task):
            halted, running = False, message.trial
            for event in worker.work(message):
                tell(event)
            running = ""
        elif isinstance(message, Release):
            _answer_release(tell, worker, message)


def _answer_release(tell: Callable[[Event], None], worker: Worker, message: Release) -> None:
    released = worker.release(message)
    if released is not None:
        tell(released)


def main() -> None:
    """A worker process; its argument is the number of its end of the pipe."""
    try:
        with confine_worker_deaths():
            serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the coordinator is gone

"""A crew: the workers of all devices, wherever they run. It is sent messages and gives events."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from loadmaster.train.tasks import Event, Halt, Message, Quit, Release, Task
from loadmaster.train.worker import Worker


class Crew(Protocol):
    """Workers, one for each device."""

    writes_checkpoints: bool  # else snapshots come with the events, and the coordinator writes them

    def send(self, device: int, message: Message) -> None:
        """Hand a message to the worker of a device."""

    def receive(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event and its device; None where none came in time."""

    def restart(self, device: int) -> None:
        """A new worker in place of a lost one."""

    def close(self) -> None:
        """End all workers."""


class InlineCrew:
    """All workers in this process, taking turns step by step: one device, or many in a test."""

    writes_checkpoints = True

    def __init__(self, make_worker: Callable[[int, Callable[[], bool]], Worker], num_devices: int) -> None:
        self._make, self._halted = make_worker, False
        self._workers = [make_worker(at, self._is_halted) for at in range(num_devices)]
        self._active: deque[tuple[int, Iterator[Event]]] = deque()

    def _is_halted(self) -> bool:
        return self._halted

    def send(self, device: int, message: Message) -> None:
        """Queue a turn, or do at once what is none."""
        worker = self._workers[device]
        match message:
            case Task():
                self._halted = False
                self._active.append((device, worker.work(message)))
            case Release():
                released = worker.release(message)
                if released is not None:
                    self._active.append((device, iter([released])))
            case Halt():
                self._halted = bool(self._active)
            case Quit():
                worker.close()

    def receive(self, timeout_s: float) -> tuple[int, Event] | None:
        """Let the next worker in the circle come to its next event."""
        while self._active:
            device, events = self._active.popleft()
            event = next(events, None)
            if event is not None:
                self._active.append((device, events))
                return device, event
        return None

    def restart(self, device: int) -> None:
        """A new worker on the same device."""
        self._workers[device].close()
        self._workers[device] = self._make(device, self._is_halted)

    def close(self) -> None:
        """Let go of every trial."""
        self._active.clear()
        for worker in self._workers:
            worker.close()

"""A pool of workers: those of all devices, wherever they run. It is sent messages and gives events."""

import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from loadmaster.train.workers.device_worker import Worker
from loadmaster.train.workers.messages import Event, Halt, Message, Quit, Release, Task


class WorkerPool(Protocol):
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


class InlineWorkerPool:
    """All workers in this process, taking turns step by step: one device, or many in a test."""

    writes_checkpoints = True

    def __init__(self, make_worker: Callable[..., Worker], num_devices: int) -> None:
        self._make, self._halted = make_worker, False  # of (number, halted=, tell=)
        self.is_ending: Callable[[], bool] = lambda: False  # heard even while a worker is at work
        self._beside: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()  # from threads that write
        self._workers = [self._make_worker(at) for at in range(num_devices)]
        self._active: deque[tuple[int, Iterator[Event]]] = deque()

    def _make_worker(self, at: int) -> Worker:
        return self._make(at, halted=self._is_halted, tell=lambda event: self._beside.put((at, event)))

    def _is_halted(self) -> bool:
        return self._halted or self.is_ending()

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
        """What was written meanwhile, else let the next worker in the circle come to its next event."""
        if not self._beside.empty():
            return self._beside.get()
        while self._active:
            device, events = self._active.popleft()
            event = next(events, None)
            if event is not None:
                self._active.append((device, events))
                return device, event
        if any(worker.is_writing for worker in self._workers):
            with suppress(queue.Empty):
                return self._beside.get(timeout=timeout_s)
        return None if self._beside.empty() else self._beside.get()

    def restart(self, device: int) -> None:
        """A new worker on the same device."""
        self._workers[device].close()
        self._workers[device] = self._make_worker(device)

    def close(self) -> None:
        """Let go of every trial."""
        self._active.clear()
        for worker in self._workers:
            worker.close()

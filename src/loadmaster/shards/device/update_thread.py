"""The thread that runs optimizer steps on the host while the device continues.

Of the updates whose gradients have landed it takes the one whose weights are needed soonest: during the
backward pass that is the newest gradient, and whatever is left over when the next forward pass begins is then
done in the order it is asked for.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadmaster.shards.device.cpu_device import HostEvent
from loadmaster.shards.device.streams import Event

_POLL_S = 5e-4  # each look takes Python's lock from the thread that issues units
_MOST_SPANS = 10_000  # that nobody asked for


@dataclass(order=True, slots=True)
class _Task:
    urgency: tuple[int, ...]
    landed: Event | None = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    finished: HostEvent = field(compare=False)
    label: str = field(compare=False)


class HostUpdater:
    """One worker; its results are the same in whatever order it works."""

    def __init__(self) -> None:
        self._tasks: list[_Task] = []
        self._changed = threading.Condition()
        self._closed = False
        self.busy_s = 0.0
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_MOST_SPANS)
        self._thread: threading.Thread | None = None
        self._users: set[int] = set()

    def join(self, user: object) -> None:
        """One more trial whose updates come here."""
        self._users.add(id(user))

    def leave(self, user: object) -> None:
        """One less; with the last the thread ends."""
        self._users.discard(id(user))
        if not self._users:
            self.close()

    def submit(
        self, work: Callable[[], Any], *, landed: Event | None, urgency: tuple[int, ...], label: str = ""
    ) -> HostEvent:
        """Run `work` once `landed` is reached; lower urgency numbers first."""
        task = _Task(urgency, landed, work, HostEvent(), label)
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
        self._start()
        return task.finished

    def _start(self) -> None:
        """The thread begins with the first task; whoever forgets to close must not die with it running."""
        if self._thread is None:
            self._closed = False
            self._thread = threading.Thread(target=self._serve, daemon=True, name="host-updater")
            self._thread.start()
            atexit.register(self.close)

    def spans(self) -> list[tuple[str, str, float, float]]:
        """What has been done since last asked."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def close(self) -> None:
        """Finish what is there, then stop; a later task starts again."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _take(self) -> _Task | None:
        """The most urgent task that can run, None = closed and nothing left."""
        with self._changed:
            while True:
                ready = [task for task in self._tasks if task.landed is None or task.landed.done()]
                if ready:
                    task = min(ready)
                    self._tasks.remove(task)
                    return task
                if self._closed and not self._tasks:
                    return None
                self._changed.wait(_POLL_S if self._tasks else None)

    def _serve(self) -> None:
        while (task := self._take()) is not None:
            began = time.perf_counter()
            try:
                if task.landed is not None:
                    task.landed.wait()
                task.work()
            except BaseException as error:
                task.finished.set(error)
            else:
                task.finished.set()
            ended = time.perf_counter()
            self.busy_s += ended - began
            self._spans.append(("host", task.label, began, ended))

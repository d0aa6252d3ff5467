"""A device made of host memory and threads: every byte is counted, and copies can be slow on purpose.

Copies run on two threads of their own and compute on the caller's, so a missing wait becomes a wrong number.
`copy_bytes_per_s` stretches each copy to the time a bus would take; `jitter_s` delays each by a random time.
"""

import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.shards.device.arena import Arena
from loadmaster.shards.device.streams import Copy, Event

_LONGEST_WAIT_S = 300.0


class HostEvent:
    """A point a thread sets."""

    def __init__(self, *, reached: bool = False) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None
        if reached:
            self._flag.set()

    def done(self) -> bool:
        """Whether it has been reached."""
        return self._flag.is_set()

    def set(self, error: BaseException | None = None) -> None:
        """Reach it, or say why it never will be."""
        self.error = error
        self._flag.set()

    def wait(self) -> None:
        """Block until it has been reached."""
        if not self._flag.wait(_LONGEST_WAIT_S):
            raise RunError(f"a copy or update did not end within {_LONGEST_WAIT_S:.0f} s")
        if self.error is not None:
            raise self.error


class CpuDevice:
    """The simulated device."""

    def __init__(
        self,
        name: str = "cpu",
        *,
        cap_bytes: int,
        copy_bytes_per_s: float | None = None,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.tenants: list[Any] = []
        self.slots: Any = None
        self.tracing = True
        self.rehearses = False  # every byte is booked
        self.torch_device = torch.device("cpu")
        self.arena = Arena(name, cap_bytes, lambda size: torch.empty(size, dtype=torch.uint8))
        self._rate, self._jitter_s = copy_bytes_per_s, jitter_s
        self._random = random.Random(seed)
        self._spans: list[tuple[str, str, float, float]] = []
        self._latest: dict[str, list[Event]] = {}  # by stream: two, newest first
        self._queues: dict[str, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        for stream in ("up0", "up1", "down0", "down1"):
            self._queues[stream] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._serve, args=(stream,), daemon=True))
            self._threads[-1].start()

    def pin(self, memory: torch.Tensor) -> None:
        """Nothing to do: copies are made by threads."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Nothing to do."""

    def up(self, copies: list[Copy], *, after: Iterable[Event | None], label: str, lane: int = 0) -> Event:
        """Copies from host to device."""
        return self._send(f"up{lane}", copies, after, label)

    def down(self, copies: list[Copy], *, after: Iterable[Event | None], label: str, lane: int = 0) -> Event:
        """Copies from device to host."""
        return self._send(f"down{lane}", copies, after, label)

    def latest(self, way: str, *, back: int = 0) -> Event | None:
        """The newest copy of the first lane, or the one before it."""
        return next(iter(self._latest.get(f"{way}0", [])[back:]), None)

    def hold(self, *events: Event | None) -> None:
        """Compute is this thread: it waits."""
        for event in events:
            if event is not None:
                event.wait()

    def mark(self, *, aside: bool = False) -> Event:
        """Compute is this thread: what it was told is done."""
        return HostEvent(reached=True)

    def aside(self, *events: Event | None) -> AbstractContextManager[Any]:
        """Compute is this thread: it waits."""
        self.hold(*events)
        return nullcontext()

    def computing(self) -> AbstractContextManager[Any]:
        """Nothing to enter."""
        return nullcontext()

    @contextmanager
    def span(self, kind: str, label: str) -> Iterator[None]:
        """Note a piece of compute."""
        began = time.perf_counter()
        yield
        self._spans.append((kind, label, began, time.perf_counter()))

    def gather(self) -> None:
        """Spans are noted with their times."""

    def spans(self, *, gathered: bool = False) -> list[tuple[str, str, float, float]]:
        """What has been done since last asked."""
        taken, self._spans = self._spans, []
        return taken

    def release(self) -> None:
        """Nothing to do."""

    def num_retries(self) -> int:
        """Never."""
        return 0

    def close(self) -> None:
        """Stop the streams, once what they were told is done."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(_LONGEST_WAIT_S)

    def _send(self, stream: str, copies: list[Copy], after: Iterable[Event | None], label: str) -> Event:
        reached = HostEvent()
        self._queues[stream].put((copies, [event for event in after if event is not None], label, reached))
        self._latest[stream] = [reached, *self._latest.get(stream, [])[:1]]
        return reached

    def _serve(self, stream: str) -> None:
        while (job := self._queues[stream].get()) is not None:
            copies, after, label, reached = job
            try:
                for event in after:
                    event.wait()
                self._copy(stream, copies, label)
            except BaseException as error:
                reached.set(error)
            else:
                reached.set()

    def _copy(self, stream: str, copies: list[Copy], label: str) -> None:
        began = time.perf_counter()
        if self._jitter_s:
            time.sleep(self._random.random() * self._jitter_s)
        if self._rate:  # the bytes arrive at the end: who did not wait reads old ones
            time.sleep(sum(copy.source.numel() * copy.source.element_size() for copy in copies) / self._rate)
        for copy in copies:
            copy.target.copy_(copy.source)
        self._spans.append((stream.rstrip("01"), label, began, time.perf_counter()))

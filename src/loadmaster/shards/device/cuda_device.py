"""An NVIDIA GPU: pinned slabs, three streams, events, and a cap on everything the process may take of it.

The arena's regions and the activations both come from the framework's allocator, whose own limit is set to
the cap: what the arena did not foresee raises there. So the cap is on what that allocator reserves: regions,
activations, workspaces of libraries and what is scattered between them. The driver's context (about half a
GiB) stands beside it, as it does in the figures others give.
"""

import gc
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.shards.device.arena import Arena
from loadmaster.shards.device.cpu_device import HostEvent
from loadmaster.shards.device.streams import Copy, Event

_PAGE_BYTES = 4096


class CudaEvent:
    """A point in a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether it has been reached."""
        return self.event.query()

    def wait(self) -> None:
        """Block until it has been reached."""
        self.event.synchronize()


class CudaDevice:
    """One GPU of this process."""

    def __init__(self, name: str = "cuda:0", *, cap_bytes: int, trace: bool = False) -> None:
        self.name = name
        self.tenants: list[Any] = []
        self.slots: Any = None
        self.tracing = trace  # may be changed between steps: events take time to record and to read
        self.rehearses = True  # libraries and the allocator take what no plan sees
        self.torch_device = torch.device(name)
        index = self.torch_device.index or 0
        torch.cuda.set_device(index)
        total = torch.cuda.get_device_properties(index).total_memory
        _clear_workspaces()
        torch.cuda.empty_cache()
        _use_expandable_segments()
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), index)
        self.arena = Arena(name, cap_bytes, self._allocate)
        self._compute = torch.cuda.Stream(index)
        self._aside = torch.cuda.Stream(index)
        self._up = [torch.cuda.Stream(index) for _ in range(2)]  # weights; optimizer state
        self._down = [torch.cuda.Stream(index) for _ in range(2)]  # gradients; optimizer state
        self._latest: dict[str, list[Event]] = {"up": [], "down": []}  # of the first lane: two, newest first
        self._marks: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._gathered: list[tuple[str, str, float, float]] = []
        self._began = self._record_timed_event(self._compute)
        self._began_s = time.perf_counter()
        self._pinned: set[int] = set()

    def pin(self, memory: torch.Tensor) -> None:
        """Register host memory with the driver, once."""
        if memory.data_ptr() in self._pinned:
            return
        memory[::_PAGE_BYTES].add_(0)  # several threads take the pages; the driver would take them in one
        code = torch.cuda.cudart().cudaHostRegister(
            memory.data_ptr(), memory.numel() * memory.element_size(), 1
        )
        if int(code) != 0:
            raise RunError(
                f"{memory.numel() * memory.element_size()} bytes of host memory cannot be pinned (CUDA error"
                f" {int(code)}); raise the limit on locked memory (ulimit -l) or lower host_cap"
            )
        self._pinned.add(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`."""
        if memory.data_ptr() in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
            self._pinned.discard(memory.data_ptr())

    def up(self, copies: list[Copy], *, after: Iterable[Event | None], label: str, lane: int = 0) -> Event:
        """Copies from host to device."""
        return self._send("up", self._up, lane, copies, after, label)

    def down(self, copies: list[Copy], *, after: Iterable[Event | None], label: str, lane: int = 0) -> Event:
        """Copies from device to host."""
        return self._send("down", self._down, lane, copies, after, label)

    def latest(self, way: str, *, back: int = 0) -> Event | None:
        """The newest copy of the first lane, or the one before it."""
        return next(iter(self._latest[way][back:]), None)

    def hold(self, *events: Event | None) -> None:
        """The compute stream waits for the events."""
        self._wait(self._compute, events)

    def mark(self, *, aside: bool = False) -> Event:
        """The point the compute stream (or the one aside) has been told to reach."""
        event = torch.cuda.Event()
        event.record(self._aside if aside else self._compute)
        return CudaEvent(event)

    def aside(self, *events: Event | None) -> AbstractContextManager[Any]:
        """A second compute stream, after the events."""
        self._wait(self._aside, events)
        return torch.cuda.stream(self._aside)

    def computing(self) -> AbstractContextManager[Any]:
        """Units run on the compute stream."""
        return torch.cuda.stream(self._compute)

    @contextmanager
    def span(self, kind: str, label: str) -> Iterator[None]:
        """Note a piece of compute."""
        if not self.tracing:
            yield
            return
        first = self._record_timed_event(self._compute)
        yield
        self._marks.append((kind, label, first, self._record_timed_event(self._compute)))

    def gather(self) -> None:
        """Read the clocks of what is done; what is still under way is read the next time."""
        if not self.tracing or not self._began.query():
            return
        reached = [(mark, mark[3].query()) for mark in self._marks]
        self._marks = [mark for mark, done in reached if not done]
        self._gathered += [
            (kind, label, *(self._began_s + self._began.elapsed_time(event) / 1e3 for event in (first, last)))
            for (kind, label, first, last), done in reached
            if done
        ]

    def spans(self, *, gathered: bool = False) -> list[tuple[str, str, float, float]]:
        """What has been done since last asked, or was gathered since."""
        if not gathered:
            self.gather()
        found, self._gathered = self._gathered, []
        return found

    def release(self) -> None:
        """Give cached memory back."""
        gc.collect()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def num_retries(self) -> int:
        """How often the allocator had to give memory back before it could give any."""
        return int(torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def close(self) -> None:
        """Wait for what is under way, unpin, give memory back."""
        torch.cuda.synchronize(self.torch_device)
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        _clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    def _allocate(self, size: int) -> torch.Tensor:
        with torch.cuda.stream(self._compute):
            return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def _send(
        self,
        way: str,
        lanes: list[torch.cuda.Stream],
        lane: int,
        copies: list[Copy],
        after: Iterable[Event | None],
        label: str,
    ) -> Event:
        stream = lanes[lane]
        self._wait(stream, after)
        first = self._record_timed_event(stream) if self.tracing else None
        with torch.cuda.stream(stream):
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
        event = torch.cuda.Event(enable_timing=self.tracing)
        event.record(stream)
        if first is not None:
            self._marks.append((way, label, first, event))
        sent = CudaEvent(event)
        if lane == 0:
            self._latest[way] = [sent, *self._latest[way][:1]]
        return sent

    @staticmethod
    def _wait(stream: torch.cuda.Stream, events: Iterable[Event | None]) -> None:
        for event in events:
            if isinstance(event, CudaEvent):
                stream.wait_event(event.event)
            elif isinstance(event, HostEvent):
                event.wait()

    @staticmethod
    def _record_timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def _clear_workspaces() -> None:
    """Libraries keep work space for every stream there was, those of devices that are closed too."""
    inner: Any = torch._C
    forget = getattr(inner, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


def _use_expandable_segments() -> None:
    """Segments that grow, unless the user chose otherwise: what is freed can serve a larger request."""
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return
    inner: Any = torch._C
    change = getattr(inner, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(inner, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
    if change is not None:
        with suppress(RuntimeError):  # without it more is scattered, which the rehearsal sees
            change("expandable_segments:True")

"""Carriers: how the copy of a spilled weight reaches a device, and how its gradient returns.

    upload stream    ──copy──●                    ▲ waits for the reader before the memory is used again
    reader's stream          └──op──●─────────────┘
    download stream                 └──copy──●    the host waits for this one alone

Copies live in the memory pool of the upload stream: once that stream waits for the reader, the next upload
may take the memory, in the order of the stream, and the host never has to wait for it. Gradients are kept
until a later one is on its way; then the reader's stream waits for the oldest, and its memory is free.

Nothing here is marked with `record_stream`: such blocks come back only when the device has come to them, and
a host that runs ahead would take new ones for every weight. So what is allocated at any time is what Python
holds, however far the host is ahead, and tests on the CPU can count it.
"""

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from loadmaster.runtime.transport.copies import allocate_like, copy_to_device

_HOST = torch.device("cpu")


class PendingCopy(NamedTuple):
    """A copy on its way; `done` is an event, or None where it is there."""

    tensor: torch.Tensor
    done: Any


class Carrier(Protocol):
    """Carries weights to one device, and gradients from it."""

    def up(self, weight: torch.Tensor, after: Any = None) -> PendingCopy:
        """A copy on the device, on its way; `after` is the event of what is there only then."""

    def use(self, sent: PendingCopy) -> None:
        """What is issued from now on may read the copy."""

    def free(self, sent: PendingCopy) -> None:
        """Nothing that is issued from now on reads the copy: its memory may be taken."""

    def down(self, grad: torch.Tensor) -> PendingCopy:
        """A gradient's copy at home, on its way."""

    def settle(self) -> None:
        """Wait until no weight is read any more by a copy on its way: the host may write them."""


class DirectCarrier:
    """Copies that are there at once, or that wait for themselves."""

    def __init__(self, where: torch.device, home: torch.device) -> None:
        self._where, self._home = where, home

    def up(self, weight: torch.Tensor, after: Any = None) -> PendingCopy:
        """A copy."""
        return PendingCopy(copy_to_device(weight, self._where), None)

    def use(self, sent: PendingCopy) -> None:
        """It is there."""

    def free(self, sent: PendingCopy) -> None:
        """Torch frees it in the order of the one stream."""

    def down(self, grad: torch.Tensor) -> PendingCopy:
        """A copy."""
        return PendingCopy(copy_to_device(grad, self._home), None)

    def settle(self) -> None:
        """Nothing is on its way."""


class PendingGradients:
    """Gradients on their way down, oldest first: how many may be kept on the device."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[torch.Tensor, Any]] = deque()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    @property
    def is_over_limit(self) -> bool:
        """Whether the oldest must be let go of; the newest never is."""
        return len(self._kept) > 1 and sum(grad.nbytes for grad, _ in self._kept) > self._limit_bytes

    def add(self, grad: torch.Tensor, done: Any) -> None:
        """Keep a gradient; `done` is the event of its copy."""
        self._kept.append((grad, done))

    @property
    def oldest(self) -> Any:
        """The event to wait for before the next one is let go of."""
        return self._kept[0][1]

    def pop(self) -> None:
        """Let go of the oldest."""
        self._kept.popleft()


class StreamCarrier:
    """Copies between the host and one GPU, on two streams beside its ops."""

    def __init__(self, where: torch.device, going_bytes: int) -> None:
        self._where = where
        self._up, self._down = torch.cuda.Stream(where), torch.cuda.Stream(where)
        self._reader = torch.cuda.current_stream(where)
        self._last: torch.cuda.Event | None = None
        self._going = PendingGradients(going_bytes)

    def up(self, weight: torch.Tensor, after: Any = None) -> PendingCopy:
        """Pinned weights are read where they are, others through pinned memory."""
        source = weight.detach()
        if not source.is_pinned():
            source = allocate_like(weight, _HOST, True)
            source.copy_(weight.detach())
        with torch.cuda.stream(self._up):
            if after is not None:
                self._up.wait_event(after)
            made = allocate_like(source, self._where)
            made.copy_(source, non_blocking=True)
            self._last = torch.cuda.Event()
            self._last.record(self._up)
        return PendingCopy(made, self._last)

    def use(self, sent: PendingCopy) -> None:
        """The reader's stream waits for the copy."""
        self._reader = torch.cuda.current_stream(self._where)
        self._reader.wait_event(sent.done)

    def free(self, sent: PendingCopy) -> None:
        """The next upload waits for the reader."""
        self._up.wait_stream(self._reader)

    def down(self, grad: torch.Tensor) -> PendingCopy:
        """The gradient is kept until it is there, or the reader's stream has waited for it."""
        if grad.layout != torch.strided:
            return PendingCopy(grad.detach().to(_HOST), None)
        now = torch.cuda.current_stream(self._where)
        made = allocate_like(grad, _HOST, True)
        self._down.wait_stream(now)
        with torch.cuda.stream(self._down):
            made.copy_(grad.detach(), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._down)
        self._going.add(grad.detach(), done)
        while self._going.is_over_limit:
            now.wait_event(self._going.oldest)
            self._going.pop()
        return PendingCopy(made, done)

    def settle(self) -> None:
        """The host waits for the last upload, and lets go of gradients that are down."""
        if self._last is not None:
            self._last.synchronize()
        while self._going:
            self._going.oldest.synchronize()
            self._going.pop()


def make_carrier(where: torch.device, home: torch.device, going_bytes: int) -> Carrier:
    """What carries between a device and the home of weights."""
    if where.type == "cuda" and home.type == "cpu":
        return StreamCarrier(where, going_bytes)
    return DirectCarrier(where, home)

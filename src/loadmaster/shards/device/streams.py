"""What an executor asks of a device: memory, three streams, events. Order comes from events alone.

    H2D : wait(slot free); wait(host ready); copy slab -> slot; ready event
    COMP: wait(ready); run unit; done event
    D2H : wait(done); copy slot -> slab; landed event

Each way has two lanes: weights and gradients must not queue behind optimizer state that waits for its turn.
Nor may state that is ready keep them off the bus, for a GPU's copy engine stays with a stream as long as that
has work: state goes after copies of the first lane that were sent before it (`latest`).

The compute stream is the caller's own thread on a CPU and the current stream on a GPU.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loadmaster.shards.device.arena import Arena


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether it has been reached."""
        ...

    def wait(self) -> None:
        """Block this thread until it has been reached."""
        ...


@dataclass(frozen=True, slots=True)
class Copy:
    """One flat copy."""

    target: torch.Tensor
    source: torch.Tensor


class Device(Protocol):
    """One device of one process."""

    name: str
    tracing: bool  # whether spans are noted
    torch_device: torch.device
    arena: Arena
    tenants: list[Any]  # runners that stand there, longest first
    slots: Any  # slots and rings they share, None until first asked for
    rehearses: bool  # whether a trial's first step there is tried before anything is changed

    def pin(self, memory: torch.Tensor) -> None:
        """Register host memory, so that copies from and to it run beside compute."""
        ...

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`."""
        ...

    def up(self, copies: list[Copy], *, after: Iterable[Event | None], label: str, lane: int = 0) -> Event:
        """Copies from host to device, on their own stream."""
        ...

    def down(self, copies: list[Copy], *, after: Iterable[Event | None], label: str, lane: int = 0) -> Event:
        """Copies from device to host, on their own stream."""
        ...

    def latest(self, way: str, *, back: int = 0) -> Event | None:
        """The newest copy of the first lane, 'up' or 'down', or the one before it; None: there was none."""
        ...

    def hold(self, *events: Event | None) -> None:
        """Compute waits for the events."""
        ...

    def mark(self, *, aside: bool = False) -> Event:
        """The point compute (or what runs aside of it) has been told to reach."""
        ...

    def aside(self, *events: Event | None) -> AbstractContextManager[Any]:
        """Compute beside the units, after the events: an update that waits must not hold units up."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which units run."""
        ...

    def span(self, kind: str, label: str) -> AbstractContextManager[Any]:
        """Note a piece of compute for the trace."""
        ...

    def gather(self) -> None:
        """Read the clocks of what is done, which takes milliseconds: where compute has enough to do."""
        ...

    def spans(self, *, gathered: bool = False) -> list[tuple[str, str, float, float]]:
        """(stream, label, start, end) of what has been done since last asked, or was gathered since."""
        ...

    def release(self) -> None:
        """Give memory nobody uses back."""
        ...

    def num_retries(self) -> int:
        """How often memory had to be given back for want of room: each time everything stands still."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...

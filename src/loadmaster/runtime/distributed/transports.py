"""Transports: bytes from one process to another, and sums over processes.

    gloo      memory of the host; also where processes share one GPU: copied to pinned memory and back
    nccl      from GPU to GPU, where every process of the plan has one of its own

NCCL refuses two ranks on one GPU, and gloo takes tensors of the host alone, so a tensor of a GPU that is
shared goes over the host. Every wait has a time-out, and says who waits for whom.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from loadmaster.core.errors import RunError

GLOO, NCCL = "gloo", "nccl"


class WaitError(RunError):
    """Another process did not do what this one waits for."""


@dataclass(slots=True)
class Waits:
    """What this process waits for now; a watcher reads it from another thread."""

    rank: int
    timeout_s: float
    now: str = ""

    def wait(self, work: Any, what: str) -> None:
        """Until a transfer is done; `what` is said where it is not."""
        self.now = what
        try:
            done = work.wait(timeout=datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as problem:
            raise WaitError(self._describe(what, str(problem))) from problem
        if done is False:
            raise WaitError(self._describe(what, "timed out"))
        self.now = ""

    def gather(self, value: Any, what: str) -> list[Any]:
        """What all processes give, in the order of their ranks."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        with self.told(what):
            dist.all_gather_object(found, value)
        return found

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """What torch itself waits for in here is said where it does not come."""
        self.now = what
        try:
            yield
        except RuntimeError as problem:
            raise WaitError(self._describe(what, str(problem))) from problem
        self.now = ""

    def _describe(self, what: str, problem: str) -> str:
        lower = problem.lower()
        if "time" in lower and "out" in lower:
            return (
                f"rank {self.rank} waited {self.timeout_s:g} s for {what}; look at what"
                " that rank did meanwhile, or"
                " give more time (--timeout)"
            )
        first = problem.splitlines()[0] if problem else "the connection was lost"
        return f"rank {self.rank} lost the connection while it waited for {what}: {first[:200]}"


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> torch.Tensor:
        """Until it is done; gives the bytes that were sent or received."""
        ...


@dataclass(slots=True)
class _Transfer:
    work: Any
    data: torch.Tensor
    waits: Waits
    what: str
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    _made: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._made is None:
            self.waits.wait(self.work, self.what)
            self._made = self.data if self.finish is None else self.finish(self.data)
        return self._made


class Transport(Protocol):
    """Moves bytes between the ranks of a run."""

    def send(self, data: torch.Tensor, to: int, tag: int, what: str) -> Pending:
        """Begin to send."""
        ...

    def receive(self, num_bytes: int, source: int, tag: int, what: str) -> Pending:
        """Begin to receive on this process's device."""
        ...

    def sum(self, tensors: Sequence[torch.Tensor], group: Any, what: str) -> None:
        """Add up tensors over a group, in place."""
        ...


@dataclass(slots=True)
class HostTransport:
    """Over the host's memory; with a GPU through pinned buffers."""

    where: torch.device
    waits: Waits
    pinned: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def send(self, data: torch.Tensor, to: int, tag: int, what: str) -> Pending:
        """Begin to send; of a GPU once the copy to the host is done."""
        if not data.is_cuda:
            return _Transfer(dist.isend(data, to, tag=tag), data, self.waits, what)
        staged = self._take(data.numel())
        staged.copy_(data, non_blocking=True)
        torch.cuda.current_stream(data.device).synchronize()
        return _Transfer(dist.isend(staged, to, tag=tag), staged, self.waits, what, self._give_back)

    def receive(self, num_bytes: int, source: int, tag: int, what: str) -> Pending:
        """Begin to receive."""
        if self.where.type != "cuda":
            data = torch.empty(num_bytes, dtype=torch.uint8)
            return _Transfer(dist.irecv(data, source, tag=tag), data, self.waits, what)
        staged = self._take(num_bytes)
        return _Transfer(dist.irecv(staged, source, tag=tag), staged, self.waits, what, self._upload)

    def sum(self, tensors: Sequence[torch.Tensor], group: Any, what: str) -> None:
        """One message for all tensors of a type."""
        for some in _by_type(tensors):
            flat = torch.cat([one.detach().reshape(-1).cpu() for one in some])
            self.waits.wait(dist.all_reduce(flat, group=group, async_op=True), what)
            at = 0
            for one in some:
                one.copy_(flat[at : at + one.numel()].reshape(one.shape))
                at += one.numel()

    def _take(self, num_bytes: int) -> torch.Tensor:
        free = self.pinned.setdefault(num_bytes, [])
        return free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _give_back(self, staged: torch.Tensor) -> torch.Tensor:
        self.pinned[staged.numel()].append(staged)
        return staged

    def _upload(self, staged: torch.Tensor) -> torch.Tensor:
        made = staged.to(self.where, non_blocking=True)
        torch.cuda.current_stream(self.where).synchronize()
        self._give_back(staged)
        return made


@dataclass(slots=True)
class NcclTransport:
    """From GPU to GPU; each direction has a communicator of its own, so that neither waits for the other."""

    where: torch.device
    waits: Waits
    up: Any  # group of transfers to higher ranks
    down: Any

    def send(self, data: torch.Tensor, to: int, tag: int, what: str) -> Pending:
        """Begin to send; NCCL has no tags: transfers of a direction arrive in the order of the plan."""
        group = self.up if to > self.waits.rank else self.down
        return _Transfer(dist.isend(data.to(self.where), to, group=group), data, self.waits, what)

    def receive(self, num_bytes: int, source: int, tag: int, what: str) -> Pending:
        """Begin to receive."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.where)
        group = self.down if source > self.waits.rank else self.up
        return _Transfer(dist.irecv(data, source, group=group), data, self.waits, what)

    def sum(self, tensors: Sequence[torch.Tensor], group: Any, what: str) -> None:
        """On the GPU."""
        for some in _by_type(tensors):
            flat = torch.cat([one.detach().reshape(-1) for one in some])
            self.waits.wait(dist.all_reduce(flat, group=group, async_op=True), what)
            at = 0
            for one in some:
                one.copy_(flat[at : at + one.numel()].reshape(one.shape))
                at += one.numel()


def _by_type(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for one in tensors:
        found.setdefault(one.dtype, []).append(one)
    return list(found.values())


def choose_backend(devices: Sequence[torch.device], hosts: Sequence[str]) -> str:
    """NCCL where every process has a GPU of its own, else gloo."""
    own = {(host, str(device)) for host, device in zip(hosts, devices, strict=True)}
    each = all(device.type == "cuda" for device in devices) and len(own) == len(devices)
    return NCCL if each and len(devices) > 1 and dist.is_nccl_available() else GLOO

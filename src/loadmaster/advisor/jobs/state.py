"""The state of a cluster at one moment: which devices there are, when each comes free, and free blocks of
n devices.

Two layouts: devices on hosts (one host where possible, else spread over hosts), or a list of named blocks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.jobs.curve import HOST, SPREAD
from loadmaster.advisor.jobs.job import Job
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Block:
    """Devices that a job may take together."""

    devices: tuple[int, ...]
    kind: str
    form: str


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The devices of a cluster."""

    name: tuple[str, ...]  # [D]
    host: NDArray[np.int64]  # [D]
    kind: NDArray[np.int64]  # [D] index into kinds
    kinds: tuple[str, ...]
    blocks: Mapping[int, tuple[Block, ...]] = field(
        default_factory=dict
    )  # by degree, in the order they are tried
    mask_by_count: bool = False  # a degree is offered where enough devices are free, block or not (published)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class ClusterState:
    """A layout and when each of its devices comes free."""

    layout: Layout
    free_at_s: NDArray[np.float64]  # [D] <= now_s: free; inf: not available
    now_s: float = 0.0
    price: float = 0.0  # value of a device second, as other jobs would pay it
    period_s: float = 0.0  # jobs arrive at multiples of it, if they do

    def __post_init__(self) -> None:
        """One time for every device."""
        if len(self.free_at_s) != self.layout.num_devices:
            raise InputError(
                f"{len(self.free_at_s)} times for {self.layout.num_devices} devices; give one for each"
            )
        if np.isnan(self.free_at_s).any() or (self.free_at_s < 0).any():
            raise InputError(
                "the time at which a device becomes free is negative or not a number; give seconds >= 0"
            )
        if not math.isfinite(self.now_s):
            raise InputError(f"the clock is at {self.now_s!r}; give seconds")

    @property
    def is_free(self) -> NDArray[np.bool_]:
        """[D]."""
        return self.free_at_s <= self.now_s + 1e-7

    @property
    def num_free(self) -> int:
        """Free devices."""
        return int(self.is_free.sum())

    def free_blocks(self, count: int) -> Iterator[Block]:
        """Free blocks of so many devices, in the order they are tried."""
        free = self.is_free
        if self.layout.blocks:
            yield from (b for b in self.layout.blocks.get(count, ()) if all(free[d] for d in b.devices))
            return
        for kind in range(len(self.layout.kinds)):
            yield from self._host_blocks(count, kind, free)

    def _host_blocks(self, count: int, kind: int, free: NDArray[np.bool_]) -> Iterator[Block]:
        """The tightest host with room, and the fewest hosts that have room together."""
        usable = np.flatnonzero(free & (self.layout.kind == kind))
        if len(usable) < count:
            return
        hosts = self.layout.host[usable]
        counts = np.bincount(hosts)
        ids = np.flatnonzero(counts)
        room = counts[ids]
        name = self.layout.kinds[kind]
        inside = np.flatnonzero(room >= count)
        if len(inside):
            tightest = ids[inside[np.argmin(room[inside])]]
            yield Block(tuple(int(d) for d in usable[hosts == tightest][:count]), name, HOST)
            return
        fullest = np.argsort(-room, kind="stable")
        rank = np.empty(len(ids), np.int64)
        rank[fullest] = np.arange(len(ids))
        order = np.argsort(rank[np.searchsorted(ids, hosts)], kind="stable")
        yield Block(tuple(int(d) for d in usable[order][:count]), name, SPREAD)

    def offers(self, count: int) -> bool:
        """Whether the mask offers a number of devices."""
        if self.layout.mask_by_count:
            return count in self.layout.blocks and count <= self.num_free
        return next(self.free_blocks(count), None) is not None

    def place(self, job: Job, count: int) -> Block | None:
        """The block the placer takes for a job, with all it occupies; None where there is none."""
        block = next(self.free_blocks(count), None) if not job.needs else None
        if not job.needs:
            return block
        devices: dict[int, None] = {}
        for degree in job.needs.get(count, (count,)):
            found = next(self.free_blocks(degree), None)
            if found is None:
                return None
            devices |= dict.fromkeys(found.devices)
            block = found if degree == count else block
        return None if block is None else Block(tuple(devices), block.kind, block.form)

    def best_block(self, job: Job, count: int) -> tuple[Block | None, float]:
        """Of the first free blocks of each kind, the one where the job is fastest, and its time."""
        if self.layout.blocks:
            block = self.place(job, count)
            return block, job.curve.time(count, block.kind, block.form) if block else math.inf
        timed = [(job.curve.time(count, b.kind, b.form), b) for b in self.free_blocks(count)]
        timed = [pair for pair in timed if pair[0] < math.inf]
        if not timed:
            return None, math.inf
        time, block = min(timed, key=lambda pair: pair[0])
        return block, time

    def at(self, now_s: float) -> "ClusterState":
        """The same cluster at another time, nothing having been started."""
        return ClusterState(self.layout, self.free_at_s, now_s, self.price, self.period_s)

    def taking(self, devices: Sequence[int], until_s: float) -> "ClusterState":
        """The state after devices are taken until a time."""
        free_at = self.free_at_s.copy()
        free_at[list(devices)] = until_s
        return ClusterState(self.layout, free_at, self.now_s, self.price, self.period_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy answers: no devices rejects; no block leaves it to the placer."""

    degree: int
    block: Block | None = None
    start_s: float | None = None  # later than now, where the policy lets a job wait
    note: str = ""
    warning: str = ""  # what the user should know of how it was decided

    @property
    def admit(self) -> bool:
        """Whether the job is let in."""
        return self.degree > 0


REJECT = Decision(0)


def host_layout(sizes: Sequence[int], kinds: Sequence[str] | None = None) -> Layout:
    """Hosts of so many devices, each of one kind."""
    if not sizes or any(size < 1 for size in sizes):
        raise InputError(
            f"hosts of {list(sizes)} devices; give at least one host, each with at least one device"
        )
    names = tuple(kinds) if kinds is not None else ("gpu",) * len(sizes)
    known = tuple(dict.fromkeys(names))
    return Layout(
        name=tuple(f"host{h}/{d}" for h, size in enumerate(sizes) for d in range(size)),
        host=np.repeat(np.arange(len(sizes)), sizes),
        kind=np.repeat([known.index(name) for name in names], sizes),
        kinds=known,
    )


def idle(layout: Layout, *, now_s: float = 0.0) -> ClusterState:
    """Everything is free."""
    return ClusterState(layout, np.zeros(layout.num_devices), now_s)

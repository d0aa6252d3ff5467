"""Benchmark: what the devices and links of this machine achieve, by short runs. [torch]

flops       products of square matrices, per dtype, doubled in size until one takes long enough
memory      a copy inside the device: every byte is read and written
overhead    the smallest op there is, many times
links       copies of 1 KB to 256 MB, each way; from pinned and pageable memory; then both ways at once

A copy's time is what whoever waits for it sees: issued, then waited for, less an empty wait.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from loadmaster.cluster.link_fit import LinkFit, fit_link
from loadmaster.cluster.probe import LocalDevice, local_devices
from loadmaster.core.errors import ClusterError

SMALLEST_BYTES = 2**10
LARGEST_BYTES = 2**28
HOST = "host0"
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_FIRST_SIDE, _LAST_SIDE = 128, 8192
_LONG_S = 0.02
_REPEATS = 5
_TINY_CALLS = 200
Say = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class KindRates:
    """What one kind of device achieves."""

    name: str
    flops_per_s: dict[str, float]  # by dtype
    memory_bytes: int
    bytes_per_s: float
    overhead_s: float
    on_host: bool


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A link between two ends, fitted over both ways."""

    a: str
    b: str
    way: str  # 'pinned', 'pageable', 'peer', 'ram'
    fit: LinkFit
    there: LinkFit  # a -> b alone
    back: LinkFit  # b -> a alone
    duplex: float  # 1: both ways at once take as long as one after the other; 2: as long as one


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as it was measured."""

    devices: tuple[LocalDevice, ...]
    reserve_bytes: tuple[int, ...]  # per device, taken already
    kinds: tuple[KindRates, ...]
    links: tuple[LinkRates, ...]


def benchmark_machine(
    *, largest_bytes: int = LARGEST_BYTES, most_flops_s: float = _LONG_S, say: Say
) -> Machine:
    """Try out every kind of device and every link of this machine."""
    if largest_bytes < 4 * SMALLEST_BYTES:
        raise ClusterError(
            f"transfers of up to {largest_bytes} bytes are too small to measure a link; give 4 KiB or more"
        )
    devices = local_devices()
    kinds: dict[str, KindRates] = {}
    for device in devices:
        if device.chip not in kinds:
            say(f"testing {device.name}, {device.chip}", 0.2)
            kinds[device.chip] = _measure_rates(device, largest_bytes, most_flops_s)
    links = tuple(_measure_links(devices, largest_bytes, say))
    reserve = tuple(_taken_bytes(device) for device in devices)
    return Machine(devices, reserve, tuple(kinds.values()), links)


def _measure_rates(device: LocalDevice, largest_bytes: int, most_flops_s: float) -> KindRates:
    place = torch.device(device.torch_name)
    flops = {}
    for dtype in _DTYPES:
        with suppress(RuntimeError):  # a dtype that the device cannot multiply in
            flops[dtype] = _measure_flops_per_s(place, getattr(torch, dtype), most_flops_s)
    source, target = (torch.ones(largest_bytes, dtype=torch.uint8, device=place) for _ in range(2))
    copy_s = _median_s(lambda: target.copy_(source), place)
    tiny = torch.ones(1, device=place)
    tiny_s = _median_s(lambda: [torch.add(tiny, tiny) for _ in range(_TINY_CALLS)], place) / _TINY_CALLS
    return KindRates(
        device.chip, flops, device.memory_bytes, 2 * largest_bytes / copy_s, tiny_s, device.on_host
    )


def _measure_flops_per_s(place: torch.device, dtype: torch.dtype, long_s: float) -> float:
    """The best rate over growing products."""
    best, side = 0.0, _FIRST_SIDE
    while side <= _LAST_SIDE:
        a, b = (torch.randn(side, side, device=place).to(dtype) for _ in range(2))
        seconds = _median_s(lambda a=a, b=b: a @ b, place)  # type: ignore[misc]
        best = max(best, 2 * side**3 / seconds)
        if seconds > long_s:
            break
        side *= 2
    return best


def _measure_links(devices: tuple[LocalDevice, ...], largest_bytes: int, say: Say) -> Iterator[LinkRates]:
    gpus = [device for device in devices if not device.on_host]
    if not gpus:
        say("measuring copies in host memory", 0.7)
        yield _measure_pair(
            HOST, HOST, "ram", torch.device("cpu"), torch.device("cpu"), largest_bytes, pinned=False
        )
    for device in gpus:
        place = torch.device(device.torch_name)
        for way in ("pinned", "pageable"):
            say(f"measuring {device.name} to host, {way}", 0.7)
            yield _measure_pair(
                device.name, HOST, way, place, torch.device("cpu"), largest_bytes, pinned=way == "pinned"
            )
    for a, b in combinations(gpus, 2):
        one, other = torch.device(a.torch_name), torch.device(b.torch_name)
        if torch.cuda.can_device_access_peer(one, other):  # else the way is through the host
            say(f"measuring {a.name} to {b.name}", 0.9)
            yield _measure_pair(a.name, b.name, "peer", one, other, largest_bytes, pinned=False)


def _measure_pair(
    a: str, b: str, way: str, one: torch.device, other: torch.device, largest_bytes: int, *, pinned: bool
) -> LinkRates:
    """Both directions, alone and together."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 4 <= largest_bytes:
        sizes.append(sizes[-1] * 4)
    if sizes[-1] < largest_bytes:
        sizes.append(largest_bytes)
    ends = [
        _Ends(_allocate_buffer(size, one), _allocate_buffer(size, other, pinned=pinned)) for size in sizes
    ]
    there = [end.seconds(back=False) for end in ends]
    back = [end.seconds(back=True) for end in ends]
    both_s = ends[-1].both_s(
        _allocate_buffer(sizes[-1], one), _allocate_buffer(sizes[-1], other, pinned=pinned)
    )
    return LinkRates(
        a,
        b,
        way,
        fit_link([*sizes, *sizes], [*there, *back]),
        fit_link(sizes, there),
        fit_link(sizes, back),
        max(1.0, min(2.0, (there[-1] + back[-1]) / both_s)),
    )


@dataclass(frozen=True, slots=True)
class _Ends:
    """Two buffers to copy between."""

    a: torch.Tensor
    b: torch.Tensor

    def seconds(self, *, back: bool) -> float:
        source, target = (self.b, self.a) if back else (self.a, self.b)
        copied = _median_s(lambda: target.copy_(source, non_blocking=True), self.a.device, self.b.device)
        waited = _median_s(lambda: None, self.a.device, self.b.device)
        return max(copied - waited, 1e-9)

    def both_s(self, other_a: torch.Tensor, other_b: torch.Tensor) -> float:
        """There and back at the same time, on buffers of their own."""
        if self.a.device.type != "cuda":
            return _median_s(lambda: (self.b.copy_(self.a), other_a.copy_(other_b)), self.a.device)
        near = self.a.device
        far = self.b.device if self.b.device.type == "cuda" else near
        up, down = torch.cuda.Stream(near), torch.cuda.Stream(far)

        def both() -> None:
            with torch.cuda.stream(up):
                self.b.copy_(self.a, non_blocking=True)
            with torch.cuda.stream(down):
                other_a.copy_(other_b, non_blocking=True)

        return _median_s(both, near, self.b.device)


def _allocate_buffer(num_bytes: int, place: torch.device, *, pinned: bool = False) -> torch.Tensor:
    made = torch.ones(num_bytes, dtype=torch.uint8, device=place)
    return made.pin_memory() if pinned else made


def _median_s(call: Callable[[], Any], *places: torch.device) -> float:
    """The median of a few timings of a call and the wait for it."""
    cuda = [place for place in places if place.type == "cuda"]

    def once() -> float:
        started = time.perf_counter()
        call()
        for place in cuda:
            torch.cuda.synchronize(place)
        return time.perf_counter() - started

    first_s = min(once() for _ in range(2))
    calls = max(_REPEATS, min(50, int(1e-3 / max(first_s, 1e-7))))
    return statistics.median(once() for _ in range(calls))


def _taken_bytes(device: LocalDevice) -> int:
    """What the driver and others hold of a GPU already."""
    if device.on_host:
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(torch.device(device.torch_name))
    return int(total - free)

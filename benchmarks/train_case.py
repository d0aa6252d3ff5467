"""What the training parts run: the model and cap of the figures, or a small one over the same code."""

import gc
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A model, its batch, a cap, and how often."""

    layers: int = 48
    width: int = 1600
    heads: int = 25
    vocab: int = 50257
    batch: int = 8
    length: int = 1024
    cap_gib: float = 6.5
    num_steps: int = 14  # of one trial
    num_rounds: int = 7  # of four in turn
    num_warm: int = 4  # steps, or rounds less one, that are left out
    num_pinned: int = 6  # by hand: shards that stay
    every: int = 4  # by hand: of the others, each so manyth is stepped on the device

    @property
    def cap_bytes(self) -> int:
        """Of the device."""
        return int(self.cap_gib * 2**30)


FULL = Case()
SMOKE = Case(
    layers=12, width=1024, heads=16, vocab=8000, batch=4, length=256, cap_gib=1.25, num_steps=5,
    num_rounds=3, num_warm=2, num_pinned=2,
)  # fmt: skip
TINY = Case(  # for a host without a GPU
    layers=6, width=64, heads=4, vocab=256, batch=2, length=32, cap_gib=2.2e-3, num_steps=4, num_rounds=3,
    num_warm=1, num_pinned=1,
)  # fmt: skip


def device_of(case: Case) -> Any:
    """The GPU under the case's cap, with a trace; or the metered device where there is none."""
    import torch
    from tests.train.metered_device import MeteredDevice

    from loadmaster.shards.device.cuda_device import CudaDevice

    if torch.cuda.is_available():
        return CudaDevice(cap_bytes=case.cap_bytes, trace=True)
    torch.set_num_threads(1)
    return MeteredDevice(cap_bytes=case.cap_bytes)


def trial_of(case: Case, name: str, rate: float) -> Any:
    """A GPT of that size."""
    import torch

    import loadmaster.train as lt
    from benchmarks.gpt import gpt, gpt_loss, tokens

    return lt.Trial(
        name=name,
        build=lambda: gpt(case.layers, case.width, case.heads, case.vocab, case.length),
        loss=gpt_loss,
        data=tokens(40, batch=case.batch, length=case.length, vocab=case.vocab),
        precision="bf16",
        verify=False,
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=rate, fused=True),
    )


def by_hand(case: Case) -> list[Any]:
    """The first shards pinned; of the others each so manyth on the device, the last on the host."""
    found = []
    for number in range(case.layers + 2):
        streamed = number - case.num_pinned + 1
        chosen = streamed % case.every == case.every - 1 and number < case.layers + 1
        found.append("pinned" if number < case.num_pinned else "device" if chosen else "host")
    return found


def timed(runner: Any, device: Any, num_steps: int) -> tuple[list[float], list[Any]]:
    """Seconds of each step from end to end, and what was told."""
    times, told, began = [], [], time.perf_counter()
    for done in runner.steps(device, num_steps):
        told.append(done)
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    return times, told


def memory(device: Any) -> dict[str, float]:
    """GiB reserved and allocated at most on a GPU since it was opened, and what the arena saw."""
    import torch

    found = {"arena": device.arena.peak_bytes / 2**30, "retries": float(device.num_retries())}
    if device.torch_device.type == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved() / 2**30
        found["allocated"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        found["reserved"] = found["allocated"] = device.meter.most_bytes / 2**30
    return found


def host_gib() -> dict[str, float]:
    """Host memory of this process at most, and what the machine has left."""
    found: dict[str, float] = {}
    with open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith(("VmHWM", "VmRSS")):
                found[line[:5]] = int(line.split()[1]) / 2**20
    from loadmaster.shards.device.host_bytes import free_host_bytes

    found["available"] = free_host_bytes() / 2**30
    return found


def closed(runner: Any) -> None:
    """Close a runner and see its memory gone."""
    runner.close()
    gc.collect()

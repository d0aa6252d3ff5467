"""Probe: what this machine has, as far as it can be seen without trying anything out.

The CPU is found by the operating system; CUDA devices by torch, where it is installed and works.
"""

import os
import platform
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One device of this machine."""

    name: str  # 'cpu0', 'gpu0', ...
    description: str
    memory_bytes: int  # 0 = unknown


def local_devices() -> tuple[LocalDevice, ...]:
    """The CPU, then the CUDA devices torch sees; no torch or no driver means none."""
    return (_cpu(), *_cuda())


def _cpu() -> LocalDevice:
    affinity = getattr(os, "sched_getaffinity", None)  # a container may own fewer cores than there are
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    processor = platform.machine() or "unknown processor"
    return LocalDevice("cpu0", f"{cores} {'core' if cores == 1 else 'cores'}, {processor}", _ram_bytes())


def _ram_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system answers
        return 0


def _cuda() -> tuple[LocalDevice, ...]:
    try:
        import torch

        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return tuple(
            LocalDevice(f"gpu{index}", str(chip.name), int(chip.total_memory))
            for index, chip in enumerate(found)
        )
    except Exception:  # a broken install or driver is no device, and no reason to stop
        return ()

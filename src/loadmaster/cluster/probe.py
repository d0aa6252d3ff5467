"""Probe: what this machine has. Devices are seen here; what they achieve is tried out in `benchmark`.

The CPU is found by the operating system; CUDA devices by torch, where it is installed and works. A device's
`chip` is the name under which its measured costs are kept.
"""

import os
import platform
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SIBLINGS = {"ti", "super", "laptop", "mobile", "max"}  # words that make another chip of a name


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One device of this machine."""

    name: str  # 'cpu0', 'gpu0', ...
    description: str
    memory_bytes: int  # 0 = unknown
    chip: str = ""  # 'NVIDIA H200', 'Intel Xeon, 8 threads'
    torch_name: str = "cpu"  # 'cpu', 'cuda:0', ...

    @property
    def on_host(self) -> bool:
        """Whether it is the CPU."""
        return self.torch_name == "cpu"


def local_devices() -> tuple[LocalDevice, ...]:
    """The CPU, then the CUDA devices torch sees; no torch or no driver means none."""
    return (_probe_cpu(), *_probe_cuda())


def is_chip(kind: str, chip: str) -> bool:
    """Whether a kind's name ('H200', 'A100-80GB', 'RTX 3090') means a chip ('NVIDIA H200', ...)."""
    if kind == chip:
        return True
    words = re.findall(r"[a-z0-9]+", chip.casefold())
    joined = {a + b for a, b in pairwise(words)}
    joined |= {a + b + c for a, b, c in zip(words, words[1:], words[2:], strict=False)}
    asked = re.findall(r"[a-z0-9]+", kind.casefold())
    extra = {word for word in words if word in _SIBLINGS and not any(word in part for part in asked)}
    return bool(asked) and not extra and all(word in {*words, *joined} for word in asked)


def count_cores() -> int:
    """Cores that this process may use: a container may own fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def threads_of_each(num_processes: int) -> int:
    """Threads of each process where several share this machine."""
    return max(1, count_cores() // max(1, num_processes))


def _probe_cpu() -> LocalDevice:
    cores = count_cores()
    processor = platform.machine() or "unknown processor"
    text = f"{cores} {'core' if cores == 1 else 'cores'}, {processor}"
    threads = _num_threads(cores)
    chip = f"{_cpu_model(processor)}, {threads} {'thread' if threads == 1 else 'threads'}"
    return LocalDevice("cpu0", text, _ram_bytes(), chip, "cpu")


def _cpu_model(processor: str) -> str:
    """The CPU's name, without the signs of its maker."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else platform.processor() or processor
    return " ".join(re.sub(r"\((?:R|TM|C)\)", " ", name).split())


def _num_threads(cores: int) -> int:
    """How many threads an op runs on."""
    try:
        import torch

        return int(torch.get_num_threads())
    except Exception:  # a broken install is as good as none
        return cores


def _ram_bytes() -> int:
    """What there is, or what a container may use of it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system answers
        return 0
    for place in _CGROUP_LIMITS:
        try:
            text = Path(place).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            total = min(total, int(text))
    return total


def _probe_cuda() -> tuple[LocalDevice, ...]:
    try:
        import torch

        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return tuple(
            LocalDevice(
                f"gpu{index}", str(chip.name), int(chip.total_memory), str(chip.name), f"cuda:{index}"
            )
            for index, chip in enumerate(found)
        )
    except Exception:  # a broken install or driver is no device, and no reason to stop
        return ()

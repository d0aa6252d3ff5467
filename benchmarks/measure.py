"""How a figure is taken: warm, repeated, median; and how it is written down with the machine it came from."""

import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def median_s(action: Callable[[], Any], *, repeats: int, warm: int = 1) -> float:
    """Median wall seconds of an action."""
    for _ in range(warm):
        action()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def peak_bytes() -> int:
    """Most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def command_s(arguments: list[str], *, repeats: int, warm: int = 1) -> float:
    """Median wall seconds of a command in a fresh process."""
    return median_s(
        lambda: subprocess.run(arguments, check=True, capture_output=True), repeats=repeats, warm=warm
    )


@dataclass
class Report:
    """Figures as they come, for people and for the result file."""

    figures: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, suite: str, name: str, value: float, unit: str, *, aim: str = "", reached: bool | None = None
    ) -> None:
        """Note a figure and say it."""
        self.figures.append(
            {"suite": suite, "name": name, "value": value, "unit": unit, "aim": aim, "reached": reached}
        )
        mark = {True: "reached", False: "MISSED", None: ""}[reached]
        print(f"{suite:10} {name:58} {value:12.4g} {unit:8} {aim:16} {mark}", flush=True)


def machine() -> dict[str, Any]:
    """What a figure means nothing without."""
    names = ("numpy", "numba", "scipy", "msgspec", "typer", "rich")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names} | _torch_versions(),
        "gpu": _gpu(),
        "load": round(os.getloadavg()[0], 1),  # processes that wanted a core when it began
        "command": f"python -m benchmarks.run {' '.join(sys.argv[1:])}".strip(),
    }


def _torch_versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "ortools"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpu() -> str:
    """The name of the CUDA device, '' = none; torch is asked only where it is there."""
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"

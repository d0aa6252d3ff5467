"""python -m benchmarks.trust.soak OUT [STEPS [STUDIES]]: long runs in one process, and what they leave.

A placed model trains for 2,000 steps whose batches change their shape, and 300 studies run one after another.
After a warm-up of a fifth the memory, descriptors and threads of the process should stay where they are.
"""

import gc
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.train.small_trials import trial
from torch import nn

import loadmaster as lm
from benchmarks.trust.record import add_part
from loadmaster.train.coordination.searchers import SuccessiveHalving
from loadmaster.train.study import Study

_SAMPLES = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Both runs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    num_steps, num_studies = (int(word) for word in (*sys.argv[2:4], "2000", "300")[:2])
    for name, run in (
        (f"{num_steps} steps of changing shapes", lambda: soak_steps(num_steps)),
        (f"{num_studies} studies", lambda: soak_studies(num_studies)),
    ):
        found = run()
        add_part(out, name, found)
        print(name, found, flush=True)


def soak_steps(num_steps: int) -> dict[str, Any]:
    """Training steps of a placed model; every eighth batch has the same shape."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )
    placed = lm.place(model, torch.zeros(4, 32), devices="cpu#0-64MB, cpu#1-64MB", budget="20x")
    optimizer = torch.optim.AdamW(placed.parameters(), lr=1e-3)

    def step(at: int) -> None:
        optimizer.zero_grad()
        loss = placed(torch.randn(1 + at % 8, 32)).square().mean()
        loss.backward()
        optimizer.step()

    return _soak(step, num_steps)


def soak_studies(num_studies: int) -> dict[str, Any]:
    """Small studies with evaluation, checkpoints and a search, each in a folder of its own."""

    def study(at: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trials = [trial(f"t{lr}", lr=lr, num_batches=2, seed=at) for lr in (0.1, 0.01)]
            searcher = SuccessiveHalving(eta=2, min_steps=2)
            options: dict[str, Any] = {"devices": "cpu", "memory_cap": 1 << 20, "checkpoint_every": 2}
            Study(trials, dir=Path(folder), searcher=searcher, launcher="inline", **options).fit()

    return _soak(study, num_studies)


def _soak(action: Callable[[int], None], count: int) -> dict[str, Any]:
    """Do it so often, and look at the process ten times after a warm-up."""
    started, warm = time.perf_counter(), max(1, count // 5)
    samples = []
    for at in range(count):
        action(at)
        if at + 1 >= warm and (at + 1 - warm) % max(1, (count - warm) // _SAMPLES) == 0:
            gc.collect()
            samples.append(_look(at + 1))
    first, last = samples[0], samples[-1]
    return {
        "count": count,
        "grown_bytes_each": round(
            (last["rss_bytes"] - first["rss_bytes"]) / max(1, last["at"] - first["at"])
        ),
        "grown_rss_bytes": last["rss_bytes"] - first["rss_bytes"],
        "grown_descriptors": last["descriptors"] - first["descriptors"],
        "grown_threads": last["threads"] - first["threads"],
        "samples": samples,
        "wall_s": round(time.perf_counter() - started, 1),
    }


def _look(at: int) -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    known = threading.active_count()
    return {
        "at": at,
        "rss_bytes": resident,
        "descriptors": descriptors,
        "threads": threads,
        "of Python": known,
    }


if __name__ == "__main__":
    main()

"""Shard-parallel training: how near to the limit, how much of the copying hidden, how far ahead of the peer.

The GPU figures need CUDA and a host with 128 GB; the CPU figure stretches every copy of a simulated device.
Every part runs in a process of its own under a time limit: one that fails, hangs or is killed is said, and
the others go on. Figures are printed and appended to results/DATE-train.jsonl as they come.
TRAIN_PARTS="smoke,one" chooses parts; what parts find (rates, times to compare with) is handed to later ones,
and kept in TRAIN_FOUND, a file, if that is given. TRAIN_BY_HAND=0 leaves out a placement given by hand.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import Report

SUITE = "train"
LIMIT_S = {"smoke": 120, "calibrate": 45, "resident": 70, "peer": 110, "one": 120, "four": 170, "lora": 120,
           "overlap": 120}  # fmt: skip
ON_A_GPU = ("smoke", "peer", "calibrate", "resident", "one", "four", "lora")  # rates just before their use
RESULTS = Path(__file__).parent.parent / "results"


def run(report: Report) -> None:
    """All figures this machine can give."""
    import torch

    there = torch.cuda.is_available()
    parts = [*(ON_A_GPU if there else ("smoke",)), "overlap"]
    if not there:
        print(f"{SUITE:10} no CUDA device: the GPU figures are left out")
    wanted = os.environ.get("TRAIN_PARTS", "")
    chosen = [name.strip() for name in wanted.split(",")] if wanted else parts
    kept = os.environ.get("TRAIN_FOUND", "")
    found: dict[str, Any] = json.loads(Path(kept).read_text()) if kept and Path(kept).exists() else {}
    for name in chosen:
        if name not in parts:
            print(f"{SUITE:10} no part {name!r} here; parts: {', '.join(parts)}")
            continue
        began = time.perf_counter()
        problem = run_part(name, report, found)
        print(f"{SUITE:10} part {name}: {time.perf_counter() - began:.1f} s {problem}", flush=True)
        if kept:
            Path(kept).write_text(json.dumps(found))


def run_part(name: str, report: Report, found: dict[str, Any]) -> str:
    """One part in a process of its own; adds what it found, and gives what went wrong."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, "-m", "benchmarks.train_part", name]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        timer = threading.Timer(LIMIT_S[name], process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(found))
            process.stdin.close()
            for line in process.stdout:
                _told(line, report, found)
            code = process.wait()
        finally:
            timer.cancel()
        errors.seek(0)
        tail = errors.read()[-4000:]
    if code == 0:
        return tail[-1000:]  # warnings: what was planned anew
    return f"failed (exit {code}{', killed' if code < 0 else ''})\n{tail}"


def _whole_name(name: str, head: str) -> tuple[str, str]:
    """What the next figures belong to, and a name that stands alone: '... reserved' is of the one before."""
    if name.startswith("... "):
        return head, f"{head}: {name[4:]}"
    return name.split(" (")[0].removesuffix(": step").split(", one trial: tokens")[0], name


def _told(line: str, report: Report, found: dict[str, Any]) -> None:
    try:
        told = json.loads(line)
    except ValueError:
        print(line, end="", flush=True)
        return
    if "figure" in told:
        figure = told["figure"]
        found["_head"], figure["name"] = _whole_name(figure["name"], found.get("_head", ""))
        report.add(**figure)
        RESULTS.mkdir(exist_ok=True)
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        with (RESULTS / f"{day}-train.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(figure) + "\n")
    found.update({name: value for name, value in told.get("found", {}).items() if value is not None})

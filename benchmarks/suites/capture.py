"""Capture: processor seconds and memory of turning named models into graphs, each in a process of its own.

No weight is allocated; the models are built on `meta`. Seconds are those of `capture` alone, without imports
and without building the model; memory is that of the whole process.
"""

import json
import subprocess
import sys

from benchmarks.measure import Report

SUITE = "capture"
GIB = 2**30
# source, batch, seq, most seconds, most bytes
CASES: tuple[tuple[str, int, int, float | None, int | None], ...] = (
    ("hf:gpt2", 8, 512, 5.0, None),
    ("hf:llama-7b", 8, 512, 15.0, GIB),
    ("hf:llama-70b", 8, 512, 60.0, None),
    ("hf:mixtral-8x7b", 8, 512, None, None),
    ("hf:t5-base", 8, 512, None, None),
    ("hf:bert-base", 8, 512, None, None),
    ("hf:vit-base", 8, 512, None, None),
    ("zoo:resnet50", 8, 512, None, None),
    ("zoo:lstm", 8, 128, None, None),
)


def run(report: Report) -> None:
    """All figures of the suite."""
    for source, batch, seq, most_s, most_bytes in CASES:
        command = [sys.executable, "-m", "benchmarks.capture_one", source, str(batch), str(seq)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        what = f"{source} by {found['path']}, {found['num_ops']} ops"
        aim_s = {"aim": f"< {most_s:g}", "reached": found["cpu_s"] < most_s} if most_s else {}
        report.add(SUITE, what, found["cpu_s"], "cpu s", **aim_s)
        gib = found["peak_bytes"] / GIB
        aim_gib = (
            {"aim": f"<= {most_bytes / GIB:g}", "reached": gib <= most_bytes / GIB} if most_bytes else {}
        )
        report.add(SUITE, f"{source}: peak memory of the process", gib, "GiB", **aim_gib)
        share = found["attributed"]
        report.add(SUITE, f"{source}: attributed", share, "ratio", aim=">= 0.92", reached=share >= 0.92)

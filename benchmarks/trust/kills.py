"""python -m benchmarks.trust.kills OUT [COUNT]: studies killed at random moments, and whether they arrive.

A study of four LoRA trials in groups on one frozen backbone, with evaluation and successive halving, is
killed by SIGKILL and started again (`tests/train/group_killer.py`). It must end with the decisions of a study
that nobody killed and the weights, to the bit, of plain loops (`train.reference`) of as many steps.
Parts of ten that OUT has already are passed over.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.train.group_killer import describe, study, trials
from tests.train.small_trials import digest

from benchmarks.trust.record import add_part, read_parts
from loadmaster.train import reference

_PART = 10


def main() -> None:
    """Run the parts that are missing."""
    torch.set_num_threads(1)
    out, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    wanted = _run_unharmed()
    for begin in range(0, count, _PART):
        name = f"kills {begin} to {begin + _PART - 1}"
        if name not in read_parts(out).get("parts", {}):
            total = add_part(out, name, _run_part(begin, wanted))["total"]
            print(f"{name}: {total['equal']} of {total['killed']} equal", flush=True)


def _run_unharmed() -> list[list[Any]]:
    """How every trial ends, its weights those of a plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        ended = describe(study(Path(folder)).fit())
    plain = [
        digest(reference(replace(t, max_steps=e[2])).state_dict) for t, e in zip(trials(), ended, strict=True)
    ]
    assert [each[3] for each in ended] == plain
    return ended


def _run_part(begin: int, wanted: list[list[Any]]) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.train.group_killer", folder, str(begin), str(begin + _PART)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {at: (records, ended) for at, records, ended in map(json.loads, done.stdout.splitlines())}
    wrong = [at for at in range(begin, begin + _PART) if at not in found or found[at][1] != wanted]
    return {
        "killed": _PART,
        "equal": _PART - len(wrong),
        "wrong": wrong,
        "records when killed": [records[-1] for _, (records, _) in sorted(found.items())],
        "wall_s": round(time.perf_counter() - started, 1),
    }


if __name__ == "__main__":
    main()

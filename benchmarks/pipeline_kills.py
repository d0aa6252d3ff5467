"""Workers killed or stopped at random moments: does the whole run end, and how soon? Figures for 20 runs.

    python -m benchmarks.pipeline_kills --runs 20 --out benchmarks/results/pipeline-kills.json

Ended well: the parent raised an error that names the rank, within 10 s; no process of the run is left; every
checkpoint that has a name is whole.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tests.distributed.pipelines import as_batch, pipeline_placement, whole_batch
from tests.distributed.run_models import Net, sgd, square

import loadmaster as lm
from loadmaster.modules.checkpoint import Checkpoint
from loadmaster.runtime.distributed.processes import WorkerError
from loadmaster.zoo.example import Example

LIMIT_S = 10.0


def strike_one(number: int, placement: Any, built: Example, batch: Any) -> dict[str, Any]:
    """One run, one blow."""
    chance = random.Random(number)  # no secret
    rank, how = chance.randrange(2), chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    folder = Path(tempfile.mkdtemp())
    struck: list[float] = []
    pids: list[int] = []
    words = ""

    def strike() -> None:
        time.sleep(chance.uniform(0.0, 3.0))
        struck.append(time.monotonic())
        os.kill(pids[rank], how)

    try:
        with lm.launch(placement, built.model, loss=square, optimizer=sgd) as run:
            pids.extend(one.pid for one in run._group.processes)  # type: ignore[union-attr]
            threading.Thread(target=strike).start()
            while True:
                run.step(batch)
                run.save(folder)
    except WorkerError as problem:
        words = str(problem)
    took = time.monotonic() - struck[0]
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    whole = all(Checkpoint(path).names == set(built.model.state_dict()) for path in folder.glob("step-*"))
    partial = [path.name for path in folder.glob(".partial*")]
    well = took < LIMIT_S and not left and whole and not partial and f"rank {rank}" in words
    return {
        "run": number,
        "rank": rank,
        "signal": how.name,
        "seconds": round(took, 2),
        "left": left,
        "whole": whole,
        "partial": partial,
        "words": words.splitlines()[0] if words else "",
        "well": well,
    }


def main() -> None:
    """All runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    torch.manual_seed(0)
    built = Example(Net(), (torch.randn(4, 16),), loss=square)
    placement, batch = pipeline_placement(built, 2, 2), as_batch(whole_batch(built, 2))
    rows = []
    for number in range(asked.runs):
        rows.append(strike_one(number, placement, built, batch))
        print(json.dumps(rows[-1]), flush=True)
    print(f"{sum(row['well'] for row in rows)} of {len(rows)} ended well")
    if asked.out:
        head = {"date": str(date.today()), "torch": str(torch.__version__)}
        Path(asked.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

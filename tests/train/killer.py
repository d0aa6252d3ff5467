"""Kills sharded studies: `python -m tests.train.killer FOLDER COUNT` prints records and final hashes.

This process imports torch and runs nothing, so that its forks are sound, unlike those of one with threads.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from loadmaster.train.disk.journal import read_journal
from tests.train.disk.test_kill import Slowly, hashes, in_child
from tests.train.study.test_shard_study import TRIALS, study


def _wait_for(journal: Path) -> None:
    """Until something was written, or for a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.005)


def main() -> None:
    torch.set_num_threads(1)
    rng = random.Random(11)
    for at in range(int(sys.argv[2])):
        folder = Path(sys.argv[1]) / str(at)
        child = in_child(lambda folder=folder: study(folder, TRIALS[:2], callbacks=[Slowly()]).fit())  # type: ignore[misc]
        _wait_for(folder / "journal")  # a plan is made before anything is written, fast or slow
        time.sleep(rng.uniform(0.0, 0.6))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        records = len(read_journal(folder / "journal").records)

        def resume(folder: Path = folder, records: int = records) -> None:
            print(records, *hashes(study(folder, TRIALS[:2]).fit()), flush=True)

        os.waitpid(in_child(resume), 0)


if __name__ == "__main__":
    main()

"""Kills studies on a frozen backbone: `python -m tests.train.group_killer FOLDER FIRST LAST`.

Each study trains LoRA adapters in groups, evaluates, and searches by successive halving. It is killed by
SIGKILL when its journal has a random length, and a moment later; every third is killed again when it goes on.
Each line that is printed: the number, records in the journal when it died, and the trials as they ended.

This process imports torch and runs nothing, so that its forks are sound, unlike those of one with threads.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by the first optimizer step otherwise, in every child

import loadmaster.train.backbone.group_runner
import loadmaster.train.shard_engine  # noqa: F401
from loadmaster.train.coordination.searchers import SuccessiveHalving
from loadmaster.train.disk.journal import read_journal
from loadmaster.train.study import Study
from tests.train.disk.test_kill import Slowly, in_child
from tests.train.lora_trials import lora, loss, tokens
from tests.train.small_trials import digest

_CAP_BYTES = 1 << 20
_MOST_BYTES = 8300  # of the journal of a whole study, about


def evaluate(model: Any) -> dict[str, float]:
    with torch.no_grad():
        return {"loss": sum(float(loss(model(x), y)) for x, y in tokens(77, 2)) / 2}


def trials() -> list[Any]:
    rates = (3e-2, 1e-2, 3e-3, 1e-3)
    return [lora(f"t{n}", lr=lr, seed=n, evaluate=evaluate, eval_every=2) for n, lr in enumerate(rates)]


def study(folder: Path, **options: Any) -> Study:
    given = {"devices": "cpu", "memory_cap": _CAP_BYTES, "checkpoint_every": 2, "launcher": "inline"}
    searcher = SuccessiveHalving(eta=2, min_steps=2)
    return Study(trials(), dir=folder, searcher=searcher, **(given | options))


def describe(result: Any) -> list[list[Any]]:
    """How each trial ended, and a hash of its weights."""
    return [[each.name, str(each.status), each.step, digest(each.state_dict())] for each in result.trials]


def _wait_for(journal: Path, num_bytes: int, child: int) -> bool:
    """Until a journal is so long; False: the child ended before."""
    while not (journal.exists() and journal.stat().st_size >= num_bytes):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.001)
    return True


def kill_one(folder: Path, rng: random.Random) -> int:
    """Run a study and kill it; returns how many records it had written."""
    child = in_child(lambda: study(folder, callbacks=[Slowly()]).fit())
    journal = folder / "journal"
    begun = journal.stat().st_size if journal.exists() else 0
    if _wait_for(journal, rng.randrange(begun, max(begun + 1, _MOST_BYTES)), child):
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(read_journal(journal).records)


def main() -> None:
    torch.set_num_threads(1)
    for at in range(int(sys.argv[2]), int(sys.argv[3])):
        folder, rng = Path(sys.argv[1]) / str(at), random.Random(at)
        records = [kill_one(folder, rng) for _ in range(2 if at % 3 == 2 else 1)]

        def resume(folder: Path = folder, at: int = at, records: list[int] = records) -> None:
            print(json.dumps([at, records, describe(study(folder).fit())]), flush=True)

        os.waitpid(in_child(resume), 0)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

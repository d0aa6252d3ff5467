"""Workers without a model, for tests of what starts and minds them."""

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_LOCKS: list[Any] = []


def enter(spec: Any) -> Callable[[str, Any], Any]:
    """Answers a few commands."""

    def handle(command: str, given: Any) -> Any:
        if command == "pid":
            return os.getpid(), spec
        if command == "lock":
            _LOCKS.append(mp.get_context("spawn").RLock())
        if command == "sleep":
            time.sleep(given)
        if command == "raise" and spec == given:
            raise ValueError("the disk is full")
        if command == "exit" and spec == given:
            os._exit(3)
        if command in ("raise", "exit"):
            time.sleep(60)
        return None

    return handle


def parent() -> None:
    """A parent that says who its workers are, and waits."""
    from loadmaster.runtime.distributed.processes import WorkerGroup

    group = WorkerGroup(enter, [0, 1])
    group.start()
    print(*(pid for pid, _ in group.ask("pid")), flush=True)
    group.ask("sleep", 120)


if __name__ == "__main__":
    sys.exit(parent())

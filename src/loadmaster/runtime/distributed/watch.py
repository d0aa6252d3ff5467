"""Watch: the processes of a run that torchrun started look after one another.

Each writes a sign of life into the store once a second, with what it waits for. One that sees no sign of a
peer for some time says so, with who waited for whom, and ends; torchrun then ends the others, or starts all
again (`--max-restarts`). So a process that was stopped, or a host that went away, is noticed within seconds,
even while this one stands in a wait of its own.
"""

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from loadmaster.runtime.distributed.transports import Waits

EXIT_CODE = 71
_EVERY_S = 1.0


@dataclass(slots=True)
class PeerWatch:
    """A thread that gives and looks for signs of life."""

    rank: int
    world: int
    waits: Waits
    lost_s: float = 8.0
    store: Any = None
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, over a connection of its own."""
        if self.world < 2:
            return
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError, AttributeError):
            store = store.clone()
        self.store = store
        self._thread = threading.Thread(target=self._watch, name="loadmaster watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This process ends as it should: nobody shall miss it."""
        if self._thread is None:
            return
        self._ends.set()
        with contextlib.suppress(RuntimeError):
            self.store.set(self._key(self.rank), "ended")
        self._thread.join(2 * _EVERY_S)

    def _key(self, rank: int) -> str:
        return f"loadmaster/alive/{rank}"

    def _watch(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        count = 0
        while not self._ends.wait(_EVERY_S):
            count += 1
            try:
                self.store.set(self._key(self.rank), f"{count}|{self.waits.now}")
                said = self._read()
            except RuntimeError as problem:
                if not self._ends.is_set():
                    self._end(f"rank {self.rank} lost the host where the processes meet: {problem}")
                return
            now = time.monotonic()
            for rank, words in said.items():
                if rank not in seen or seen[rank][0] != words:
                    seen[rank] = words, now
                elif words != "ended" and now - seen[rank][1] > self.lost_s:
                    self._end(self._describe(rank, words, said))
                    return

    def _read(self) -> dict[int, str]:
        found = {}
        for rank in range(self.world):
            if rank != self.rank and self.store.check([self._key(rank)]):
                found[rank] = self.store.get(self._key(rank)).decode()
        return found

    def _describe(self, lost: int, words: str, said: dict[int, str]) -> str:
        lines = [
            f"rank {lost} has given no sign of life for {self.lost_s:g} s; it was stopped,"
            " or its host is gone"
        ]
        waiting = {rank: text.partition("|")[2] for rank, text in said.items()} | {self.rank: self.waits.now}
        lines += [
            f"rank {rank} waited for {what}"
            for rank, what in sorted(waiting.items())
            if what and rank != lost
        ]
        return "; ".join(lines)

    def _end(self, words: str) -> None:
        sys.stderr.write(f"error: {words}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)

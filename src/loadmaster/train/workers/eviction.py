"""Room on a device for the trial whose turn it is: others leave, the one that ran longest ago first.

What a trial needs beside the slots that all share is what its last turn took at its highest; for one that
never ran, what was planned, or all others leave.
Works on the arena of a device; a device without one is taken to have room for all.
"""

from collections.abc import Mapping
from typing import Any

from loadmaster.shards.plan.slot_needs import SHARED


class Room:
    """Bytes of one device, by trial."""

    def __init__(self, device: Any) -> None:
        self._arena = getattr(device, "arena", None)
        self._need: dict[str, int] = {}
        self._last: dict[str, int] = {}  # when each ran
        self._clock = 0

    def make(self, trial: str, held: Mapping[str, Any]) -> int:
        """Let others leave until this one fits; returns what stands there without it."""
        self._clock += 1
        self._last[trial] = self._clock
        if self._arena is None:
            return 0
        others = sorted((name for name in held if name != trial), key=lambda name: self._last.get(name, 0))
        mine = self._standing(trial)
        planned = getattr(held.get(trial), "need_bytes", None)
        need = self._need.get(trial, self._arena.cap_bytes if planned is None else planned)
        for name in others:
            if self._arena.cap_bytes - self._arena.used_bytes + mine >= need:
                break
            held[name].leave()
        self._arena.peak_bytes = self._arena.used_bytes
        return int(self._arena.used_bytes) - mine - self._sum_shared_bytes()

    def note_turn(self, trial: str, used_before: int) -> None:
        """A turn is over: keep what it took at its highest."""
        if self._arena is not None:
            took = self._arena.peak_bytes - used_before - self._sum_shared_bytes()
            self._need[trial] = max(self._need.get(trial, 0), took)

    def reclaim(self, held: Mapping[str, Any]) -> None:
        """Between turns nothing stands but regions of held trials: what a failed one left is freed."""
        if self._arena is None:
            return
        for name, size in list(self._arena.held.items()):
            if name not in SHARED and not any(name.startswith(f"{trial} ") for trial in held):
                self._arena.release(name, size)

    def _sum_shared_bytes(self) -> int:
        assert self._arena is not None
        return sum(self._arena.held.get(name, 0) for name in SHARED)

    def _standing(self, trial: str) -> int:
        assert self._arena is not None
        return sum(size for name, size in self._arena.held.items() if name.startswith(f"{trial} "))

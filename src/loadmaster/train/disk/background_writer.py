"""Checkpoints are written in the background: one at a time, on a thread, from a copy of the state."""

import threading
from collections.abc import Callable
from copy import deepcopy

import torch

from loadmaster.train.disk.checkpoints import Snapshot, memory_key


class Writer:
    """Does one thing at a time; who brings the next waits until it is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start it, after the one before."""
        self.wait()
        # A daemon: a process that is told to end does not wait for a disk that hangs.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is being done."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is being done, or for so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def copy_snapshot(snapshot: Snapshot) -> Snapshot:
    """The same state in memory of its own, which training does not change; frozen tensors are not copied."""
    fixed = {memory_key(snapshot.model[name]) for name in snapshot.frozen if name in snapshot.model}
    made: dict[object, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        place = memory_key(tensor)
        if place in fixed:
            return tensor
        if not tensor.numel():
            return tensor.clone()
        if place not in made:
            made[place] = tensor.detach().clone(memory_format=torch.preserve_format)
        return made[place]

    return Snapshot(
        snapshot.step,
        {name: own(tensor) for name, tensor in snapshot.model.items()},
        {name: own(tensor) for name, tensor in snapshot.tensors.items()},
        deepcopy(snapshot.facts),
        snapshot.frozen,
    )


def count_copy_bytes(snapshot: Snapshot) -> int:
    """Memory that `copy_snapshot` takes."""
    fixed = {memory_key(snapshot.model[name]) for name in snapshot.frozen if name in snapshot.model}
    places = {memory_key(t): t.nbytes for t in (*snapshot.model.values(), *snapshot.tensors.values())}
    return sum(size for place, size in places.items() if place not in fixed)

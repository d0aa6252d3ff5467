"""The lock of a study's folder: one process at a time, and never its children.

A lock of the kind that is used here belongs to the open file, which processes made by fork inherit: workers
of a DataLoader that outlive a killed study would hold its folder. So each child lets go of it at once.
"""

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from loadmaster.core.errors import FileError


class _Handle:
    """An open file, until it is closed here or in a child."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _watch_forks()
        _OPEN.add(self)

    def lock(self) -> bool:
        """Take the lock; False where somebody else has it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go; of a child's file the parent's lock does not know."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_OPEN: "weakref.WeakSet[_Handle]" = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    """Let children close what is open here; the system keeps what is registered, so it is done once."""

    def close_in_child() -> None:
        for handle in list(_OPEN):
            handle.close()

    os.register_at_fork(after_in_child=close_in_child)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """The folder, for this process alone; made where it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _Handle(folder / "lock")
    except OSError as problem:
        raise FileError(f"cannot use {folder} as the folder of a study: {problem.strerror}") from None
    try:
        if not handle.lock():
            raise FileError(
                f"{folder} is in use by another process; wait until it is done, or give another dir"
            )
        yield
    finally:
        handle.close()

"""A lock that refuses its owner a second time instead of waiting forever."""

import threading
from typing import Any

from loadmaster.core.errors import RunError


class NonReentrantLock:
    """For what one thread does at a time, and never inside of itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        """Wait for others; oneself is an error."""
        if self._owner == threading.get_ident():
            raise RunError(
                "the placed model was called again while its graph was made; something that calls it (a"
                " wrapper of its forward?) is an attribute of the model: take it off, and put it"
                " around what lm.place gave"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *problem: Any) -> None:
        """The next may come."""
        self._owner = None
        self._lock.release()

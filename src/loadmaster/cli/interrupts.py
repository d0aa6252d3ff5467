"""Ctrl-C: raised as ever, and noted, because compiled code may swallow what is raised inside it.

`progress` looks at the note whenever it is told something, so that an interrupt is answered late at worst.
"""

import signal
import threading


class Interrupts:
    """A handler that counts before it raises."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _number: int, _frame: object) -> None:
        """Note the interrupt, then raise it."""
        self.count += 1
        raise KeyboardInterrupt


def watch() -> Interrupts:
    """Count interrupts from now on (only the main thread may ask for that)."""
    interrupts = Interrupts()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupts)
    return interrupts


def raise_if_lost() -> None:
    """Raise an interrupt that came and was swallowed."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts) and handler.count:
        raise KeyboardInterrupt

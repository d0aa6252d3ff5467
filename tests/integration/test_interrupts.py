"""An interrupt that compiled code swallowed is raised again when progress is told."""

import signal
from contextlib import suppress

import pytest

from loadmaster.cli.console import progress
from loadmaster.cli.interrupts import watch


def test_a_swallowed_interrupt_is_raised_at_the_next_word_of_progress() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts = watch()
        with progress("working") as say:
            say("before", 0.0)
            with suppress(KeyboardInterrupt):  # as a compiled caller does that clears what a callback raised
                signal.raise_signal(signal.SIGINT)
            assert interrupts.count == 1
            with pytest.raises(KeyboardInterrupt):
                say("after", 0.0)
    finally:
        signal.signal(signal.SIGINT, before)

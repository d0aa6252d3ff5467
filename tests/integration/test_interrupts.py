"""An interrupt that compiled code swallowed is raised again when progress is told."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from loadmaster.api import simulate
from loadmaster.cli.console import progress
from loadmaster.cli.interrupts import watch
from loadmaster.core.io import load


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


def test_ctrl_c_in_plan_keeps_the_best_plan_so_far(tmp_path: Path) -> None:
    """The interrupt comes as soon as the search says that it has begun, long before its budget ends."""
    out = tmp_path / "plan.json"
    script = (
        "import signal, sys\n"
        "from loadmaster.placers import answer\n"
        "from loadmaster.cli.app import main\n"
        "offer = answer.Tally.offer\n"
        "def stop(self, plan, **how):\n"
        "    score = offer(self, plan, **how)\n"
        "    if self.scored == 3:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return score\n"
        "answer.Tally.offer = stop\n"
        "sys.argv = ['loadmaster', *sys.argv[1:]]\n"
        "main()\n"
    )
    asked = [
        "plan",
        "gen:fork_join:60",
        "--devices",
        "2xA100-80GB",
        "--budget",
        "1000s",
        "--algorithm",
        "refine",
        "--out",
    ]
    command = [sys.executable, "-c", script, *asked, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "interrupted: this is the best plan so far" in done.stderr
    assert "gpu0" in done.stdout
    placement = load(out)
    assert placement.plan is not None
    assert placement.score_s == pytest.approx(simulate(placement.problem, placement.plan).step_s)

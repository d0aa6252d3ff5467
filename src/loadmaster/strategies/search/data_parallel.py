"""Every device, equal rows, gradients summed: what data parallelism does.

Rows that do not divide are shared by largest remainder, so that it trains the same rows as every other
strategy.
"""

from dataclasses import dataclass

from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.scoring.shares import EVEN
from loadmaster.strategies.scoring.uniform_states import every_device, uniform_state
from loadmaster.strategies.search_run import SearchRun


@dataclass(frozen=True, slots=True)
class DataParallel:
    """`shares` is how rows are dealt: 'even' or 'proportional'."""

    shares: str = EVEN

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """One state, without factors."""
        state = uniform_state(evaluator, every_device(evaluator, "replicate", "allreduce"))
        return [evaluator.replay(state, evaluator.rows_of(state, self.shares), frozenset())]


SEARCH = DataParallel

"""One action for all groups: each set of devices with each way of sharing and summing; the best of them."""

from dataclasses import dataclass

from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.scoring.uniform_states import uniform_state
from loadmaster.strategies.search_run import SearchRun, best_first


@dataclass(frozen=True, slots=True)
class Uniform:
    """No parameters."""

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """All of them, as far as the budget goes."""
        for action in range(len(evaluator.actions)):
            evaluator.evaluate(uniform_state(evaluator, action))
            if run.out_of_budget(evaluator):
                break
        return best_first(evaluator)


SEARCH = Uniform

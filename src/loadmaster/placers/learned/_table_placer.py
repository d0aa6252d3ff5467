"""What `post` and `cross_entropy` share as placers: a start, a table, then single moves, all counted."""

from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.learned._groups import Groups, group_problem
from loadmaster.placers.learned._levels import say_levels
from loadmaster.placers.learned._searcher import Climb, Searcher, offer_start, run_searcher, warm_start_of
from loadmaster.placers.learned._table import TableSearch, TableSettings


def require_share(algorithm: str, name: str, value: float) -> None:
    """Refuse what is no share of a budget."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise InputError(f"{algorithm}: {name} is {value!r}; give a share from 0 to below 1")


def answer_by_table(
    problem: Problem,
    run: Run,
    settings: TableSettings,
    *,
    warm: bool,
    start: Plan | None,
    finish: float,
    algorithm: str,
) -> Placement:
    """Start, sample and learn, then climb."""
    groups, tally = group_problem(problem), Tally(problem, run)
    if start is not None or warm:
        offer_start(problem, tally, start if start is not None else warm_start_of(problem))
    first = groups.row(tally.best_plan) if tally.scored else None
    search = TableSearch(groups, settings, budget=run.budget.count, start=first)
    search_and_climb(search, groups, tally, finish)
    tally.mend()
    return say_levels(problem, tally.answer(algorithm=algorithm))


def search_and_climb(search: Searcher, groups: Groups, tally: Tally, finish: float) -> None:
    """A searcher with its share of the budget, then single moves from the best plan with the rest."""
    run_searcher(search, groups, tally, share=1.0 - finish)
    if finish and not tally.spent:
        best_s = groups.penalised_s(tally.best_score)
        run_searcher(Climb(groups, groups.row(tally.best_plan), best_s, restarts=False), groups, tally)

"""Ask: a problem answered with a strategy: rows followed, groups made, a search run, its best confirmed.

The states a search finds best are lowered and simulated op by op; the quickest of those that fit is the
answer, with a bound that no strategy beats. Nothing that does not fit is called an answer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from loadmaster.core.errors import PlanError, ProblemError
from loadmaster.core.problem import FREE, Links, Objective, Problem
from loadmaster.core.run import Budget, Score, ignore_progress
from loadmaster.core.strategy import Strategy
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.units import format_bytes
from loadmaster.strategies.lowering.row_costs import find_row_costs
from loadmaster.strategies.predict import op_level
from loadmaster.strategies.registry import Search, make_search
from loadmaster.strategies.scoring.actions import list_actions
from loadmaster.strategies.scoring.evaluator import Evaluator
from loadmaster.strategies.scoring.group_facts import find_facts
from loadmaster.strategies.scoring.grouping import MOST_GROUPS, find_groups
from loadmaster.strategies.search_run import SearchRun
from loadmaster.strategies.splitting.forms import Form, Splits
from loadmaster.strategies.splitting.semantics import find_obstacles
from loadmaster.strategies.splitting.splits import find_splits
from loadmaster.strategies.work_bound import NAME, work_bound

DEFAULT_BUDGET = Budget(count=4000)
CONFIRMED = 8  # states simulated op by op


@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """Who is asked, and how. `exact` allows no deviation such as batch norm of each replica."""

    batch: int
    algorithm: str | Search = "guided"
    budget: Budget = DEFAULT_BUDGET
    seed: int = 0
    exact: bool = False
    groups: int = MOST_GROUPS
    progress: Callable[[str, float], None] = field(default=ignore_progress)


def find_strategy(problem: Problem, asked: StrategyRequest) -> StrategyAnswer:
    """The best strategy a search finds, confirmed op by op."""
    begun = time.perf_counter()
    evaluator = make_evaluator(problem, asked.batch, exact=asked.exact, groups=asked.groups)
    search = make_search(asked.algorithm) if isinstance(asked.algorithm, str) else asked.algorithm
    run = SearchRun(asked.budget, np.random.default_rng(asked.seed), asked.progress)
    found = search(evaluator, run)
    name = asked.algorithm if isinstance(asked.algorithm, str) else type(search).__name__.lower()
    best: tuple[Score, Strategy] | None = None
    for number, state in enumerate(found[:CONFIRMED]):
        asked.progress("confirming op by op", number / CONFIRMED)
        strategy = evaluator.strategy(state, name)
        score = op_level(problem, strategy, evaluator.splits, evaluator.costs)
        if best is None or (score, _replicas(strategy)) < (best[0], _replicas(best[1])):
            best = (score, strategy)
    assert best is not None
    score, strategy = best
    if score.overflow_bytes > 0:
        raise PlanError(
            f"no strategy was found that fits: the nearest one lacks {format_bytes(score.overflow_bytes)};"
            " use a smaller batch, more devices, or loadmaster fit to see what would help"
        )
    bound = min(work_bound(problem), score.time_s)
    return StrategyAnswer(
        problem=problem,
        strategy=strategy,
        algorithm=name,
        score_s=score.time_s,
        bound_s=bound,
        bound_name=NAME if bound > 0 else "",
        peak_bytes=np.array(score.peak_bytes, dtype=np.int64),
        wall_s=time.perf_counter() - begun,
        notes=find_obstacles(problem.graph, evaluator.splits),
    )


def _replicas(strategy: Strategy) -> int:
    """How often ops are computed, all together: of equally quick strategies the least is best."""
    return sum(len(group.ops) * len(group.devices) for group in strategy.groups)


def make_evaluator(
    problem: Problem, batch: int, *, exact: bool = False, groups: int = MOST_GROUPS
) -> Evaluator:
    """What searches stand on."""
    if problem.objective != Objective.STEP or problem.pipeline:
        raise ProblemError("strategies are for the time of a step; leave the pipeline out, and ask for step")
    if problem.links not in (Links.SHARED, Links.PARALLEL):
        raise ProblemError(f"strategies need links 'shared' or 'parallel', not {problem.links.value!r}")
    if (problem.pinned != FREE).any():
        raise ProblemError("strategies cannot keep pins yet; leave the pins out")
    splits = find_splits(problem.graph, batch)
    _require_rows(problem, splits)
    if exact:
        splits = _without_deviations(splits)
    costs = find_row_costs(problem, splits)
    facts = find_facts(problem, splits, costs, find_groups(problem, splits, groups))
    return Evaluator(problem, splits, costs, facts, list_actions(problem))


def _require_rows(problem: Problem, splits: Splits) -> None:
    """Refuse a batch that no input of a captured step has."""
    graph = problem.graph
    inputs = [op for op, kind in enumerate(graph.op_kind) if kind == "input" and graph.signature[op] >= 0]
    made = np.isin(graph.tensor_op, inputs)
    if inputs and not (splits.form[made] == Form.PART).any():
        shapes = ", ".join(graph.signature_table[graph.signature[op]].partition(" ")[2] for op in inputs[:3])
        raise ProblemError(
            f"no input of the step has {splits.batch} rows ({shapes}); give the batch that was captured"
        )


def _without_deviations(splits: Splits) -> Splits:
    """The same where ops whose numbers would differ do not split."""
    allowed = splits.splits.copy()
    stuck = list(splits.deviations)
    allowed[stuck] = False
    return replace(splits, splits=allowed, reason={**splits.reason, **splits.deviations}, deviations={})

"""Predict: a strategy checked, lowered and simulated op by op: its step, its peaks, its gap to a bound."""

import time

import numpy as np

from loadmaster.core.problem import Problem
from loadmaster.core.run import Score
from loadmaster.core.strategy import Strategy
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.simulator.events.engine import prepare
from loadmaster.strategies.lowering.lower import lower
from loadmaster.strategies.lowering.row_costs import RowCosts
from loadmaster.strategies.splitting.forms import Splits
from loadmaster.strategies.work_bound import NAME, work_bound


def predict(
    problem: Problem, strategy: Strategy, *, algorithm: str = "given", started: float | None = None
) -> StrategyAnswer:
    """The answer that a strategy is for a problem; a strategy that breaks a rule is refused with it."""
    begun = time.perf_counter() if started is None else started
    score = op_level(problem, strategy)
    bound = min(work_bound(problem), score.time_s)
    return StrategyAnswer(
        problem=problem,
        strategy=strategy,
        algorithm=algorithm,
        score_s=score.time_s,
        bound_s=bound,
        bound_name=NAME if bound > 0 else "",
        peak_bytes=np.array(score.peak_bytes, dtype=np.int64),
        wall_s=time.perf_counter() - begun,
    )


def op_level(
    problem: Problem, strategy: Strategy, splits: Splits | None = None, costs: RowCosts | None = None
) -> Score:
    """Seconds, overflow and peaks of the devices by the simulator; channels left out."""
    flat = lower(problem, strategy, splits, costs)
    outcome = prepare(flat.problem).score(flat.plan)
    peaks = outcome.peak_bytes[: flat.num_devices]
    usable = problem.cluster.usable_bytes.tolist()
    over = sum(max(peak - room, 0) for peak, room in zip(peaks, usable, strict=True))
    return Score(over, outcome.time_s, tuple(peaks))

"""Error bar: how far a prediction that rests on measured costs may be from what a step will take.

    op      sqrt(repeats^2 + whole step^2)
            repeats     half the spread of an op's own timings, at least MEASURED_ERROR; of a busy moment at
                        least BUSY_ERROR, of an unknown one at least UNKNOWN_ERROR
            whole step  half the spread of the measured step to which the sum of ops is anchored
                        (`whole_step`), NO_ANCHOR_ERROR where there is none
    step    the mean over the plan's ops, weighted by their seconds: what disturbs a machine disturbs all of
            its ops alike, so that errors do not cancel out. Where the host takes longer to issue the ops of
            a GPU than the GPU to run them, at least ISSUE_ERROR

`Costs.rel_error` keeps what is said of an op, so that a saved plan keeps its error bar. Everything that
prints one asks `step_error` and `format_error`.
"""

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Origin, Problem
from loadmaster.core.units import format_seconds
from loadmaster.cost.busy_machine import BUSY, CALM

MEASURED_ERROR = 0.05  # of a repeated measurement, at least
BUSY_ERROR = 1.0  # measured while other work took the processors
UNKNOWN_ERROR = 0.25  # measured when nobody watched
NO_ANCHOR_ERROR = 0.15  # the sum of ops, compared with no whole step
ISSUE_ERROR = 0.35  # issuing was off by up to 0.33 in 25 cases on an H200 (docs/benchmarks.md)


def op_errors(spread: Floats, moment: list[str], anchor_spread: float | None) -> Floats:
    """[M] the relative error of measured times; `anchor_spread` None: no whole step was measured."""
    least = {CALM: MEASURED_ERROR, BUSY: BUSY_ERROR}
    own = np.maximum(spread, [least.get(one, UNKNOWN_ERROR) for one in moment])
    whole = NO_ANCHOR_ERROR if anchor_spread is None else anchor_spread
    found: Floats = np.hypot(own, whole)
    return found


def step_error(problem: Problem, plan: Plan) -> float | None:
    """The relative error to expect of a plan's predicted time; None where nothing of it was measured."""
    seconds = problem.device_compute_s[np.arange(problem.graph.num_ops), plan.device]
    seconds = np.where(np.isfinite(seconds), seconds, 0.0)
    total = float(seconds.sum())
    if total <= 0 or not seconds[problem.costs.origin == Origin.MEASURED].any():
        return None
    error = float(seconds @ problem.costs.rel_error) / total
    return max(error, ISSUE_ERROR) if float(problem.costs.issue_s.sum()) > total else error


def format_error(seconds: float, error: float | None) -> str:
    """'1.34 s (±12 %)'; without an error bar the seconds alone."""
    text = format_seconds(seconds)
    return text if error is None else f"{text} (±{100 * error:.0f} %)"

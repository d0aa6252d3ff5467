"""The rules of `core.check`, with memory by simulation: the peak of every device while a plan runs."""

import numpy as np

from loadmaster.core.check import Violation, check_plan
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.units import format_apart, format_bytes

# a plan that breaks one of these cannot be simulated
_BROKEN = ("length", "device", "support", "pipeline", "order", "recompute")


def check_plan_and_peaks(problem: Problem, plan: Plan) -> list[Violation]:
    """Every rule a plan breaks; its peaks are simulated where it can be."""
    found = check_plan(problem, plan)
    if any(violation.rule in _BROKEN for violation in found):
        return found
    # compiled; a broken plan is told without it
    from loadmaster.simulator.events.engine import simulate
    from loadmaster.simulator.pipelines.unrolled import simulate_step

    found = [violation for violation in found if violation.rule != "memory"]
    timeline = simulate_step(problem, plan)[0] if problem.is_stepped else simulate(problem, plan)
    peak, cluster = timeline.peak_bytes, problem.cluster
    for d in np.flatnonzero(peak > cluster.usable_bytes):
        need, have = format_apart(peak[d], cluster.usable_bytes[d])
        short = format_bytes(peak[d] - cluster.usable_bytes[d])
        text = f"{cluster.device_name[d]} needs {need} but has {have} ({short} short)"
        found.append(Violation("memory", text))
    return found

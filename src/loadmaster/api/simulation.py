"""Simulation: the timeline of a plan, whether it may be run, and how far a prediction was off."""

from dataclasses import replace
from typing import TYPE_CHECKING

from loadmaster.core.choices import parse_choice
from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Problem
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import Timeline

if TYPE_CHECKING:
    from loadmaster.core.check import Violation
    from loadmaster.simulator.compare import Comparison


def simulate(
    problem: Problem, plan: Plan, links: Links | str | None = None, *, dispatch: str | None = None
) -> Timeline:
    """Return the timeline of a plan. `links` overrides the problem's link model."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events import engine

    how = parse_choice(engine.Dispatch, dispatch)
    if problem.is_stepped:
        from loadmaster.simulator.pipelines.unrolled import simulate_step

        return simulate_step(problem, plan, links=parse_choice(Links, links))[0]
    return engine.simulate(problem, plan, links=parse_choice(Links, links), dispatch=how)


def lower(answer: StrategyAnswer) -> Placement:
    """Turn a strategy into a placement, for `simulate`, `write_report`, `explain` and `export`.

    The placement has every op once for each replica. Collectives run on channels beside the devices.
    """
    from loadmaster.strategies.flat_answer import as_placement

    return as_placement(answer)


def seconds_per_sample(problem: Problem, plan: Plan, links: Links | str | None = None) -> float:
    """Steady-state time of a pipelined plan: its busiest device or link."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events.throughput import steady_state

    return steady_state(replace(problem, links=parse_choice(Links, links) or problem.links), plan).time_s


def check_plan(problem: Problem, plan: Plan) -> "list[Violation]":
    """Return every rule that a plan breaks, peak memory included. An empty list means that it can run."""
    _require_plan(problem, plan)
    from loadmaster.simulator.peak_check import check_plan_and_peaks

    return check_plan_and_peaks(problem, plan)


def compare_timelines(predicted: Timeline, measured: Timeline) -> "Comparison":
    """Compare a predicted timeline with a measured one: step time, peaks, transfers."""
    from loadmaster.simulator import compare

    return compare.compare(predicted, measured)


def _require_plan(problem: object, plan: object) -> None:
    """Refuse what is easily confused with a problem and its plan."""
    if not isinstance(problem, Problem):
        raise InputError(f"{type(problem).__name__} is not a Problem; make one with loadmaster.problem()")
    if not isinstance(plan, Plan):
        hint = "nothing that fits was found; placement.least_overflow_plan is the nearest plan"
        hint = hint if plan is None else "of a Placement, give its .plan"
        raise InputError(f"{type(plan).__name__} is not a Plan; {hint}")

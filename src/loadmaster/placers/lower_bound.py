"""The lower bound of a problem: the best of all arguments, and within a budget also an exact solver's."""

from loadmaster.core.placement import Status
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Bound, Budget, parse_budget
from loadmaster.placers.ask import PlanRequest, find_placement
from loadmaster.placers.bounds import quick_bound
from loadmaster.placers.registry import placer, why_not
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step

_SOLVERS = {Objective.STEP: "cpsat_latency", Objective.THROUGHPUT: "cpsat_throughput"}  # whose bounds hold
_BELOW = 1.0 - 1e-12  # rounding


def find_lower_bound(problem: Problem, budget: Budget | float | str | None = None) -> Bound:
    """What no plan can beat, and the argument's name; without a budget no solver is asked."""
    best = quick_bound(problem)
    if problem.is_stepped:
        return best
    if problem.objective == Objective.STEP and not best.infeasible:
        programme = Bound(solve_relaxed_step(problem).bound_s * _BELOW, "step programme")
        best = max(best, programme, key=lambda bound: bound.seconds)
    if budget is None or best.infeasible:
        return best
    name = "ideal_dp" if problem.pipeline else _SOLVERS[problem.objective]
    limit, solver = parse_budget(budget), placer(name)
    if why_not(solver, problem):
        return best
    answer = find_placement(problem, PlanRequest(solver, limit))
    if answer.status == Status.INFEASIBLE:
        return Bound(0.0, "none", answer.proof)
    return best if answer.bound_s <= best.seconds else Bound(answer.bound_s, answer.bound_name)

"""Ask CP-SAT for a plan of a step problem: model, hint, solve, read back."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.graph import units
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget
from loadmaster.placers.exact._latency.model import Builder, Model
from loadmaster.placers.exact._latency.solver import make_solver
from loadmaster.placers.exact._latency.symmetry import find_alike_devices
from loadmaster.placers.exact._latency.ticks import choose_ticks
from loadmaster.simulator.bounds.favourite_children import pair_table
from loadmaster.simulator.events.engine import Dispatch, prepare


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Plans in the solver's order, the best last, and what it proved."""

    plans: list[Plan]
    bound_s: float  # no plan of the problem is faster
    infeasible: str  # why none fits, '' = not proven
    relaxed: tuple[str, ...]


def search(
    cp_model: Any, problem: Problem, start: Plan | None, budget: Budget, *, share: float = 1.0
) -> Found:
    """The best plan CP-SAT finds; `start`, which must fit, is its first and its upper bound."""
    durations = _list_durations(problem)
    simulator = prepare(problem)
    outcome = None if start is None else simulator.run(start, dispatch=Dispatch.IN_ORDER)
    horizon_s = durations[1] if outcome is None else outcome.step_s
    ticks = choose_ticks(durations[0], horizon_s)
    model = Builder(cp_model, problem, ticks, ticks.one(horizon_s) + problem.graph.num_ops + 1).build()
    if start is not None and outcome is not None:
        _add_hint(model, problem, start, ticks.down(outcome.op_start), ticks.down(outcome.op_end))
    solver = make_solver(cp_model, budget, share=share)
    status = solver.solve(model.cp)
    assert status != cp_model.MODEL_INVALID, model.cp.validate()[:200]
    if status == cp_model.INFEASIBLE:
        assert start is None, "CP-SAT calls a model infeasible that a plan solves"
        return Found([], 0.0, "CP-SAT: no placement and order keeps within every device's memory", ())
    bound_s = max(ticks.seconds(solver.best_objective_bound), 0.0)
    plans = [_read_plan(model, problem, solver)] if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else []
    return Found(plans, bound_s, "", tuple(model.relaxed))


def _list_durations(problem: Problem) -> tuple[Floats, float]:
    """All durations of ops and transfers, and a time in which everything fits one after the other."""
    graph = problem.graph
    table = pair_table(problem.cluster, problem.links)
    pairs = table[~np.eye(len(table), dtype=np.bool_)]
    given, size = problem.costs.transfer_s[:, None], graph.tensor_bytes[:, None].astype(np.float64)
    moves = np.where(given >= 0, given * pairs[:, 2], pairs[:, 0] + size * pairs[:, 1])
    op_s = problem.device_compute_s
    slowest = np.where(np.isfinite(op_s), op_s, 0.0).max(axis=1)
    total = float(slowest.sum() + problem.costs.issue_s.sum() + moves.sum())
    return np.concatenate([op_s[np.isfinite(op_s)], moves.reshape(-1)]), max(total, 1e-9)


def _read_plan(model: Model, problem: Problem, solver: Any) -> Plan:
    """Devices and order of a solution; ops are numbered topologically, which decides ties."""
    unit, _ = units(problem.graph)
    chosen = [next(d for d, x in literals.items() if solver.boolean_value(x)) for literals in model.place]
    start = np.array([solver.value(moment) for moment in model.start], dtype=np.int64)
    priority = np.empty(len(start), dtype=np.int32)
    priority[np.lexsort((np.arange(len(start)), start))] = np.arange(len(start), dtype=np.int32)
    return plan_of(np.array(chosen, dtype=np.int32)[unit], priority)


def _add_hint(model: Model, problem: Problem, plan: Plan, start: Any, end: Any) -> None:
    """Begin at a plan that was run, with devices that are alike renamed as the model wants them."""
    unit, num_units = units(problem.graph)
    device = np.empty(num_units, dtype=np.int32)
    device[unit] = plan.device
    device = _rename_alike_devices(problem, unit, device)
    for u, literals in enumerate(model.place):
        for d, x in literals.items():
            model.cp.add_hint(x, bool(d == device[u]))
    for v in range(len(model.start)):
        model.cp.add_hint(model.start[v], int(start[v]))
        model.cp.add_hint(model.end[v], int(end[v]))


def _rename_alike_devices(problem: Problem, unit: Ints, device: Ints) -> Ints:
    """[units] of devices alike the one with the largest unit first."""
    seconds = np.bincount(unit, problem.device_compute_s.min(axis=1), len(device))
    order = np.argsort(-seconds, kind="stable")
    name = np.arange(problem.cluster.num_devices, dtype=np.int32)
    for devices in find_alike_devices(problem):
        used = [d for d in dict.fromkeys(device[order].tolist()) if d in devices]
        for new, old in zip(devices, [*used, *(d for d in devices if d not in used)], strict=True):
            name[old] = new
    renamed: Ints = name[device]
    return renamed

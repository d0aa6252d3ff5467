"""CP-SAT as this package asks it: fixed workers, deterministic time, a stated memory limit."""

from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.core.run import Budget

WORKERS = 2
MEMORY_MB = 4000  # a search that needs more stops, with the best it has
_DETERMINISTIC_PER_COUNT = 2e-3  # of CP-SAT's deterministic seconds for one scored plan


def require_solver(what: str) -> Any:
    """ortools' CP-SAT module, or an error that names the extra."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as trouble:
        raise InputError(
            f"{what} needs the solver CP-SAT, which cannot be imported ({trouble});"
            " pip install 'loadmaster[exact]'"
        ) from None
    return cp_model


def make_solver(cp_model: Any, budget: Budget, *, seed: int = 0, share: float = 1.0) -> Any:
    """A solver that stops when this share of a budget is used up."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = seed
    solver.parameters.max_memory_in_mb = MEMORY_MB
    solver.parameters.linearization_level = 2
    if budget.count is not None:
        solver.parameters.num_workers = 1  # several would race
        solver.parameters.max_deterministic_time = max(share * budget.count * _DETERMINISTIC_PER_COUNT, 1e-3)
    else:
        assert budget.seconds is not None
        solver.parameters.max_time_in_seconds = max(share * budget.seconds, 1e-2)
    return solver

"""Asked: what a question says of costs, made Costs and optimizer state: words of users, checked."""

import os
from collections.abc import Callable

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError, ProblemError, UnknownNameError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Costs
from loadmaster.core.run import Budget, parse_budget
from loadmaster.cost.database import open_database
from loadmaster.cost.measure import measure_costs
from loadmaster.cost.memory import PRECISIONS, with_optimizer

COSTS = ("roofline", "measured")


def measure_seconds(budget: Budget | float | str) -> float:
    """Seconds to measure for; 0 takes what the database knows."""
    if budget in (0, "0", "0s"):
        return 0.0
    seconds = parse_budget(budget).seconds
    if seconds is None:
        raise InputError(f"measuring for {budget!r} is not a time; write seconds, e.g. 30s")
    return seconds


def load_or_measure_costs(
    graph: Graph,
    cluster: Cluster,
    budget_s: float,
    path: str | os.PathLike[str] | None,
    tell: Callable[[str], None] | None,
    progress: Callable[[str, float], None],
) -> Costs:
    """Costs from the database and from new measurements."""
    opened = open_database(path) if tell is None else open_database(path, tell=tell)
    with opened as known:
        found = measure_costs(graph, cluster, known, budget_s=budget_s, say=progress)
    if tell is not None:
        for kind in found.kinds:
            tell(str(kind))
    return found.costs


def apply_optimizer(graph: Graph, optimizer: str | None, precision: str) -> Graph:
    """A graph that was not captured here with the state that an optimizer keeps."""
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", str(precision), PRECISIONS)
    if optimizer is not None:
        return with_optimizer(graph, optimizer, precision=precision)
    if precision != PRECISIONS[0]:
        raise ProblemError(
            f"precision {precision!r} changes nothing without an optimizer; name one, e.g. adamw"
        )
    return graph

"""What a question says of costs, turned into Costs and optimizer state; user input is checked.

roofline   vendors' peak rates, nothing is run
measured   measured on this machine for as long as is asked, and from the database
auto       measured for a few seconds where all devices are on this machine, else the roofline
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

from loadmaster.cluster.probe import threads_of_each
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import CostError, InputError, ProblemError, UnknownNameError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Costs
from loadmaster.core.run import Budget, parse_budget
from loadmaster.cost.database import open_database
from loadmaster.cost.keys import collect_keys
from loadmaster.cost.measure import measure_costs
from loadmaster.cost.memory import PRECISIONS, with_optimizer

ROOFLINE, MEASURED, AUTO = "roofline", "measured", "auto"
COSTS = (ROOFLINE, MEASURED, AUTO)
UNASKED_S = 2.0  # to measure for where nobody asked: the ops that take most of a step
UNASKED_ENVIRONMENT = "LOADMASTER_MEASURE"  # other seconds for that; 0: vendors' peaks, as for other machines


def measure_unasked(
    graph: Graph,
    cluster: Cluster,
    path: str | os.PathLike[str] | None,
    tell: Callable[[str], None] | None,
    progress: Callable[[str, float], None],
    *,
    processes: int = 1,
) -> Costs | None:
    """Costs of devices that are here, from the database and a short measurement; None where it cannot be."""
    budget_s = measure_seconds(os.environ.get(UNASKED_ENVIRONMENT) or UNASKED_S)
    if budget_s <= 0 or not collect_keys(graph).text:
        return None
    try:
        return load_or_measure_costs(
            graph, cluster, budget_s, path, tell or _tell_nobody, progress, processes=processes
        )
    except CostError:  # no torch here, and nothing known
        return None


def _tell_nobody(text: str) -> None:
    """Nobody asked."""


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
    *,
    processes: int = 1,
) -> Costs:
    """Costs from the database and from new measurements; `processes` of the CPU share its cores."""
    opened = open_database(path) if tell is None else open_database(path, tell=tell)
    with opened as known, _threads_of_one(processes):
        found = measure_costs(graph, cluster, known, budget_s=budget_s, say=progress)
    if tell is not None:
        for kind in found.kinds:
            tell(str(kind))
    return found.costs


def _threads_of_one(processes: int) -> AbstractContextManager[None]:
    """As many threads as each of several processes has; without torch nothing is timed."""
    if processes < 2 or find_spec("torch") is None:
        return nullcontext()
    from loadmaster.cost.timed.stopwatch import at_most_threads

    return at_most_threads(threads_of_each(processes))


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

"""Loadmaster: where every operator of a neural network goes.

Importing this loads neither numpy's users nor torch nor numba: every public name is fetched when it
is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadmaster.advisor.ask import advise as advise
    from loadmaster.api import check_plan as check_plan
    from loadmaster.api import compare_timelines as compare_timelines
    from loadmaster.api import diff as diff
    from loadmaster.api import explain as explain
    from loadmaster.api import export as export
    from loadmaster.api import fit as fit
    from loadmaster.api import import_file as import_file
    from loadmaster.api import launch as launch
    from loadmaster.api import load as load
    from loadmaster.api import load_measured as load_measured
    from loadmaster.api import lower as lower
    from loadmaster.api import lower_bound as lower_bound
    from loadmaster.api import place as place
    from loadmaster.api import plan as plan
    from loadmaster.api import problem as problem
    from loadmaster.api import run as run
    from loadmaster.api import save as save
    from loadmaster.api import simulate as simulate
    from loadmaster.api import verify as verify
    from loadmaster.api import whatif as whatif
    from loadmaster.api import write_report as write_report
    from loadmaster.core.cluster import Cluster as Cluster
    from loadmaster.core.errors import LoadmasterError as LoadmasterError
    from loadmaster.core.graph import Graph as Graph
    from loadmaster.core.placement import Placement as Placement
    from loadmaster.core.placement import Status as Status
    from loadmaster.core.plan import Pipeline as Pipeline
    from loadmaster.core.plan import Plan as Plan
    from loadmaster.core.problem import Costs as Costs
    from loadmaster.core.problem import Problem as Problem
    from loadmaster.core.run import Budget as Budget
    from loadmaster.core.run import Run as Run
    from loadmaster.core.timeline import Timeline as Timeline
    from loadmaster.graph.capture import capture as capture
    from loadmaster.placers.registry import placer as placer
    from loadmaster.shards.spec.trial import Trial as Trial
    from loadmaster.train.study import Study as Study

__version__ = "0.2.0"

_HOME = {
    "advise": "advisor.ask",
    "capture": "graph.capture",
    "check_plan": "api",
    "compare_timelines": "api",
    "fit": "api",
    "ways": "api",
    "launch": "api",
    "lower": "api",
    "import_file": "api",
    "export": "api",
    "whatif": "api",
    "load_measured": "api",
    "explain": "api",
    "diff": "api",
    "load": "api",
    "lower_bound": "api",
    "place": "api",
    "placer": "placers.registry",
    "plan": "api",
    "problem": "api",
    "run": "api",
    "save": "api",
    "simulate": "api",
    "verify": "api",
    "write_report": "api",
    "Budget": "core.run",
    "Cluster": "core.cluster",
    "Costs": "core.problem",
    "Graph": "core.graph",
    "LoadmasterError": "core.errors",
    "Pipeline": "core.plan",
    "Placement": "core.placement",
    "Plan": "core.plan",
    "Problem": "core.problem",
    "Run": "core.run",
    "Status": "core.placement",
    "Study": "train.study",
    "Timeline": "core.timeline",
    "Trial": "shards.spec.trial",
}
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home."""
    if name not in _HOME:
        raise AttributeError(f"module 'loadmaster' has no attribute {name!r}")
    return getattr(import_module(f"loadmaster.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Public names, also those not fetched yet."""
    return list(__all__)

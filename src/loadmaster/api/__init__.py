"""The door: the whole story on one screen; read, ask, answer, simulate, place, run, save.

problem = lm.problem("gen:transformer:1500", "2xA100-80GB, cpu-64GB")     source + devices -> Problem
placement = lm.plan(problem)                                               Problem -> Placement
timeline = lm.simulate(problem, placement.plan)                            Problem x Plan -> Timeline
placed = lm.place(model, placement)                                        nn.Module x Placement -> Placed
lm.save(placement, "plan.json");  lm.load("plan.json")                     any noun <-> file

`planning`, `simulation`, `running` and `reviewing` hold the functions. Each makes nouns and hands them down;
no room below calls back. The simulator (numba, scipy) and torch are imported where they are used: bad input
is answered without them.
"""

from loadmaster.api.planning import fit as fit
from loadmaster.api.planning import lower_bound as lower_bound
from loadmaster.api.planning import plan as plan
from loadmaster.api.planning import problem as problem
from loadmaster.api.planning import ways as ways
from loadmaster.api.reviewing import diff as diff
from loadmaster.api.reviewing import explain as explain
from loadmaster.api.reviewing import export as export
from loadmaster.api.reviewing import import_file as import_file
from loadmaster.api.reviewing import load_measured as load_measured
from loadmaster.api.reviewing import whatif as whatif
from loadmaster.api.reviewing import write_report as write_report
from loadmaster.api.running import launch as launch
from loadmaster.api.running import place as place
from loadmaster.api.running import run as run
from loadmaster.api.running import run_processes as run_processes
from loadmaster.api.running import verify as verify
from loadmaster.api.simulation import check_plan as check_plan
from loadmaster.api.simulation import compare_timelines as compare_timelines
from loadmaster.api.simulation import lower as lower
from loadmaster.api.simulation import seconds_per_sample as seconds_per_sample
from loadmaster.api.simulation import simulate as simulate
from loadmaster.core.io import load as load
from loadmaster.core.io import save as save

__all__ = [
    "check_plan",
    "compare_timelines",
    "diff",
    "explain",
    "export",
    "fit",
    "import_file",
    "launch",
    "load",
    "load_measured",
    "lower_bound",
    "place",
    "plan",
    "problem",
    "run",
    "save",
    "simulate",
    "verify",
    "ways",
    "whatif",
    "write_report",
]

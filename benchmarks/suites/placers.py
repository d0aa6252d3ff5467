"""Plans of transformers: how long every algorithm takes and how far its plan is from the bound."""

from benchmarks.cases import budget_s
from benchmarks.measure import Report
from loadmaster import api
from loadmaster.placers.registry import list_algorithms, placer, why_not

SUITE = "placers"
CASES = (
    ("gen:transformer:1500", "V100-16GB, T4, RTX2080, cpu-64GB"),
    ("gen:transformer:10000", "4xA100-80GB, 4xV100-32GB, cpu64-512GB"),
)


def run(report: Report) -> None:
    """Gap and seconds of every algorithm that serves the case."""
    for source, devices in CASES:
        problem = api.problem(source, devices)
        for name in list_algorithms():
            algorithm = placer(name)
            if why_not(algorithm, problem):
                continue
            placement = api.plan(problem, algorithm=algorithm, budget=budget_s())
            label = f"{source} {name}"
            report.add(SUITE, f"{label}: plan time", placement.wall_s, "s")
            if placement.gap is not None:
                report.add(SUITE, f"{label}: gap", 100 * placement.gap, "%")
            else:
                short = float(placement.shortfall_bytes.sum()) / 2**30
                report.add(SUITE, f"{label}: does not fit, short", short, "GiB")

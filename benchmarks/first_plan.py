"""python -m benchmarks.first_plan SOURCE DEVICES BUDGET_S: when auto has a plan that fits; one JSON object.

A process of its own, so that its peak memory is that of one plan and nothing else.
"""

import json
import sys
import time

from benchmarks.measure import peak_bytes
from benchmarks.question import Watched
from loadmaster import api
from loadmaster.placers.registry import placer


def main() -> None:
    """Plan a large source once, warm, and say what it took."""
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.first_plan SOURCE DEVICES BUDGET_S")
    source, devices, budget = sys.argv[1:]
    api.plan("gen:transformer:1500", devices, budget=1.0)  # loads and compiles what follows
    began = time.perf_counter()
    problem = api.problem(source, devices)
    read_s = time.perf_counter() - began
    watched = Watched(placer("auto"))
    began = time.perf_counter()
    placement = api.plan(problem, algorithm=watched, budget=float(budget))
    plan_s = time.perf_counter() - began
    winner = next((m.name for m in placement.members if m.reason == "best"), "")
    print(
        json.dumps(
            {
                "num_ops": problem.graph.num_ops,
                "read_s": read_s,
                "ready_s": watched.called - began,  # bound and preparation, before auto is called
                "first_fit_s": watched.first_fit_s,
                "plan_s": plan_s,
                "gap": placement.gap,
                "winner": winner,
                "largest_device_bytes": int(problem.cluster.usable_bytes.max()),
                "peak_bytes": peak_bytes(),
            }
        )
    )


if __name__ == "__main__":
    main()

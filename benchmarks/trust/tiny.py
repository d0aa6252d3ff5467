"""python -m benchmarks.trust.tiny OUT [FIRST LAST]: `auto` with 5 s on tiny problems, against every plan.

Even seeds are odd problems of three to six ops (tight memory, pins, unequal devices, every link model), whose
plans `brute_force` tries all. Odd seeds have five to eight ops and memory that is, to the byte, what one
random plan needs: one fits, and the best is what `branch_and_bound` proves. Every fourth asks for throughput.
Parts of 50 seeds that OUT has already are passed over.
"""

import sys
import time
from pathlib import Path
from typing import Any

from tests.odd_problems import odd_problem, tight_problem

from benchmarks.trust.record import add_part, read_parts
from loadmaster import api
from loadmaster.core.placement import Status
from loadmaster.core.problem import Objective

_PART = 50
_BUDGET_S = 5.0
_SLACK = 1 + 1e-9


def main() -> None:
    """Run the parts that are missing."""
    out = Path(sys.argv[1])
    first, last = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 3 else (0, 1_000)
    for begin in range(first, last, _PART):
        end = min(begin + _PART, last)
        name = f"seeds {begin} to {end - 1}"
        if name not in read_parts(out).get("parts", {}):
            total = add_part(out, name, _run_part(begin, end))["total"]
            print(name, {k: v for k, v in total.items() if not isinstance(v, list)}, flush=True)


def _run_part(begin: int, end: int) -> dict[str, Any]:
    """Counts, and the seeds that fell short."""
    began = time.perf_counter()
    found: dict[str, Any] = {
        "problems": 0,
        "with a plan": 0,
        "auto has one": 0,
        "best is known": 0,
        "auto has the best": 0,
        "auto proves it": 0,
        "over budget": 0,
        "false claims": [],
        "fell short": [],
    }
    for seed in range(begin, end):
        objective = Objective.THROUGHPUT if seed % 4 >= 2 else Objective.STEP
        odd = seed % 2 == 0
        problem = odd_problem(seed, objective) if odd else tight_problem(seed, objective)
        oracle = api.plan(
            problem,
            algorithm="brute_force" if odd else "branch_and_bound",
            budget="1000000x" if odd else "20s",
        )
        started = time.perf_counter()
        answer = api.plan(problem, budget=_BUDGET_S)
        found["over budget"] += time.perf_counter() - started > 1.2 * _BUDGET_S + 0.5
        found["problems"] += 1
        fits, known = oracle.score_s is not None or not odd, oracle.status == Status.OPTIMAL
        found["with a plan"] += fits
        found["auto has one"] += answer.score_s is not None
        found["best is known"] += known
        if fits and answer.score_s is None:
            found["fell short"].append(f"{seed}: no plan")
        if answer.status == Status.INFEASIBLE and fits:
            found["false claims"].append(f"{seed}: infeasible")
        if not known or answer.score_s is None or oracle.score_s is None:
            continue
        best = answer.score_s <= oracle.score_s * _SLACK
        found["auto has the best"] += best
        found["auto proves it"] += answer.status == Status.OPTIMAL
        if not best:
            found["fell short"].append(f"{seed}: {answer.score_s} instead of {oracle.score_s}")
        if answer.bound_s > oracle.score_s * _SLACK or (not best and answer.status == Status.OPTIMAL):
            found["false claims"].append(f"{seed}: {answer.status} {answer.score_s}, bound {answer.bound_s}")
    return found | {"wall_s": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()

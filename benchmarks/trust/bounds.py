"""python -m benchmarks.trust.bounds OUT [FIRST LAST]: every bound of odd problems against brute force.

Of each problem every bound of the package is compared with the best of all plans; of every tenth also what
each algorithm proves and what `fit` says. Parts of 500 seeds that OUT has already are passed over.
"""

import sys
import time
from pathlib import Path
from typing import Any

from tests.odd_problems import find_false_bound, odd_problem

from benchmarks.trust.record import add_part, read_parts
from loadmaster.core.problem import Objective

_PART = 500


def main() -> None:
    """Run the parts that are missing."""
    out = Path(sys.argv[1])
    first, last = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 3 else (0, 10_000)
    for begin in range(first, last, _PART):
        end = min(begin + _PART, last)
        name = f"seeds {begin} to {end - 1}"
        if name not in read_parts(out).get("parts", {}):
            total = add_part(out, name, _run_part(begin, end))["total"]
            print(f"{name}: {total['problems']} problems so far, {len(total['false'])} false", flush=True)


def _run_part(begin: int, end: int) -> dict[str, Any]:
    started, false, solved = time.perf_counter(), [], 0
    for seed in range(begin, end):
        objective = Objective.THROUGHPUT if seed % 4 == 3 else Objective.STEP
        asked = seed % 20 in (0, 15)  # as many of either objective
        solved += asked
        said = find_false_bound(odd_problem(seed, objective), solvers=asked)
        if said:
            false.append(f"odd_problem({seed}, {objective.value}): {said}")
    wall_s = round(time.perf_counter() - started, 1)
    return {"problems": end - begin, "given to every algorithm": solved, "false": false, "wall_s": wall_s}


if __name__ == "__main__":
    main()

"""python -m benchmarks.trust.steps OUT [FIRST LAST]: bounds of odd training steps against plans that fit.

Of each step (`tests/odd_steps.py`) three plans are drawn; memory is, to the byte, what the plan takes. Then
the bound over layers, with wide and narrow diagrams and with few options, and the step programme may not be
above the plan's time. Parts of 100 seeds that OUT has already are passed over.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.odd_steps import draw_plan, fit_memory, odd_step

from benchmarks.trust.record import add_part, read_parts
from loadmaster.simulator.bounds.layer_search import bound_by_layers
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step

_PART = 100
_SLACK = 1 + 1e-9


def main() -> None:
    """Run the parts that are missing."""
    out = Path(sys.argv[1])
    first, last = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 3 else (0, 10_000)
    for begin in range(first, last, _PART):
        end = min(begin + _PART, last)
        name = f"seeds {begin} to {end - 1}"
        if name not in read_parts(out).get("parts", {}):
            total = add_part(out, name, _run_part(begin, end))["total"]
            print(f"{name}: {total['problems']} plans so far, {len(total['false'])} false", flush=True)


def _run_part(begin: int, end: int) -> dict[str, Any]:
    started, false, plans, tight = time.perf_counter(), [], 0, 0
    for seed in range(begin, end):
        problem, rng = odd_step(seed), np.random.default_rng(seed + 1_000_000)
        for _ in range(3):
            fitted, seconds = fit_memory(problem, draw_plan(problem, rng))
            if seconds <= 0:
                continue
            plans += 1
            bounds = {
                "layers, narrow": bound_by_layers(fitted, 1.5 * seconds, most_branches=8, width=4),
                "layers": bound_by_layers(fitted, 1.02 * seconds, most_branches=8, width=32),
                "layers, coarse": bound_by_layers(
                    fitted, 1.1 * seconds, most_branches=8, width=16, most_options=1, coarse=True
                ),
                "step programme": solve_relaxed_step(fitted, most_solved=1).bound_s,
            }
            tight += max(bounds.values()) > 0.95 * seconds
            false += [
                f"odd_step({seed}): {name} {found} above {seconds}"
                for name, found in bounds.items()
                if found > seconds * _SLACK
            ]
    wall_s = round(time.perf_counter() - started, 1)
    return {"problems": plans, "within 5 %": tight, "false": false, "wall_s": wall_s}


if __name__ == "__main__":
    main()

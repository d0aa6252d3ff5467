"""Learned placement: searches by tables, held-out graphs, HSDAG's comparison, a graph of 10,000 ops.

    LEARNED_PARTS=table,held_out,hsdag,large      which parts; default all      LEARNED_SEEDS=10
    LEARNED_SECONDS=S                             begin no further graph S seconds after the start
    LOADMASTER_SHARED=FOLDER                      where the published graphs are; default ../shared

Each part says in its own file what it compares: `learned_table`, `learned_held_out`, `learned_hsdag`. A
search on real devices is `learned_measured`, trainings are `learned_train`.
"""

import math
import os
import time
from pathlib import Path

import loadmaster as lm
from benchmarks.learned_held_out import SEEDS as HELD_OUT_SEEDS
from benchmarks.learned_held_out import ask, measure_held_out
from benchmarks.learned_table import measure_table
from benchmarks.measure import Report
from loadmaster.core.run import Budget
from loadmaster.placers.registry import placer

SUITE = "learned"
SHARED = Path(os.environ.get("LOADMASTER_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))
SEEDS = int(os.environ.get("LEARNED_SEEDS", "10"))
MOST_LARGE_S = 1.0


def run(report: Report) -> None:
    """The parts that are asked for; without the published graphs those that need none."""
    until = time.monotonic() + float(os.environ.get("LEARNED_SECONDS", math.inf))
    parts = os.environ.get("LEARNED_PARTS", "table,held_out,hsdag,large").split(",")
    if "large" in parts:
        _measure_large(report)
    graphs = SHARED / "graphs"
    if graphs.is_dir():
        if "held_out" in parts:
            measure_held_out(report, graphs, min(SEEDS, HELD_OUT_SEEDS), until)
        if "table" in parts:
            measure_table(report, graphs, SEEDS, until)
    else:
        print(f"{SUITE}: the published graphs are not in {graphs}; what needs them is left out")
    if "hsdag" in parts:
        from benchmarks.learned_hsdag import measure_hsdag

        measure_hsdag(report, min(SEEDS, 5))


def _measure_large(report: Report) -> None:
    """Zero-shot placement of a graph of 10,000 ops in a warm process, features included."""
    algorithm = placer("learned_order")
    for family in ("layered", "fork_join", "transformer"):
        problem = lm.problem(f"gen:{family}:10000")
        ask(lm.problem(f"gen:{family}:500"), algorithm, Budget(count=1), 0)
        taken_s = min(ask(problem, algorithm, Budget(count=1), 0)[1] for _ in range(3))
        report.add(
            SUITE,
            f"zero-shot, {family}, {problem.graph.num_ops} ops, processor time",
            taken_s,
            "s",
            aim=f"< {MOST_LARGE_S:g}",
            reached=taken_s < MOST_LARGE_S,
        )

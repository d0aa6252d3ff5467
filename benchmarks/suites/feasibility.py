"""Feasibility where nothing is freed: how little more memory than the need is enough.

Need = sum of 2 params + output over all ops, every output and every copy of one kept to the end of the
step; four devices behind one port each share `factor` times the need. Workspaces come on top.
"""

import time

from benchmarks.cases import budget_s, never_freed
from benchmarks.measure import Report
from benchmarks.question import Question, Watched, question_of, warm
from loadmaster.core.placement import Placement, Status
from loadmaster.core.run import Budget
from loadmaster.placers.registry import placer

SUITE = "feasibility"
GENERATORS = ("chain", "fork_join", "rnn_grid", "layered", "many_source")
SIZES = (300, 1_000, 10_000)
FACTORS = (1.02, 1.05, 1.1, 1.2)
REPAIRED = ("m_topo", "m_etf", "m_sct", "heft", "cpop", "chain_balance", "memory_first")
# No plan fits these; tests/unit/placers/test_memory_first.py and tests/properties/test_feasibility.py say
# why.
IMPOSSIBLE = {("rnn_grid", 300, 1.02), ("layered", 300, 1.02)}


def run(report: Report) -> None:
    """All figures of the suite."""
    warm()
    for num_ops in SIZES:
        for generator in GENERATORS:
            for factor in FACTORS:
                question = question_of(never_freed(generator, num_ops, factor))
                _auto(report, question, generator, num_ops, factor)
            for name in REPAIRED:  # the last factor's
                _repaired(report, question, f"{generator} {num_ops:,} at {factor:g}x: {name}", name)
    _proof(report)


def _auto(report: Report, question: Question, generator: str, num_ops: int, factor: float) -> None:
    """Seconds to auto's first plan that fits."""
    watched = Watched(placer("auto"))
    placement = question.ask(watched, Budget(seconds=min(budget_s(), 2.0)))
    possible = (generator, num_ops, factor) not in IMPOSSIBLE
    name = f"{generator} {num_ops:,} at {factor:g}x: auto"
    _found(report, name, placement, watched.first_fit_s, possible=possible)


def _repaired(report: Report, question: Question, name: str, algorithm: str) -> None:
    began = time.perf_counter()
    placement = question.ask(placer(algorithm))
    _found(report, name, placement, time.perf_counter() - began, possible=True)


def _found(report: Report, name: str, placement: Placement, seconds: float | None, *, possible: bool) -> None:
    fits = placement.fits and seconds is not None
    short_mib = float(placement.shortfall_bytes.sum()) / 2**20
    value = seconds if fits and seconds is not None else short_mib
    unit = "s" if fits else "MiB short"
    report.add(SUITE, name, value, unit, aim="a plan" if possible else "", reached=fits if possible else None)


def _proof(report: Report) -> None:
    """All four devices would be full, and a connected graph needs copies."""
    began = time.perf_counter()
    question = question_of(never_freed("fork_join", 300, 1.0))
    placement = question.ask(placer("auto"), Budget(seconds=min(budget_s(), 2.0)))
    proven = placement.status == Status.INFEASIBLE and bool(placement.proof)
    name = "fork_join 300 at 1x: auto"
    report.add(SUITE, name, time.perf_counter() - began, "s", aim="infeasible, proven", reached=proven)

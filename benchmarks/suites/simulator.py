"""The simulator: against the pure-Python reference, and how time grows with the graph.

Fork-join graphs of the published generator on four devices behind one port each (a star), ops dealt to
devices at random so that most edges are transfers; workspace, spans and peak memory included. An event is
the start or the end of an op or of a transfer.
"""

import numpy as np
from tests import reference

from benchmarks.measure import Report, median_s, peak_bytes
from loadmaster import api
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.simulator.engine import Dispatch, prepare

SUITE = "simulator"
SIZES = (1_000, 10_000, 100_000, 1_000_000)


def random_plan(problem: Problem) -> Plan:
    """Every op on a device drawn at random."""
    rng = np.random.default_rng(0)
    return plan_of(rng.integers(0, problem.cluster.num_devices, problem.graph.num_ops).astype(np.int32))


def run(report: Report) -> None:
    """All figures of the suite."""
    problem = api.problem("gen:fork_join:10000")
    plan, simulator = random_plan(problem), prepare(problem)
    ours = median_s(lambda: simulator.run(plan), repeats=51, warm=3)
    drawn = median_s(lambda: simulator.timeline(plan), repeats=51, warm=3)
    theirs = median_s(lambda: reference.simulate(problem, plan, dispatch="ready", links="shared"), repeats=5)
    expected = reference.simulate(problem, plan, dispatch="ready", links="shared")
    assert simulator.run(plan).op_end.tolist() == expected.op_end
    report.add(SUITE, "10,000 ops: run", 1e3 * ours, "ms", aim="<= 3", reached=ours <= 3e-3)
    report.add(
        SUITE, "10,000 ops: run and draw the timeline", 1e3 * drawn, "ms", aim="<= 3", reached=drawn <= 3e-3
    )
    report.add(SUITE, "10,000 ops: pure-Python reference", 1e3 * theirs, "ms")
    report.add(
        SUITE, "10,000 ops: reference / run", theirs / ours, "x", aim=">= 100", reached=theirs / ours >= 100
    )
    report.add(
        SUITE,
        "10,000 ops: reference / run and draw",
        theirs / drawn,
        "x",
        aim=">= 100",
        reached=theirs / drawn >= 100,
    )
    for size in SIZES:
        _grow(report, size)
    report.add(
        SUITE,
        "peak memory of this process after 1,000,000 ops",
        peak_bytes() / 2**30,
        "GiB",
        aim="< 2",
        reached=peak_bytes() < 2**31,
    )


def _grow(report: Report, size: int) -> None:
    problem = api.problem(f"gen:fork_join:{size}")
    plan, simulator = random_plan(problem), prepare(problem)
    for dispatch in (Dispatch.READY, Dispatch.IN_ORDER):
        chosen = plan if dispatch == Dispatch.READY else simulator.ordered(plan)
        seconds = median_s(
            lambda p=chosen, d=dispatch: simulator.run(p, dispatch=d), repeats=5 if size > 10**5 else 15
        )
        events = 2 * (problem.graph.num_ops + len(simulator.run(chosen).transfer_tensor))
        big = size == 1_000_000
        report.add(
            SUITE,
            f"{size:,} ops, {dispatch}: run",
            1e3 * seconds,
            "ms",
            aim="<= 600" if big else "",
            reached=seconds <= 0.6 if big else None,
        )
        report.add(SUITE, f"{size:,} ops, {dispatch}: per event", 1e9 * seconds / events, "ns")

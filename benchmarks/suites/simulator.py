"""The simulator: against the pure-Python reference, and how time grows with the graph.

Fork-join graphs of the published generator on four devices behind one port each (a star), ops dealt to
devices at random so that most edges are transfers; workspace, spans and peak memory included. An event is
the start or the end of an op or of a transfer.
"""

import statistics
from collections.abc import Callable

import numpy as np
from tests import reference

from benchmarks.measure import Report, median_s, peak_bytes
from loadmaster import api
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.simulator.events.engine import Dispatch, prepare

SUITE = "simulator"
_ROUNDS = 9
SIZES = (1_000, 10_000, 100_000, 1_000_000)


def random_plan(problem: Problem) -> Plan:
    """Every op on a device drawn at random."""
    rng = np.random.default_rng(0)
    return plan_of(rng.integers(0, problem.cluster.num_devices, problem.graph.num_ops).astype(np.int32))


def run(report: Report) -> None:
    """All figures of the suite."""
    problem = api.problem("gen:fork_join:10000")
    plan, simulator = random_plan(problem), prepare(problem)
    expected = reference.simulate(problem, plan, dispatch="ready", links="shared")
    assert simulator.run(plan).op_end.tolist() == expected.op_end
    actions = {
        "run": lambda: simulator.run(plan),
        "run and draw the timeline": lambda: simulator.timeline(plan),
        "lm.simulate: check, prepare, run, draw": lambda: api.simulate(problem, plan),
    }
    for name, action in actions.items():
        _against_reference(report, name, action, problem, plan)
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


def _against_reference(
    report: Report, name: str, action: Callable[[], object], problem: Problem, plan: Plan
) -> None:
    """Rounds of both, one after the other, so that a busy machine slows both; the median round counts."""
    median_s(action, repeats=30)
    rounds = []
    for _ in range(_ROUNDS):
        theirs = median_s(
            lambda: reference.simulate(problem, plan, dispatch="ready", links="shared"), repeats=1, warm=0
        )
        rounds.append((theirs, median_s(action, repeats=21, warm=3)))
    ours = statistics.median(own for _, own in rounds)
    ratio = statistics.median(theirs / own for theirs, own in rounds)
    first = name == "run"
    theirs = statistics.median(theirs for theirs, _ in rounds)
    limit = {"aim": "<= 3", "reached": ours <= 3e-3} if first else {}
    report.add(SUITE, f"10,000 ops: {name}", 1e3 * ours, "ms", **limit)
    report.add(SUITE, "10,000 ops: pure-Python reference in the same rounds", 1e3 * theirs, "ms")
    aim = {"aim": ">= 100", "reached": ratio >= 100} if first else {}
    report.add(SUITE, f"10,000 ops: reference / {name}", ratio, "x", **aim)


def _grow(report: Report, size: int) -> None:
    problem = api.problem(f"gen:fork_join:{size}")
    plan, simulator = random_plan(problem), prepare(problem)
    for dispatch in (Dispatch.READY, Dispatch.IN_ORDER):
        chosen = plan if dispatch == Dispatch.READY else simulator.order_by_start(plan)
        seconds = median_s(
            lambda p=chosen, d=dispatch: simulator.run(p, dispatch=d),
            warm=3,
            repeats=5 if size > 10**5 else 15,
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

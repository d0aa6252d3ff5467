"""Verdict: whether a step fits, on one device in its own order, or on several by a plan.

A plan that fits is the proof that it does. That it does not is proven where a bound says so; else it was
searched for and not found, and the reason names the device that lacks most in the plan that came nearest.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.capacity.fit_search import FitSearch
from loadmaster.core.placement import Status
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import FREE, Problem
from loadmaster.core.units import format_apart, format_bytes
from loadmaster.simulator.events.engine import prepare

OWN_ORDER = "own order"


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What was found; the plan is the one that came nearest where none fits."""

    problem: Problem
    fits: bool
    proven: bool
    reason: str
    algorithm: str
    plan: Plan
    step_s: float | None
    peak_bytes: tuple[int, ...]


def plan_on_device(problem: Problem, device: int = 0) -> Plan:
    """Everything on one device, in the order in which the graph's ops stand: what PyTorch runs."""
    order = np.arange(problem.graph.num_ops, dtype=np.int32)
    return plan_of(np.full(problem.graph.num_ops, device, dtype=np.int32), order)


def judge_single_device(search: FitSearch, problem: Problem) -> Verdict:
    """On the only device of a problem: in the graph's own order, else in any that is found."""
    own = _judge_own_order(problem, 0)
    if own.fits:
        return own
    other = _judge_by_search(search, problem)
    return other if other.fits or other.proven else own


def judge_cluster(search: FitSearch, problem: Problem) -> Verdict:
    """On all devices of a problem: on one of them where it fits there, else by a plan."""
    if problem.cluster.num_devices == 1:
        return judge_single_device(search, problem)
    supported = np.isfinite(problem.device_compute_s).all(axis=0)
    if (problem.pinned == FREE).all():
        tried = [_judge_own_order(problem, int(d)) for d in np.flatnonzero(supported)]
        fitting = [verdict for verdict in tried if verdict.fits]
        if fitting:
            return min(fitting, key=lambda verdict: verdict.step_s or 0.0)
    return _judge_by_search(search, problem)


def needed_bytes(problem: Problem) -> int:
    """The peak of the graph in its own order, on the problem's first device."""
    return int(prepare(problem).run(plan_on_device(problem)).peak_bytes[0])


def _judge_own_order(problem: Problem, device: int) -> Verdict:
    plan = plan_on_device(problem, device)
    outcome = prepare(problem).run(plan)
    peak = tuple(outcome.peak_bytes.tolist())
    fits = bool((outcome.peak_bytes <= problem.cluster.usable_bytes).all())
    reason = "" if fits else describe_shortfall(problem, peak)
    return Verdict(problem, fits, False, reason, OWN_ORDER, plan, outcome.step_s, peak)


def _judge_by_search(search: FitSearch, problem: Problem) -> Verdict:
    found = search.find_placement(problem)
    plan = found.plan if found.plan is not None else found.least_overflow_plan
    assert plan is not None, "a placer always has a nearest plan"
    peak, proven = tuple(found.peak_bytes.tolist()), found.status == Status.INFEASIBLE
    reason = "" if found.fits else found.proof if proven else describe_shortfall(problem, peak)
    return Verdict(problem, found.fits, proven, reason, found.algorithm, plan, found.score_s, peak)


def describe_shortfall(problem: Problem, peak_bytes: tuple[int, ...]) -> str:
    """The device that is short of most, with both numbers."""
    cluster = problem.cluster
    d = int((np.array(peak_bytes) - cluster.usable_bytes).argmax())
    need, have = peak_bytes[d], int(cluster.usable_bytes[d])
    needed, there = format_apart(need, have)
    return f"{cluster.device_name[d]} needs {needed} but has {there} ({format_bytes(need - have)} short)"

"""Binding: what keeps a part of a plan from another device, found by lifting one limit at a time.

The part stands on the other device. Where the step is slower so, it is simulated again with one limit lifted:
the links between two devices (no limit of rate, no latency), or the other device (the part as fast there as
where it is now). What is lost by the move is counted again each time, since a lifted limit may help the plan
as it was, too. The limit without which least is lost is named; none is, where no single one saves a third.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Bools
from loadmaster.core.cluster import NO_LINK
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.simulator.events.engine import prepare

_MOST_PAIRS = 6
_LEAST_SHARE = 1 / 3  # of the loss
_NO_LIMIT_BYTES_PER_S = 1e18


def find_binding(
    problem: Problem, plan: Plan, timeline: Timeline, moved: Bools, before_s: float, was: Plan
) -> str:
    """In words: 'link gpu0-cpu0', 'speed of cpu0'; '' where no single limit makes it slower than `was`."""
    lost_s = timeline.step_s - before_s
    if lost_s <= 1e-3 * before_s:
        return ""
    least_s, best = (1 - _LEAST_SHARE) * lost_s, ""
    for name, freed in _lift_limits(problem, plan, timeline, moved, was):
        simulator = prepare(freed)
        still_s = simulator.score(plan).time_s - simulator.score(was).time_s
        if still_s < least_s:
            least_s, best = still_s, name
    return best


def _lift_limits(
    problem: Problem, plan: Plan, timeline: Timeline, moved: Bools, was: Plan
) -> Iterable[tuple[str, Problem]]:
    names = problem.cluster.device_name
    for i, j in _busiest_pairs(timeline, len(names)):
        yield f"link {names[i]}-{names[j]}", _without_limit(problem, i, j)
    there = sorted({names[device] for device in np.unique(plan.device[moved]).tolist()})
    yield f"speed of {', '.join(there)}", _as_fast_as_before(problem, plan, moved, was)


def _busiest_pairs(timeline: Timeline, num: int) -> list[tuple[int, int]]:
    """Pairs of devices, whatever the direction, with most seconds of transfers between them."""
    sent = np.flatnonzero(timeline.kind == SpanKind.TRANSFER)
    source, target = np.divmod(timeline.resource[sent], num)
    low, high = np.minimum(source, target), np.maximum(source, target)
    seconds = np.bincount(low * num + high, (timeline.end_s - timeline.start_s)[sent], minlength=num * num)
    order = np.argsort(-seconds, kind="stable")[:_MOST_PAIRS]
    return [divmod(int(at), num) for at in order if seconds[at] > 0 and at // num != at % num]


def _without_limit(problem: Problem, i: int, j: int) -> Problem:
    cluster = problem.cluster
    both = np.concatenate([cluster.route[i, j], cluster.route[j, i]])
    links = both[both != NO_LINK]
    rate, latency = cluster.link_bytes_per_s.copy(), cluster.link_latency_s.copy()
    rate[links], latency[links] = _NO_LIMIT_BYTES_PER_S, 0.0
    return replace(problem, cluster=replace(cluster, link_bytes_per_s=rate, link_latency_s=latency))


def _as_fast_as_before(problem: Problem, plan: Plan, moved: Bools, was: Plan) -> Problem:
    compute_s, kind = problem.costs.compute_s.copy(), problem.cluster.kind
    ops = np.flatnonzero(moved)
    compute_s[ops, kind[plan.device[ops]]] = compute_s[ops, kind[was.device[ops]]]
    return replace(problem, costs=replace(problem.costs, compute_s=compute_s))

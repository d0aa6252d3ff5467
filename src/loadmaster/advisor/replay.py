"""Many policies on the same streams: blocking or deadlines met, with intervals, paired differences and
bounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.bounds.ramp import least_blocking
from loadmaster.advisor.bounds.traces import most_met, possible
from loadmaster.advisor.environments.engine import Cause, Kind, Rule, replay, replay_many
from loadmaster.advisor.environments.profile import read_profiles
from loadmaster.advisor.environments.rules import COMPAT, FIXED
from loadmaster.advisor.environments.streams import DISTRIBUTIONS, draw_stream
from loadmaster.advisor.environments.trace import Throughputs, Trace, draw_trace_stream
from loadmaster.advisor.environments.trace_engine import Order, TraceRule, host_sizes, replay_trace
from loadmaster.advisor.environments.world import World, build_world
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.run import ignore_progress

CONSTANTS = {f"const {k}": Rule(Kind.CONSTANT, k) for k in (2, 4, 6, 8, 16)}
BASELINES = {
    "Para_max": Rule(Kind.PARA_MAX),
    "Para_min": Rule(Kind.PARA_MIN),
    "Random": Rule(Kind.RANDOM),
    **CONSTANTS,
    "smallest": Rule(Kind.MEETS),
    "smallest >= 4": Rule(Kind.MEETS, 4),
    "best fit": Rule(Kind.BEST_FIT),
    "best fit >= 8": Rule(Kind.BEST_FIT, 8),
}
TRACE_RULES = {
    "fifo": TraceRule(Order.FIFO),
    "edf": TraceRule(Order.EDF),
    "always-max": TraceRule(Order.MAX),
    "smallest": TraceRule(Order.MEETS),
    "elasticflow": TraceRule(Order.RESERVE),
    "least-work": TraceRule(Order.LIST, by_area=True),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one set of streams; shares of the arrivals, 95 % intervals over seeds."""

    setting: str
    policy: str
    mean: float
    low: float
    high: float
    paired: float  # mean difference to the reference policy, and half its interval
    paired_half: float
    bound: float
    details: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and half of the 95 % interval over seeds (Student's t)."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def worlds(graphs: str | Path) -> dict[str, World]:
    """The published world, the corrected one (published end rule), and the published one without the leak."""
    jobs = read_profiles(graphs)
    return {
        "compat": build_world(jobs, COMPAT),
        "fixed": build_world(jobs, replace(FIXED, horizon_blocks=True), "fixed"),
        "own": build_world(jobs, replace(COMPAT, leak=False), "own"),
    }


def bench_ramp(
    world: World,
    seeds: Sequence[int],
    rules: dict[str, Rule] | None = None,
    *,
    distributions: Sequence[str] = DISTRIBUTIONS,
    poisson: bool = False,
    bounds: bool = True,
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Row]:
    """Blocking of every rule; paired against the best constant of each distribution."""
    if not len(seeds):
        raise InputError("no seeds; give at least one")
    chosen = BASELINES if rules is None else rules
    rows = []
    for d in distributions:
        streams = [draw_stream(d, seed, poisson=poisson, num_models=len(world.models)) for seed in seeds]
        arrived = np.array([len(stream.model) for stream in streams])
        counts: dict[str, NDArray[np.int64]] = {}
        for i, (name, rule) in enumerate({**chosen, **CONSTANTS}.items()):
            progress(f"{d}: {name}", i / len(chosen))
            if rule.rollout[0]:
                outcomes = [replay(world, s, rule, seed=seed) for s, seed in zip(streams, seeds, strict=True)]
                counts[name] = np.array([[o.count(c) for c in Cause] for o in outcomes])
            else:
                counts[name] = replay_many(world, streams, [rule])[:, 0]
        share = {name: found[:, 1:5].sum(axis=1) / arrived for name, found in counts.items()}
        best = min(CONSTANTS, key=lambda name: share[name].mean())
        bound = float(np.mean([least_blocking(world, s).every_moment for s in streams])) if bounds else 0.0
        for name in chosen:
            mean, half = interval(share[name])
            paired, paired_half = interval(share[name] - share[best])
            causes = counts[name].sum(axis=0) / arrived.sum()
            details = {
                c.name.lower(): float(causes[c])
                for c in (Cause.REJECTED, Cause.NO_BLOCK, Cause.LATE, Cause.HORIZON)
            }
            rows.append(Row(d, name, mean, mean - half, mean + half, paired, paired_half, bound, details))
    return rows


def trace_rules(names: Sequence[str]) -> dict[str, TraceRule]:
    """Rules by name."""
    for name in names:
        if name not in TRACE_RULES:
            raise UnknownNameError("trace policy", name, TRACE_RULES)
    return {name: TRACE_RULES[name] for name in names}


def bench_trace(
    trace: Trace,
    throughputs: Throughputs,
    num_devices: int,
    seeds: Sequence[int],
    rules: dict[str, TraceRule],
    *,
    deadline: str = "default",
    elastic: bool = False,
    per_host: int = 8,
    against: str = "elasticflow",
    deadline_scale: float = 1.0,
    kinds: Sequence[str] = ("v100",),
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Row]:
    """Share of deadlines met of every rule, and of the bound; paired against one rule."""
    if not len(seeds):
        raise InputError("no seeds; give at least one")
    if not deadline_scale > 0 or not math.isfinite(deadline_scale):
        raise InputError(f"the deadline scale is {deadline_scale!r}; give a number > 0")
    hosts = host_sizes(num_devices, per_host)
    usable = {n: r for n, r in rules.items() if not elastic or r.order in (Order.RESERVE, Order.LIST)}
    reference = {against: TRACE_RULES[against]} if against in TRACE_RULES else {}
    streams = []
    for seed in seeds:
        stream = draw_trace_stream(trace, throughputs, seed, deadline=deadline, kinds=kinds)
        due = stream.arrival_s + deadline_scale * (stream.due_s - stream.arrival_s)
        streams.append(replace(stream, due_s=due))
    jobs = len(trace.jobs)
    found: dict[str, NDArray[np.float64]] = {}
    details: dict[str, dict[str, float]] = {}
    for i, (name, rule) in enumerate({**usable, **reference}.items()):
        progress(f"{name}", i / len(usable))
        outcomes = [replay_trace(s, rule, hosts, elastic=elastic) for s in streams]
        found[name] = np.array([o.num_met / jobs for o in outcomes])
        waits = [
            float(np.nanmean(o.start_s - s.arrival_s)) if o.met.any() else 0.0
            for o, s in zip(outcomes, streams, strict=True)
        ]
        details[name] = {
            "broken_promises": float(np.mean([o.num_late / jobs for o in outcomes])),
            "device_hours": float(np.mean([o.device_s / 3600 for o in outcomes])),
            "mean_wait_s": float(np.mean(waits)),
        }
    bound = float(np.mean([most_met(s, num_devices, elastic=elastic) / jobs for s in streams]))
    impossible = float(np.mean([1 - possible(s).mean() for s in streams]))
    rows = []
    for name in usable:
        mean, half = interval(found[name])
        paired, paired_half = interval(found[name] - found.get(against, found[name]))
        told = details[name] | {"impossible": impossible}
        setting = f"{num_devices} devices, {deadline}{' elastic' if elastic else ''}"
        rows.append(Row(setting, name, mean, mean - half, mean + half, paired, paired_half, bound, told))
    return rows

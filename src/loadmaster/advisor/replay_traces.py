"""Many policies on the same recorded arrivals: deadlines met, broken promises, waiting, a proven bound."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from loadmaster.advisor.bounds.traces import most_met, possible
from loadmaster.advisor.environments.trace import Throughputs, Trace, TraceStream, draw_trace_stream
from loadmaster.advisor.environments.trace_engine import (
    ELASTIC_ORDERS,
    ONE_KIND_ORDERS,
    Order,
    TraceOutcome,
    TraceRule,
    host_sizes,
    replay_trace,
)
from loadmaster.advisor.history import history_of_trace
from loadmaster.advisor.replay import Row, make_row
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.run import ignore_progress

_SIZE = re.compile(r"(\d{1,7})(?:x([A-Za-z0-9_.-]+))?")
TRACE_RULES = {
    "fifo": TraceRule(Order.FIFO),
    "edf": TraceRule(Order.EDF),
    "always-max": TraceRule(Order.MAX),
    "smallest": TraceRule(Order.MEETS),
    "elasticflow": TraceRule(Order.RESERVE),
    "reserve-again": TraceRule(Order.RESERVE, by_area=True, retry=True),
    "least-work": TraceRule(Order.LIST, by_area=True),
    "largest-set": TraceRule(Order.SET, by_area=True),
}


def trace_rules(names: Sequence[str]) -> dict[str, TraceRule]:
    """Rules by name."""
    for name in names:
        if name not in TRACE_RULES:
            raise UnknownNameError("trace policy", name, TRACE_RULES)
    return {name: TRACE_RULES[name] for name in names}


def parse_sizes(text: str, kind: str) -> dict[str, int]:
    """Devices by kind, of '48' (all of `kind`) or '32xv100,16xk80'; deadlines are drawn for the first."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        name = kind if match is None or match[2] is None else match[2]
        if match is None or int(match[1]) < 1 or name in sizes:
            raise InputError(
                f"{text!r} is not a number of devices; write for example 48, or 32xv100,16xk80 for two kinds"
            )
        sizes[name] = int(match[1])
    return sizes


def bench_trace(
    trace: Trace,
    throughputs: Throughputs,
    devices: int | Mapping[str, int],
    seeds: Sequence[int],
    rules: dict[str, TraceRule],
    *,
    deadline: str = "default",
    elastic: bool = False,
    per_host: int = 8,
    against: str = "elasticflow",
    deadline_scale: float = 1.0,
    resize_s: float = 0.0,
    kind: str = "v100",
    name: str = "",
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Row]:
    """Share of deadlines met of every rule, and of the bound; paired against one rule.

    `devices` are a number of one `kind`, or numbers by kind; then rules that reserve are left out.
    """
    if not len(seeds):
        raise InputError("no seeds; give at least one")
    if not deadline_scale > 0 or not math.isfinite(deadline_scale):
        raise InputError(f"the deadline scale is {deadline_scale!r}; give a number > 0")
    if not 0 <= resize_s < math.inf or (resize_s and not elastic):
        raise InputError(f"a change of size takes {resize_s!r} s; give a time >= 0, and elastic jobs")
    sizes = {kind: devices} if isinstance(devices, int) else dict(devices)
    by_kind = [host_sizes(size, per_host) for size in sizes.values()]
    hosts = np.concatenate(by_kind)
    host_kind = np.repeat(np.arange(len(by_kind)), [len(part) for part in by_kind])
    num_devices = int(hosts.sum())
    if len(sizes) > 1 and elastic:
        raise InputError(f"resized jobs have one kind of device, not {', '.join(sizes)}; leave --elastic out")
    if len(sizes) > 1:
        rules = {n: r for n, r in rules.items() if r.order not in ONE_KIND_ORDERS}
        if not rules:
            raise InputError(
                f"rules that reserve devices serve one kind, not {', '.join(sizes)}; choose from"
                f" {', '.join(n for n, r in TRACE_RULES.items() if r.order not in ONE_KIND_ORDERS)}"
            )
    usable = {n: r for n, r in rules.items() if not elastic or r.order in ELASTIC_ORDERS}
    if not usable:
        raise InputError(
            f"none of {', '.join(rules)} resizes jobs; with elastic choose from"
            f" {', '.join(n for n, r in TRACE_RULES.items() if r.order in ELASTIC_ORDERS)}"
        )
    reference = trace_rules([against])
    streams = []
    for seed in seeds:
        stream = draw_trace_stream(trace, throughputs, seed, deadline=deadline, kinds=tuple(sizes))
        due = stream.arrival_s + deadline_scale * (stream.due_s - stream.arrival_s)
        streams.append(replace(stream, due_s=due))
    jobs = len(trace.jobs)
    found: dict[str, list[TraceOutcome]] = {}
    for i, (label, rule) in enumerate({**usable, **reference}.items()):
        progress(label, i / len(usable))
        found[label] = [
            replay_trace(s, replace(rule, resize_s=resize_s), hosts, host_kind=host_kind, elastic=elastic)
            for s in streams
        ]
    progress("the bound", 1.0)
    bound = float(np.mean([most_met(s, hosts, elastic=elastic) / jobs for s in streams]))
    impossible = np.array([1 - possible(s).mean() for s in streams])
    base = np.array([o.num_met / jobs for o in found[against]])
    rows = []
    for label in usable:
        outcomes = found[label]
        details = {
            "broken_promises": np.array([o.num_late / jobs for o in outcomes]),
            "impossible": impossible,
            "device_hours": np.array([o.device_s / 3600 for o in outcomes]),
            "mean_wait_s": np.array([_mean_wait(o, s) for o, s in zip(outcomes, streams, strict=True)]),
        }
        histories = [
            history_of_trace(o, s.arrival_s, num_devices) for o, s in zip(outcomes, streams, strict=True)
        ]
        share = np.array([o.num_met / jobs for o in outcomes])
        setting = f"{name + ', ' if name else ''}{_told(sizes)}, {deadline}{' elastic' if elastic else ''}"
        rows.append(make_row(setting, label, share, base, bound, details, histories))
    return rows


def _told(sizes: Mapping[str, int]) -> str:
    """'48 devices', or '32 v100 and 16 k80'."""
    if len(sizes) == 1:
        return f"{next(iter(sizes.values()))} devices"
    return " and ".join(f"{size} {kind}" for kind, size in sizes.items())


def _mean_wait(outcome: TraceOutcome, stream: TraceStream) -> float:
    """Mean time from the arrival to the start of jobs that started."""
    wait = outcome.start_s - stream.arrival_s
    return float(np.nanmean(wait)) if np.isfinite(wait).any() else 0.0

"""The advisor on recorded arrivals with measured curves: deadlines met beside ElasticFlow's rule and a
proven bound.

The order and the largest job that is let in are chosen on selection seeds; figures are of test seeds.
Reads Gavel's traces and measurements from ../shared.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Report
from loadmaster.advisor.bench import CELLS, THROUGHPUTS, hosts_of
from loadmaster.advisor.bounds.traces import most_met
from loadmaster.advisor.environments.trace import (
    DEADLINES,
    LEVELS,
    TraceStream,
    draw_trace_stream,
    read_throughputs,
    read_trace,
)
from loadmaster.advisor.environments.trace_engine import Order, TraceRule, host_sizes, replay_trace
from loadmaster.advisor.replay import interval

SUITE = "advisor_traces"
TRACES = Path(__file__).parents[3] / "shared" / "traces" / "gavel"
LOADS = {
    "51b7ef.trace": (0.08, 0.15, 0.3),
    "2869ce.trace": (0.7, 0.95, 1.4),
    "0e4a51.trace": (0.7, 0.95, 1.4),
}
_HIGH = 1.4
_LARGE = "0e4a51.trace"  # takes a minute a stream


def _seeds(name: str) -> tuple[range, range]:
    """Of streams to choose on, and of those that figures are told of."""
    return (
        (range(1000, 1003), range(5000, 5008)) if name == _LARGE else (range(1000, 1060), range(6000, 6030))
    )


def run(report: Report) -> None:
    """All figures of the suite."""
    for name, sizes in CELLS.items():
        for deadline in DEADLINES:
            for size, load in zip(sizes, LOADS[name], strict=True):
                for elastic in (False, True):
                    measure_cell(report, name, deadline, size, load, elastic=elastic)


def measure_cell(report: Report, name: str, deadline: str, size: int, load: float, *, elastic: bool) -> None:
    """One trace, deadlines and load: ours, chosen on selection streams, beside ElasticFlow's rule."""
    rates = read_throughputs(TRACES / THROUGHPUTS)
    trace = read_trace(TRACES / name)
    hosts = host_sizes(size, hosts_of(size))
    select, test = (
        [draw_trace_stream(trace, rates, seed, deadline=deadline) for seed in seeds] for seeds in _seeds(name)
    )
    rules = _candidates(select[0], elastic)

    def replay_all(streams: list[TraceStream], rule: TraceRule) -> tuple[Any, Any]:
        outcomes = [replay_trace(stream, rule, hosts, elastic=elastic) for stream in streams]
        return np.array([o.num_met for o in outcomes]), np.array([o.num_late for o in outcomes])

    best = max(rules, key=lambda rule: replay_all(select, rules[rule])[0].mean())
    ours, late = replay_all(test, rules[best])
    theirs, their_late = replay_all(test, TraceRule(Order.RESERVE))
    bound = np.array([most_met(stream, hosts, elastic=elastic) for stream in test])
    gain, half = interval((ours - theirs) / len(trace.jobs))
    closed = (ours - theirs).mean() / max(1e-9, (bound - theirs).mean())
    cell = f"{name} {deadline} load {load} {'elastic' if elastic else 'rigid'}"
    told = (
        f"{cell}: {best} met {ours.mean():.1f} (late {late.mean():.1f}), ElasticFlow {theirs.mean():.1f}"
        f" (late {their_late.mean():.1f}), bound {bound.mean():.1f} of {len(trace.jobs)}"
    )
    report.add(SUITE, f"{told}; gain (95 % +-{half:.4f})", gain, "share", aim=">= 0", reached=bool(gain >= 0))
    aim: dict[str, Any] = {"aim": ">= 0.25", "reached": bool(closed >= 0.25)} if load == _HIGH else {}
    report.add(SUITE, f"{cell}: of the distance to the bound", float(closed), "share", **aim)


def _candidates(stream: TraceStream, elastic: bool) -> dict[str, TraceRule]:
    """The largest set, with a limit on the work of a job; least work first; and reservations asked again."""
    areas = (stream.duration_s[:, 0, 0] * np.array(LEVELS)).min(axis=1)
    rules = {
        "ElasticFlow's own": TraceRule(Order.RESERVE),  # first, so that it stays where nothing is better
        "list": TraceRule(Order.LIST, True),
        "reserve": TraceRule(Order.RESERVE, True, retry=True),
    }
    for q in (1.0,) if elastic else (0.8, 0.85, 0.9, 0.95, 1.0):
        limit = float(np.quantile(areas, q)) if q < 1 else np.inf
        rules[f"set {q:g}"] = TraceRule(Order.SET, True, most_area_s=limit)
        if not elastic:
            rules[f"smallest {q:g}"] = TraceRule(Order.MEETS, most_area_s=limit)
    return rules

"""The advisor on recorded arrivals with measured curves: deadlines met beside ElasticFlow's rule and a
proven bound.

The order and the largest job that is let in are chosen on selection seeds; figures are of test seeds.
Reads Gavel's traces and measurements from ../shared.
"""

from pathlib import Path

import numpy as np

from benchmarks.measure import Report
from loadmaster.advisor.bounds.traces import most_met, possible
from loadmaster.advisor.environments.trace import (
    DEADLINES,
    LEVELS,
    draw_trace_stream,
    read_throughputs,
    read_trace,
)
from loadmaster.advisor.environments.trace_engine import Order, TraceRule, host_sizes, replay_trace
from loadmaster.advisor.replay import interval

SUITE = "advisor_traces"
TRACES = Path(__file__).parents[3] / "shared" / "traces" / "gavel"
SIZES = {"2869ce.trace": (12, 9, 6), "0e4a51.trace": (64, 48, 32)}
LOADS = (0.7, 0.95, 1.4)


def run(report: Report) -> None:
    """All figures of the suite."""
    rates = read_throughputs(TRACES / "simulation_throughputs.json")
    for name, sizes in SIZES.items():
        trace = read_trace(TRACES / name)
        for deadline in DEADLINES:
            for size, load in zip(sizes, LOADS, strict=True):
                hosts = host_sizes(size, 8 if size >= 32 else 4)
                select = [draw_trace_stream(trace, rates, s, deadline=deadline) for s in range(1000, 1004)]
                test = [draw_trace_stream(trace, rates, s, deadline=deadline) for s in range(5000, 5010)]
                areas = (select[0].duration_s[:, 0, 0] * np.array(LEVELS)).min(axis=1)
                for elastic in (False, True):
                    quantiles = (0.9, 1.0) if elastic else (0.75, 0.8, 0.85, 0.9, 1.0)
                    limits = {f"{q:g}": np.quantile(areas, q) if q < 1 else np.inf for q in quantiles}
                    orders = (
                        (Order.LIST, Order.RESERVE) if elastic else (Order.LIST, Order.MEETS, Order.RESERVE)
                    )
                    rules = {
                        f"{order.name.lower()} {q}": TraceRule(
                            order, order == Order.LIST, True, most_area_s=limit
                        )
                        for order in orders
                        for q, limit in limits.items()
                    }

                    def met(streams, rule, elastic=elastic, hosts=hosts):  # type: ignore[no-untyped-def]
                        outs = [replay_trace(s, rule, hosts, elastic=elastic) for s in streams]
                        return np.array([o.num_met for o in outs]), np.array([o.num_late for o in outs])

                    best = max(rules, key=lambda n: met(select, rules[n])[0].mean())
                    ours, late = met(test, rules[best])
                    theirs, their_late = met(test, TraceRule(Order.RESERVE))
                    bound = np.array([most_met(s, size, elastic=elastic) for s in test[:4]])
                    gain, half = interval((ours - theirs) / len(trace.jobs))
                    closed = (ours - theirs)[:4].mean() / max(1e-9, (bound - theirs[:4]).mean())
                    cell = f"{name} {deadline} load {load} {'elastic' if elastic else 'rigid'}"
                    told = (
                        f"{cell}: {best} met {ours.mean():.1f} (late {late.mean():.1f}),"
                        f" ElasticFlow {theirs.mean():.1f}"
                        f" (late {their_late.mean():.1f}), bound {bound.mean():.1f}, possible"
                        f" {np.mean([possible(s).sum() for s in test]):.1f} of {len(trace.jobs)}"
                    )
                    report.add(
                        SUITE,
                        f"{told}; gain (95 % +-{half:.4f})",
                        gain,
                        "share",
                        aim=">= 0",
                        reached=gain + half >= 0,
                    )
                    aim = {"aim": ">= 0.25", "reached": bool(closed >= 0.25)} if load == LOADS[-1] else {}
                    report.add(SUITE, f"{cell}: of the distance to the bound", float(closed), "share", **aim)

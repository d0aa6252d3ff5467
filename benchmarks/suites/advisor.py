"""The advisor in the published world: blocking, bounds and speed. Processor seconds throughout.

Bases of rollouts are chosen on selection seeds; figures are of test seeds. Reads PipeDream's profiles from
../shared.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import Report
from loadmaster.advisor.advise import advise
from loadmaster.advisor.bounds.hindsight import best_found
from loadmaster.advisor.bounds.ramp import least_blocking
from loadmaster.advisor.environments.blocks import all_blocks
from loadmaster.advisor.environments.engine import Kind, Rule, replay, replay_many
from loadmaster.advisor.environments.profile import read_profiles
from loadmaster.advisor.environments.rules import COMPAT
from loadmaster.advisor.environments.streams import DISTRIBUTIONS, Stream, draw_stream
from loadmaster.advisor.environments.timing import split_counts, time_step
from loadmaster.advisor.environments.world import World, _servers_of
from loadmaster.advisor.jobs.curve import measured_curve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState, host_layout
from loadmaster.advisor.policies.registry import Run
from loadmaster.advisor.replay import BASELINES, CONSTANTS, interval, table_rules, worlds

SUITE = "advisor"
GRAPHS = Path(__file__).parents[3] / "shared" / "graphs" / "pipedream"
SELECTION = range(1000, 1020)
TEST = range(9000, 9060)
PACML = dict(zip(DISTRIBUTIONS, (0.2038, 0.2567, 0.1166, 0.0992), strict=True))


def run(report: Report) -> None:
    """All figures of the suite."""
    made = worlds(GRAPHS)
    _speed(report, made)
    for name in ("compat", "own", "fixed"):
        _blocking(report, made[name], name)


def _candidates(label: str, d: str) -> dict[str, Rule]:
    """Rollouts over the bases that are good on a distribution, and the best constants."""
    bases = {
        "A": {"4, or next": Rule(Kind.MEETS, 4, False)},
        "B": {"smallest >= 8": Rule(Kind.MEETS, 8)},
        "C": {"const 4": Rule(Kind.CONSTANT, 4)},
        "D": {"2, or next": Rule(Kind.MEETS, 2, False)},
    }[d]
    if label != "compat":
        floors = {"A": (8, 4), "B": (8,), "C": (4, 8), "D": (1, 2)}[d] if label == "own" else (1, 2)
        bases = {f"best fit >= {k}": Rule(Kind.BEST_FIT, k) for k in floors}
    looks = ((30, 60),) if label == "compat" else ((30, 20),)
    return bases | {
        f"rollout {h}x{f} on {name}": replace(rule, rollout=(h, f))
        for name, rule in bases.items()
        for h, f in looks
    }


def _blocked(world: World, streams: list[Stream], rule: Rule) -> np.ndarray:
    if not rule.rollout[0]:
        counts = replay_many(world, streams, [rule])[:, 0]
        return counts[:, 1:5].sum(axis=1) / [len(s.model) for s in streams]
    return np.array([replay(world, s, rule, seed=i).blocking for i, s in enumerate(streams)])


def _blocking(report: Report, world: World, label: str) -> None:
    for d in DISTRIBUTIONS:
        half = 1 if label == "compat" else 2
        select = [draw_stream(d, seed) for seed in SELECTION[:: 2 * half]]
        test = [draw_stream(d, seed) for seed in TEST[::half]]
        found = {n: _blocked(world, select, r).mean() for n, r in (_candidates(label, d) | CONSTANTS).items()}
        rules = _candidates(label, d) | CONSTANTS
        best = min(found, key=found.__getitem__)
        constant = min(CONSTANTS, key=found.__getitem__)
        share, base = _blocked(world, test, rules[best]), _blocked(world, test, rules[constant])
        mean, half = interval(share)
        paired, paired_half = interval(share - base)
        name = f"{label} {d}"
        if label == "compat":
            aim = PACML[d]
            report.add(
                SUITE,
                f"{name}: {best}, blocking, upper 95 % limit",
                mean + half,
                "share",
                aim=f"< {aim}",
                reached=mean + half < aim,
            )
        report.add(SUITE, f"{name}: {best}, blocking (95 % +-{half:.4f})", mean, "share")
        report.add(
            SUITE,
            f"{name}: less {constant}, paired (95 % +-{paired_half:.4f})",
            paired,
            "share",
            aim="< 0",
            reached=paired + paired_half < 0,
        )
        bounds = [least_blocking(world, s) for s in test[:10]]
        report.add(
            SUITE, f"{name}: bound by shared time", float(np.mean([b.shared_time for b in bounds])), "share"
        )
        report.add(
            SUITE, f"{name}: bound at every moment", float(np.mean([b.every_moment for b in bounds])), "share"
        )
        report.add(SUITE, f"{name}: bound by geometry", float(np.mean([b.geometry for b in bounds])), "share")
        if label == "compat":
            known = [best_found(world, s, [rules[best]], tries=400_000).blocking for s in test[:5]]
            report.add(SUITE, f"{name}: found in hindsight", float(np.mean(known)), "share")
        for other, rule in table_rules(world).items():
            report.add(SUITE, f"{name}: {other}", float(_blocked(world, test, rule).mean()), "share")


def _speed(report: Report, made: dict[str, World]) -> None:
    streams = [draw_stream("A", seed) for seed in range(50)]
    for label, world in made.items():
        for name in ("Para_max", "Para_min", "smallest"):
            replay(world, streams[0], BASELINES[name])  # compiled
            began = time.process_time()
            for stream in streams:
                replay(world, stream, BASELINES[name])
            each = 50 * 1000 / (time.process_time() - began)
            report.add(
                SUITE,
                f"{label} {name}: decisions per cpu second, one stream at a time",
                each,
                "1/s",
                aim=">= 2e5",
                reached=each >= 2e5,
            )
            replay_many(world, streams[:1], [BASELINES[name]])
            began = time.process_time()
            replay_many(world, streams, [BASELINES[name]])
            each = 50 * 1000 / (time.process_time() - began)
            report.add(
                SUITE,
                f"{label} {name}: decisions per cpu second, batched",
                each,
                "1/s",
                aim=">= 2e6",
                reached=each >= 2e6,
            )
            published = {"Para_max": 0.4, "Para_min": 8.0}.get(name)
            if published and label == "compat":
                report.add(
                    SUITE,
                    f"compat {name}: times the published simulator's {published}/s",
                    each / published,
                    "x",
                )
    rule = Rule(Kind.CONSTANT, 4, rollout=(30, 20))
    replay(made["compat"], streams[0], rule)
    began = time.process_time()
    for stream in streams[:5]:
        replay(made["compat"], stream, rule)
    each = (time.process_time() - began) / 5000
    report.add(
        SUITE, "rollout 30 x 20, one decision", 1e3 * each, "cpu ms", aim="<= 0.3", reached=each <= 3e-4
    )
    _time_exact(report)
    _time_tables(report)
    for name in ("smallest", "best_fit", "shadow_price", "elasticflow", "para_min", "rollout"):
        _time_advice(report, name)


def _time_exact(report: Report) -> None:
    """One simulated step of each model on 16 servers, edge by edge."""
    slowest = 0.0
    for graph in read_profiles(GRAPHS):
        counts = split_counts(graph, 16)
        servers = _servers_of(counts, 193, COMPAT, all_blocks())
        time_step(graph, counts, servers, COMPAT)
        began = time.process_time()
        for _ in range(5):
            time_step(graph, counts, servers, COMPAT)
        slowest = max(slowest, (time.process_time() - began) / 5)
    report.add(
        SUITE,
        "exact timing of a model on 16 servers, the slowest of five",
        1e3 * slowest,
        "cpu ms",
        aim="<= 20",
        reached=slowest <= 0.02,
    )


def _time_tables(report: Report) -> None:
    """60 seeds x 4 distributions x 12 policies x 2 placers, worlds built and streams drawn."""
    began = time.process_time()
    made = worlds(GRAPHS)
    for label in ("compat", "own"):
        rules = list(table_rules(made[label]).values())[:12]
        rules += [Rule(Kind.MEETS, k, False) for k in (1, 2, 4, 8)][: 12 - len(rules)]
        for d in DISTRIBUTIONS:
            replay_many(made[label], [draw_stream(d, seed) for seed in range(60)], rules)
    taken = time.process_time() - began
    report.add(SUITE, "60 x 4 x 12 x 2 tables, end to end", taken, "cpu s", aim="<= 10", reached=taken <= 10)


def _time_advice(report: Report, name: str) -> None:
    """Advice on one job with 1024 devices on which 100 jobs run."""
    layout, rng = host_layout([8] * 128), np.random.default_rng(0)
    curve = measured_curve({1: 8000.0, 2: 4100.0, 4: 2300.0, 8: 1400.0, 16: 900.0, 32: 700.0})
    coming = tuple(Job("may come", curve, float(limit)) for limit in (1000, 2000, 5000, 9000))
    taken = []
    for i in range(320):
        free_at = np.zeros(1024)
        if i % 2:  # jobs on whole hosts
            for _ in range(100):
                h = int(rng.integers(128))
                free_at[8 * h : 8 * h + 8] = rng.random() * 1e4
        else:  # jobs scattered over all devices, none of which is free
            for part in np.array_split(rng.permutation(1024), 100):
                free_at[part] = rng.random() * 1e4
        state = ClusterState(layout, free_at, price=1e-5)
        job = Job("x", curve, float(rng.random() * 9000) + 1)
        began = time.process_time()
        advise(job, state, by=name, run=Run(future=coming, mean_gap_s=50.0))
        taken += [time.process_time() - began] * (i >= 20)
    p99 = float(np.quantile(taken, 0.99))
    report.add(
        SUITE,
        f"advise by {name}, 1024 devices, 100 jobs, p99",
        1e3 * p99,
        "cpu ms",
        aim="<= 10",
        reached=p99 <= 0.01,
    )

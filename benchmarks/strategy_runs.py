"""Strategies on real processes: uneven shares on unequal devices, and factors over a slow link. Measured.

    OMP_NUM_THREADS=1 python -m benchmarks.strategy_runs --out benchmarks/results/strategy-runs.json

Shares: two and four processes, some of them twice as slow; that is emulated by sleeping for each row, so that
two cores are enough. Equal rows against rows by speed, both predicted by the simulator from the time of
a row. Factors: one layer of 4096 x 4096 on two emulated hosts, 100 Mbit/s between them (network namespaces:
root, `ip` and `tc`), gradients met by sums or by factors, with few rows and with more than pay off; and what
the planner chooses for each.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

import loadmaster as lm
from benchmarks.measure import Report, machine
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Phase
from loadmaster.core.problem import Origin, Problem
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync, share_rows
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.runtime.distributed.hosts import why_not_here
from loadmaster.runtime.distributed.launch import LaunchOptions, launch
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
from loadmaster.runtime.distributed.strategy.rank import StrategyOptions
from loadmaster.strategies.ask import make_evaluator
from loadmaster.strategies.predict import predict
from loadmaster.strategies.scoring.uniform_states import every_device, uniform_state

SUITE = "strategies"
ROW_S, SLOW = 0.04, "LOADMASTER_BENCHMARK_SLOWDOWN"  # seconds of a row, forward and backward each
BATCH, STEPS = 12, 6
WIDTH, FEW, MANY, LINK = 4096, 96, 5120, 12.5e6  # of the layer; rows; bytes a second
AIM_SHARES, AIM_ERROR, AIM_FACTORS = 1.25, 0.15, 10.0


class _Sleep(torch.autograd.Function):
    """Takes a time for each row, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _sleep(len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _sleep(len(grads[0]))
        return grads[0]


def _sleep(rows: int) -> None:
    factor = float(os.environ.get(SLOW, "0"))
    if factor:
        time.sleep(ROW_S * factor * rows)


class Sleepy(nn.Module):
    """A layer whose rows take their time; without a slow-down (in the parent) they take none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        x = self.layer(x)
        return _Sleep.apply(x) if SLOW in os.environ else x


class Wide(nn.Module):
    """One wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return self.layer(x)


def square(out: torch.Tensor) -> torch.Tensor:
    """The mean of squares."""
    return (out**2).mean()


def _data_parallel(
    problem: Problem, rows: tuple[int, ...], *, factors: tuple[str, ...] = ()
) -> StrategyAnswer:
    graph = problem.graph
    number = {name: op for op, name in enumerate(graph.op_name)}
    group = OpGroup(
        np.arange(graph.num_ops),
        tuple(range(len(rows))),
        rows,
        Mode.REPLICATE,
        Sync.ALLREDUCE,
        sfb=tuple(number[name] for name in factors),
    )
    strategy = Strategy("by hand", graph.digest, problem.cluster.digest, sum(rows), (group,))
    return predict(problem, strategy)


def _unequal(slowdowns: tuple[float, ...]) -> Problem:
    """Devices of two kinds; the time of a row is that of the layer's ops, all others take none."""
    model, x = Sleepy(), torch.randn(BATCH, 16)
    graph = lm.capture(model, (x,), loss=square, optimizer="sgd")
    cluster = parse_cluster(", ".join(f"cpu#{at}-2GB" for at in range(len(slowdowns))))
    cluster = replace(
        cluster,
        kind=np.array([int(one > 1) for one in slowdowns]),
        kind_name=("quick", "slow"),
        flops_per_s=np.repeat(cluster.flops_per_s, 2, axis=0),
        memory_bytes_per_s=np.repeat(cluster.memory_bytes_per_s, 2),
        overhead_s=np.zeros(2),
        on_host=np.ones(2, dtype=np.bool_),
        engine=np.arange(len(slowdowns)),
    )
    work = int(np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.flops > 0))[0])
    back = int(np.flatnonzero(graph.mirror == work)[0])
    seconds = np.zeros((graph.num_ops, 2))
    seconds[[work, back]] = np.array([1.0, max(slowdowns)]) * ROW_S * BATCH
    plain = lm.problem(graph, cluster)
    costs = replace(plain.costs, compute_s=seconds, origin=np.full_like(plain.costs.origin, Origin.GIVEN))
    return replace(plain, costs=costs)


def _step_s(answer: StrategyAnswer, slowdowns: tuple[float, ...]) -> float:
    options = LaunchOptions(
        TrainOptions(loss=square, optimizer="sgd"),
        environments=[{SLOW: str(one)} for one in slowdowns],
        strategy=StrategyOptions(verify=False),
        threads=1,
    )
    batch, took = torch.randn(BATCH, 16), []
    with launch(answer, Sleepy(), options) as run:
        for _ in range(STEPS):
            begun = time.perf_counter()
            run.step(batch)
            took.append(time.perf_counter() - begun)
    return median(took[1:])


def shares(report: Report) -> None:
    """Equal rows against rows by speed."""
    for slowdowns in ((1.0, 2.0), (1.0, 1.0, 2.0, 2.0)):
        problem, what = _unequal(slowdowns), f"{len(slowdowns)} processes"
        each = {
            "equal": share_rows(BATCH, [1.0] * len(slowdowns)),
            "by speed": share_rows(BATCH, [1 / one for one in slowdowns]),
        }
        took = {}
        for name, rows in each.items():
            answer = _data_parallel(problem, rows)
            took[name] = _step_s(answer, slowdowns)
            error = answer.score_s / took[name] - 1.0
            report.add(SUITE, f"{what}, rows {name} {rows}: step", took[name], "s")
            good = abs(error) <= AIM_ERROR
            report.add(
                SUITE,
                f"{what}, rows {name}: predicted / measured - 1",
                error,
                "",
                aim="within 15 %",
                reached=good,
            )
        gain = took["equal"] / took["by speed"]
        good = gain >= AIM_SHARES
        report.add(SUITE, f"{what}: equal / by speed", gain, "x", aim=f">= {AIM_SHARES}", reached=good)


def _two_hosts() -> Cluster:
    """Each host's port is as fast as the link, in either direction."""
    cluster = parse_cluster("cpu#0-4GB, cpu#1-4GB")
    route = np.full((2, 2, 1), -1)
    route[0, 1], route[1, 0] = 0, 1
    return replace(
        cluster,
        host=np.array([0, 1]),
        engine=np.array([0, 1]),
        route=route,
        link_name=("0 to 1", "1 to 0"),
        link_bytes_per_s=np.full(2, LINK),
        link_latency_s=np.full(2, 1e-4),
    )


def _wide_problem(rows: int) -> Problem:
    with torch.device("meta"):
        model, x = Wide(), torch.randn(rows, WIDTH)
    graph = lm.capture(model, (x,), loss=square, optimizer="sgd")
    return lm.problem(graph, _two_hosts())


def _met(answer: StrategyAnswer, rows: int, steps: int) -> tuple[float, float, int]:
    """Median step, median time of backward pass and meeting, and bytes sent."""
    torch.manual_seed(0)
    options = LaunchOptions(
        TrainOptions(loss=square, optimizer="sgd"),
        strategy=StrategyOptions(verify=False, compare_every=0),
        threads=1,
        timeout_s=240.0,
        emulate=True,
    )
    batch, took, meeting, sent = torch.randn(rows, WIDTH), [], [], 0
    with launch(answer, Wide(), options) as run:
        for _ in range(steps):
            begun = time.perf_counter()
            run.step(batch)
            took.append(time.perf_counter() - begun)
            spans = [span for report in run.reports() for span in report["spans"]]
            meeting.append(
                max(span[4] for span in spans if span[0] == "REDUCE")
                - min(span[3] for span in spans if span[0] == "B")
            )
        sent = sum(run.sent_bytes().values())  # type: ignore[union-attr]
    return median(took[1:]), median(meeting[1:]), sent


def _uses_factors(problem: Problem, rows: int) -> bool:
    """Whether the planner makes the gradient of factors where both hosts share the rows."""
    evaluator = make_evaluator(problem, rows)
    state = uniform_state(evaluator, every_device(evaluator, "replicate", "allreduce"))
    return bool(evaluator.evaluate(state).factors)


def factors(report: Report) -> None:
    """Sums against factors over 100 Mbit/s."""
    for rows, steps in ((FEW, 4), (MANY, 2)):
        problem, half = _wide_problem(rows), (rows // 2, rows // 2)
        found = {}
        for name, made in {"sums": (), "factors": ("layer.weight",)}.items():
            answer = _data_parallel(problem, half, factors=made)
            step, meeting, sent = _met(answer, rows, steps)
            found[name] = meeting
            what = f"{WIDTH} x {WIDTH}, {rows} rows, 100 Mbit/s, {name}"
            report.add(SUITE, f"{what}: step", step, "s")
            report.add(SUITE, f"{what}: backward and meeting", meeting, "s")
            report.add(SUITE, f"{what}: sent by both", sent / 1e6, "MB")
            report.add(SUITE, f"{what}: predicted step", answer.score_s, "s")
        gain = found["sums"] / found["factors"]
        few = rows == FEW
        aim, good = (f">= {AIM_FACTORS:g}", gain >= AIM_FACTORS) if few else ("< 1", gain < 1)
        report.add(SUITE, f"{rows} rows: sums / factors", gain, "x", aim=aim, reached=good)
        uses = _uses_factors(problem, rows)
        word = "chosen" if few else "not chosen"
        report.add(SUITE, f"{rows} rows: factors are {word}", float(uses), "", aim=word, reached=uses == few)


def main() -> None:
    """All figures, and the result file."""
    words = argparse.ArgumentParser()
    words.add_argument("--out")
    words.add_argument("--only", choices=("shares", "factors"))
    asked = words.parse_args()
    report = Report()
    if asked.only != "factors":
        shares(report)
    why = why_not_here()
    if asked.only != "shares":
        if why:
            print(f"no emulated hosts: {why}")
        else:
            factors(report)
    if asked.out:
        found = {"machine": machine(), "figures": report.figures}
        Path(asked.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

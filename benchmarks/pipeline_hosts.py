"""Two emulated hosts at 1 Gbit/s and 100 Mbit/s: does the plan change with the link, is its order true?

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_hosts --out benchmarks/results/pipeline-hosts.json

A net of seven wide layers (4 MiB between them), a pool, and a layer on the rest (256 KiB). Candidates: cut in
the middle of the work, cut at the pool, one host. At each speed the planner is asked, all three are
predicted, and all three are run in network namespaces (root, `ip` and `tc`). For an idle machine.
"""

import argparse
import json
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

import loadmaster as lm
from benchmarks.measure import machine
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan

TOKENS, WIDTH, INNER, POOL, BATCHES = 2048, 512, 4096, 16, 8
SPEEDS = {"1gbit": "1gbit", "100mbit": "100mbit"}
CUTS = {"middle": 4, "at the pool": 8, "one host": None}


class Wide(nn.Module):
    """A layer on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return torch.relu(self.linear(x))


class Pool(nn.Module):
    """The mean of every few tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fewer tokens."""
        return x.unflatten(1, (-1, POOL)).mean(2)


class Narrow(nn.Module):
    """As much work on few tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return self.down(torch.relu(self.up(x)))


def net() -> nn.Module:
    """Seven wide layers, a pool, a narrow one."""
    return nn.Sequential(*(Wide() for _ in range(7)), Pool(), Narrow())


def square(out: torch.Tensor) -> torch.Tensor:
    """A loss that costs nothing."""
    return out.square().mean()


def sgd(weights: list[Any]) -> torch.optim.Optimizer:
    """Small steps."""
    return torch.optim.SGD(weights, lr=1e-4)


def candidate(problem: Any, cut: int | None) -> Placement:
    """A plan that is cut before a module; None: all on one host."""
    graph = problem.graph
    stage = np.zeros(graph.num_ops, dtype=np.int32)
    for op, module in enumerate(graph.module):
        head = module.split(".")[0]
        late = not head.isdigit() and graph.op_kind[op] != "input"
        stage[op] = cut is not None and (late or (head.isdigit() and int(head) >= cut))
    for op, name in enumerate(graph.op_name):
        if graph.phase[op] == 3 and name.split(".")[0].isdigit():
            stage[op] = cut is not None and int(name.split(".")[0]) >= cut
    for op in np.flatnonzero(graph.mirror >= 0):
        stage[op] = stage[graph.mirror[op]]
    count = 1 if cut is None else 2
    pipeline = Pipeline(
        stage=stage,
        replicas=np.ones(count),
        num_microbatches=BATCHES,
        schedule="1f1b",
        in_flight=np.arange(count, 0, -1),
        stage_s=np.zeros(count),
        rank=tuple(range(count)),
        replica_device=(tuple(range(count)),),
        replica_microbatches=(BATCHES,),
    )
    order = np.arange(graph.num_ops, dtype=np.int32)
    return lm.plan(problem, algorithm=Plan(stage, order, np.zeros(graph.num_ops, dtype=bool), pipeline))


def run(placement: Placement, steps: int = 3) -> float:
    """Median seconds of a step."""
    torch.manual_seed(0)
    batch, seconds = torch.randn(BATCHES, TOKENS, WIDTH), []
    several = len(set(placement.problem.cluster.host.tolist())) > 1
    with lm.launch(placement, net(), loss=square, optimizer=sgd, threads=1, emulate=several) as running:
        for _ in range(steps + 1):
            begun = time.perf_counter()
            running.step(batch)
            seconds.append(time.perf_counter() - begun)
    return median(seconds[1:])


def describe(placement: Placement) -> str:
    """Schedule, replicas and the modules of each stage."""
    plan, graph = placement.plan, placement.problem.graph
    assert plan is not None
    assert plan.pipeline is not None
    stage, words = plan.pipeline.stage, []
    for s in range(plan.pipeline.num_stages):
        own = np.flatnonzero((stage == s) & (graph.phase == 0))
        words.append("+".join(sorted({m for n in own if (m := graph.module[n].split(".")[0]).isdigit()})))
    replicas = int(plan.pipeline.replicas[0])
    return f"{plan.pipeline.schedule} x{replicas}: modules {' | '.join(words)}"


def main() -> None:
    """Both speeds, three plans each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--measure", type=float, default=20.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = net(), []
    graph = lm.capture(model, (torch.randn(1, TOKENS, WIDTH),), loss=square, optimizer="sgd")
    local = lm.problem(graph, "cpu#0-8GB, cpu#1-8GB", costs="measured", measure_budget=asked.measure)
    for name, speed in SPEEDS.items():
        problem = lm.problem(
            graph, f"cpu#0-8GB | cpu#0-8GB ; inter={speed}", "step", pipeline=f"auto:{BATCHES}"
        )
        first = local.costs.compute_s[:, :1].repeat(problem.costs.compute_s.shape[1], axis=1)
        problem = replace(problem, costs=replace(problem.costs, compute_s=first))
        chosen = lm.plan(problem, algorithm="pipeline", budget=10.0)
        row: dict[str, Any] = {"link": name, "chosen_s": chosen.score_s, "chosen": describe(chosen)}
        plans = {words: candidate(problem, cut) for words, cut in CUTS.items()}
        row["predicted_s"] = {words: plan.score_s for words, plan in plans.items()}
        row["measured_s"] = {words: run(plan) for words, plan in plans.items()}
        row["error"] = {words: row["predicted_s"][words] / row["measured_s"][words] - 1 for words in plans}
        row["same_order"] = sorted(plans, key=row["predicted_s"].get) == sorted(
            plans, key=row["measured_s"].get
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
    head = {
        "date": str(date.today()),
        "machine": {**machine(), "command": "python -m benchmarks.pipeline_hosts"},
        "torch": str(torch.__version__),
        "script": "benchmarks/pipeline_hosts.py",
    }
    if asked.out:
        Path(asked.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Does the simulator rank strategies as processes do? Sixty random ones on four emulated hosts. Measured.

    OMP_NUM_THREADS=1 python -m benchmarks.strategy_ranking --out benchmarks/results/strategy-ranking.json

Four processes, each on an emulated host (network namespaces: root, `ip` and `tc`) whose port is slow; two of
them compute at half and at a third of the speed, which is emulated by sleeping for each row. Every
strategy shares the rows at random and picks at random how gradients meet: a sum, a server, or factors for
some layers. All run in the same processes, one after the other.
"""

import argparse
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import nn

import loadmaster as lm
from benchmarks.measure import Report, machine
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Phase
from loadmaster.core.io import decode, encode
from loadmaster.core.problem import Origin, Problem
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.runtime.distributed.hosts import HostNetwork, why_not_here
from loadmaster.runtime.distributed.peers import Meeting, meet
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.strategy.rank import StrategyOptions, StrategyRank
from loadmaster.runtime.distributed.transports import Waits
from loadmaster.strategies.predict import predict

SUITE = "strategies"
SLOWDOWNS = (1.0, 1.0, 2.0, 3.0)
ROW_S, WIDTH, LAYERS, BATCH = 0.006, 768, 4, 16  # seconds of a row in a layer, either way
LINK, LATENCY_S = 50e6, 1e-4  # bytes a second of each host's port
PLANS, STEPS, AIM = 60, 3, 0.9


class _Sleep(torch.autograd.Function):
    """Takes a time for each row, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_s: float) -> torch.Tensor:
        ctx.row_s = row_s
        time.sleep(row_s * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.row_s * len(grads[0]))
        return grads[0], None


class Chain(nn.Module):
    """Layers whose rows take their time; in the parent (`row_s` 0) they take none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.row_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
            if self.row_s:
                x = _Sleep.apply(x, self.row_s)
        return x


def square(out: torch.Tensor) -> torch.Tensor:
    """The mean of squares."""
    return (out**2).mean()


@dataclass
class Case:
    """A strategy as it travels to the processes."""

    answer: bytes
    model: Chain
    batch: torch.Tensor


class Runner:
    """In a worker: runs one strategy after the other."""

    def __init__(self, meeting: Meeting) -> None:
        torch.set_num_threads(1)
        self.meeting = meeting
        meet(meeting)

    def __call__(self, command: str, case: Case) -> list[float]:
        """Seconds of each step."""
        answer = decode(case.answer)
        assert isinstance(answer, StrategyAnswer)
        rank, took = self.meeting.rank, []
        case.model.row_s = ROW_S * SLOWDOWNS[rank]
        options = TrainOptions(loss=square, optimizer="sgd")
        extras = StrategyOptions(verify=False, compare_every=0)
        waits = Waits(rank, self.meeting.timeout_s)
        run = StrategyRank(answer, case.model, options, extras, rank, torch.device("cpu"), waits)
        for _ in range(1 + STEPS):
            dist.barrier()
            begun = time.perf_counter()
            run.step((case.batch,), {})
            took.append(time.perf_counter() - begun)
        return took[1:]


def emulated_cluster() -> Cluster:
    """Hosts of one device each; what leaves a host shares its port."""
    count = len(SLOWDOWNS)
    kinds = sorted(set(SLOWDOWNS))
    cluster = parse_cluster(", ".join(f"cpu#{at}-4GB" for at in range(count)))
    route = np.repeat(np.arange(count)[:, None, None], count, axis=1)
    route[np.arange(count), np.arange(count)] = -1
    return replace(
        cluster,
        kind=np.array([kinds.index(one) for one in SLOWDOWNS]),
        kind_name=tuple(f"speed 1/{one:g}" for one in kinds),
        flops_per_s=np.repeat(cluster.flops_per_s, len(kinds), axis=0),
        memory_bytes_per_s=np.repeat(cluster.memory_bytes_per_s, len(kinds)),
        overhead_s=np.zeros(len(kinds)),
        on_host=np.ones(len(kinds), dtype=np.bool_),
        host=np.arange(count),
        engine=np.arange(count),
        route=route,
        link_name=tuple(f"port of {at}" for at in range(count)),
        link_bytes_per_s=np.full(count, LINK),
        link_latency_s=np.full(count, LATENCY_S),
    )


def emulated_problem() -> Problem:
    """The chain, whose layers take what they sleep."""
    graph = lm.capture(Chain(), (torch.randn(BATCH, WIDTH),), loss=square, optimizer="sgd")
    kinds = np.array(sorted(set(SLOWDOWNS)))
    layers = np.flatnonzero(
        (graph.phase == Phase.FORWARD) & np.isin(graph.op_kind, ("linear", "mm", "addmm"))
    )
    assert len(layers) == LAYERS
    seconds = np.zeros((graph.num_ops, len(kinds)))
    for layer in layers.tolist():
        backward = np.flatnonzero(graph.mirror == layer)
        seconds[layer] = kinds * ROW_S * BATCH
        seconds[backward[0]] = kinds * ROW_S * BATCH
    plain = lm.problem(graph, emulated_cluster())
    costs = replace(plain.costs, compute_s=seconds, origin=np.full_like(plain.costs.origin, Origin.GIVEN))
    return replace(plain, costs=costs)


def random_strategy(problem: Problem, rng: np.random.Generator) -> StrategyAnswer:
    """Rows and ways to meet at random."""
    graph, count = problem.graph, len(SLOWDOWNS)
    cuts = np.sort(rng.choice(np.arange(1, BATCH), count - 1, replace=False))
    rows = tuple(int(n) for n in np.diff([0, *cuts, BATCH]))
    way = rng.choice(("sum", "server", "factors"))
    weights = [op for op, name in enumerate(graph.op_name) if name.endswith(".weight")]
    made = tuple(op for op in weights if way == "factors" and rng.random() < 0.6)
    server = int(rng.integers(count)) if way == "server" else -1
    group = OpGroup(
        np.arange(graph.num_ops),
        tuple(range(count)),
        rows,
        Mode.REPLICATE,
        Sync.PS if way == "server" else Sync.ALLREDUCE,
        server=server,
        sfb=made,
    )
    name = f"{way} {rows}" + (
        f" on {server}" if way == "server" else f" {len(made)} of {len(weights)}" * bool(made)
    )
    strategy = Strategy(name, graph.digest, problem.cluster.digest, BATCH, (group,))
    return predict(problem, strategy)


def rank_strategies(report: Report) -> list[dict[str, Any]]:
    """Each strategy with what was predicted and measured."""
    problem, rng, model = emulated_problem(), np.random.default_rng(0), Chain()
    count, batch = len(SLOWDOWNS), torch.randn(BATCH, WIDTH)
    found: list[dict[str, Any]] = []
    with HostNetwork.of(problem.cluster) as network:
        store = dist.TCPStore("0.0.0.0", 0, count, is_master=True, wait_for_workers=False)
        specs = [Meeting(rank, count, network.address, store.port, 120.0, "eth0") for rank in range(count)]
        group = WorkerGroup(Runner, specs, [network.space(host) for host in range(count)])
        group.start()
        try:
            for _ in range(PLANS):
                answer = random_strategy(problem, rng)
                took = group.ask("case", Case(encode(answer), copy.deepcopy(model), batch))
                step = median(max(times) for times in zip(*took, strict=True))
                found.append(
                    {"strategy": answer.strategy.name, "predicted_s": answer.score_s, "measured_s": step}
                )
        finally:
            group.close()
    predicted = np.array([one["predicted_s"] for one in found])
    measured = np.array([one["measured_s"] for one in found])
    what = f"{PLANS} random strategies on 4 emulated hosts"
    order = float(spearmanr(predicted, measured).statistic)
    report.add(
        SUITE, f"{what}: Spearman of predicted and measured", order, "", aim=f">= {AIM}", reached=order >= AIM
    )
    error = float(np.median(np.abs(predicted / measured - 1)))
    report.add(SUITE, f"{what}: median |predicted / measured - 1|", 100 * error, "%")
    report.add(SUITE, f"{what}: slowest / quickest, measured", float(measured.max() / measured.min()), "x")
    chosen = float(measured[predicted.argmin()] / measured.min())
    report.add(SUITE, f"{what}: predicted best / measured best, measured", chosen, "x")
    return found


def main() -> None:
    """The figures, and the result file."""
    words = argparse.ArgumentParser()
    words.add_argument("--out")
    asked = words.parse_args()
    why = why_not_here()
    if why:
        raise SystemExit(f"no emulated hosts: {why}")
    report = Report()
    plans = rank_strategies(report)
    if asked.out:
        found = {"machine": machine(), "figures": report.figures, "plans": plans}
        Path(asked.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

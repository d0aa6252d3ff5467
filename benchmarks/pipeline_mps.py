"""A GPU in unequal slices (MPS: 50, 25 and 12 % with memory caps): pipelines planned, run and compared.

    python -m benchmarks.pipeline_mps --seconds 250 --out result.json

1. Each slice runs a layer, the head and the embedding, alone and as all slices do at once: seconds on each.
2. Those scale the costs of ops on three kinds of device; `pipeline` plans, `pipeline_equal`,
   `pipeline_by_speed` and the best slice alone are what it is compared with, then random cuts for the rank
   correlation of predicted and measured, as far as the time goes.
3. Every plan runs by `lm.launch`, each process under its own share; the median of steps is written down.
"""

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import loadmaster as lm
from benchmarks.pipeline_gpt import LAYERS, Gpt, inputs, sgd
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.runtime.distributed.launch import LaunchOptions, launch
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions

SHARES, GIB, ROWS, BATCHES = (50, 25, 12), (64, 32, 16), 4, 8
_WARM, _STEPS = 2, 5


def environment(share: int) -> dict[str, str]:
    """Of a process with a share of the GPU."""
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}


def _probe(share: int, pipe: Any, start: Any) -> None:
    """Seconds of forward and backward of embedding, layer and head, all slices at once."""
    os.environ.update(environment(share))
    torch.cuda.set_device(0)
    model = Gpt(layers=1).cuda()
    tokens, labels = (one.cuda() for one in inputs(ROWS))
    x = torch.randn(ROWS, tokens.shape[1], 1024, device="cuda", requires_grad=True)
    parts = {
        "embed": lambda: model.embed(tokens).sum(),
        "layers": lambda: model.layers[0](x).sum(),
        "head": lambda: torch.nn.functional.cross_entropy(
            model.head(model.norm(x)).flatten(0, 1), labels.flatten()
        ),
    }
    found = {}
    for name, part in parts.items():
        part().backward()
        torch.cuda.synchronize()
        start.wait()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < 2.0:
            part().backward()
            torch.cuda.synchronize()
            count += 1
        found[name] = (time.perf_counter() - begun) / count
    pipe.send(found)


def measure_slices() -> list[dict[str, float]]:
    """[slice][part] seconds."""
    context = mp.get_context("spawn")
    start, pipes = context.Barrier(len(SHARES)), []
    processes = []
    for share in SHARES:
        ours, theirs = context.Pipe()
        process = context.Process(target=_probe, args=(share, theirs, start))
        process.start()
        pipes.append(ours)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


def make_problem(measured: list[dict[str, float]], bytes_per_s: float) -> Any:
    """One micro-batch of the model on three kinds of device, costs scaled to what was measured."""
    with torch.device("meta"):
        model = Gpt()
    tokens, labels = (one.to("meta") for one in inputs(ROWS))
    graph = lm.capture(model, (tokens, labels), optimizer="sgd", target="cuda")
    words = ", ".join(f"H200#{at}-{gib}GB" for at, gib in enumerate(GIB))
    base = parse_cluster(words)
    kinds = len(SHARES)
    first = base.kind[:1].repeat(kinds)
    cluster = replace(
        base,
        device_name=tuple(f"cuda:0#{at}" for at in range(kinds)),
        kind=np.arange(kinds, dtype=np.int32),
        kind_name=tuple(f"H200 {share} %" for share in SHARES),
        engine=np.arange(kinds, dtype=np.int32),
        flops_per_s=base.flops_per_s[first],
        memory_bytes_per_s=base.memory_bytes_per_s[first],
        overhead_s=base.overhead_s[first],
        on_host=base.on_host[first],
        link_bytes_per_s=np.full_like(base.link_bytes_per_s, bytes_per_s),
        link_latency_s=np.full_like(base.link_latency_s, 5e-4),
    )
    asked = lm.problem(graph, cluster, "step", pipeline=f"auto:{BATCHES}")
    costs = asked.costs.compute_s.copy()
    trained = graph.phase <= 1
    for name in ("embed", "layers", "head"):
        rows = np.array([trained[n] and _part(graph.module[n]) == name for n in range(graph.num_ops)])
        for kind in range(kinds):
            each = measured[kind][name] * (LAYERS if name == "layers" else 1)
            costs[rows, kind] *= each / max(costs[rows, kind].sum(), 1e-12)
    return replace(asked, costs=replace(asked.costs, compute_s=costs))


def _part(module: str) -> str:
    head = module.split(".")[0]
    return head if head in ("embed", "layers") else "head"


def run(placement: Placement, steps: int = _STEPS) -> tuple[float, list[Any]]:
    """Median seconds of a step, and the stages."""
    from loadmaster.runtime.distributed.pipeline.layout import layout_of

    layout = layout_of(placement)
    shares = [SHARES[layout.device_of(rank)] for rank in range(layout.world)]
    model = Gpt()
    batch = inputs(ROWS * sum(layout.micro_batches))
    options = LaunchOptions(
        TrainOptions(optimizer=sgd), threads=2, environments=[environment(share) for share in shares]
    )
    with launch(placement, model, options) as running:
        seconds = []
        for _ in range(_WARM + steps):
            begun = time.perf_counter()
            running.step(batch)
            seconds.append(time.perf_counter() - begun)
        running.clocked(True)
        running.step(batch)
        stages = [str(one) for one in running.stage_times()]
    return median(seconds[_WARM:]), stages


def random_cut(problem: Any, chosen: Placement, rng: Any) -> Placement:
    """The devices of the best plan in some order, layers cut anywhere."""
    graph, plan = problem.graph, chosen.plan
    assert plan is not None
    assert plan.pipeline is not None
    order = rng.permutation(3)[: int(rng.integers(2, 4))].astype(np.int32)
    cuts = np.sort(rng.choice(np.arange(1, LAYERS), len(order) - 1, replace=False))
    stage = np.zeros(graph.num_ops, dtype=np.int32)
    for op, module in enumerate(graph.module):
        part = _part(module)
        layer = int(module.split(".")[1]) if part == "layers" and "." in module else -1
        at = 0 if part == "embed" else len(order) - 1
        stage[op] = int(np.searchsorted(cuts, layer, side="right")) if layer >= 0 else at
    named = [n for n in range(graph.num_ops) if not graph.module[n]]
    for op in named:
        uses = graph.use_op[np.isin(graph.use_tensor, np.flatnonzero(graph.tensor_op == op))]
        if graph.phase[op] == 3 and len(uses):
            stage[op] = stage[uses].min()
    for op in np.flatnonzero(graph.mirror >= 0):
        stage[op] = stage[graph.mirror[op]]
    count = len(order)
    pipeline = replace(
        plan.pipeline,
        stage=stage,
        replicas=np.ones(count),
        in_flight=np.arange(count, 0, -1),
        stage_s=np.zeros(count),
        schedule="1f1b",
        rank=tuple(range(count)),
        replica_device=(tuple(int(d) for d in order),),
        replica_microbatches=(BATCHES,),
    )
    mine = Plan(
        order[stage], np.arange(graph.num_ops, dtype=np.int32), np.zeros(graph.num_ops, bool), pipeline
    )
    return lm.plan(problem, algorithm=mine)


def main() -> None:
    """Measure, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--bytes-per-s", type=float, default=1.5e9)
    parser.add_argument("--out", default="pipeline-mps.json")
    asked, begun = parser.parse_args(), time.monotonic()
    started = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True, check=False)
    print("mps", started.returncode, started.stderr[:200], flush=True)
    result: dict[str, Any] = {
        "date": str(date.today()),
        "torch": str(torch.__version__),
        "mps": started.returncode,
    }
    measured = result["slices"] = measure_slices()
    print(json.dumps(measured), flush=True)
    problem = make_problem(measured, asked.bytes_per_s)
    plans: dict[str, Placement] = {}
    for name in ("pipeline", "pipeline_equal", "pipeline_by_speed"):
        plans[name] = lm.plan(problem, algorithm=name, budget=10.0)
    rng, rows = np.random.default_rng(0), []
    layers = sum(one for one in (measured[0]["layers"] * LAYERS, measured[0]["head"], measured[0]["embed"]))
    result["best slice alone, from its parts"] = layers * BATCHES
    names = list(plans)
    while time.monotonic() - begun < asked.seconds - 25 and (names or len(rows) < 13):
        name = names.pop(0) if names else f"random {len(rows)}"
        try:
            placement = plans[name] if name in plans else random_cut(problem, plans["pipeline"], rng)
            seconds, stages = run(placement)
            row = {"plan": name, "predicted_s": placement.score_s, "measured_s": seconds, "stages": stages}
        except Exception as failure:
            row = {"plan": name, "error": str(failure)[:500]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        Path(asked.out).write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

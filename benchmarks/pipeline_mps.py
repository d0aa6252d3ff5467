"""A GPU in unequal slices (MPS: 50, 25 and 12 % with memory caps): pipelines planned, run and compared.

    python -m benchmarks.pipeline_mps --seconds 400 --out result.json
    python -m benchmarks.pipeline_mps --tiny --out result.json          # tried on CPU processes, no figure

1. Each slice runs a layer, the head and the embedding, all slices at once: seconds on each. Two slices send
   each other the bytes of a cut: seconds of the link.
2. Those scale the costs of ops on three kinds of device; `auto` plans, `pipeline_equal`, `pipeline_by_speed`
   and the best slice alone are what it is compared with, then random cuts for the rank correlation of
   predicted and measured, as far as the time goes.
3. Every plan runs by `lm.launch`, each process under its own share; the median of steps is written down. The
   processes of the next plan start meanwhile.
"""

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import loadmaster as lm
from benchmarks import pipeline_gpt
from benchmarks.pipeline_gpt import FULL, TINY, Gpt, Size, inputs, sgd
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.pipelines.order import ONE_F_ONE_B
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.runtime.distributed.launch import LaunchOptions, PipelineRun, launch
from loadmaster.runtime.distributed.peers import Meeting, meet
from loadmaster.runtime.distributed.pipeline.layout import layout_of
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.transports import HostTransport, Waits

SHARES, GIB, BATCHES, RANDOM = (50, 25, 12), (64, 32, 16), 8, 10
_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps-pipe", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps-log"}
_LINK_BYTES = (2**13, 2**23)


def environment(device: int) -> dict[str, str]:
    """Of a process with a share of the GPU."""
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(SHARES[device]),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={GIB[device]}G",
    }


def start_mps() -> str:
    """Start the daemon; what went wrong, or ''."""
    os.environ.update(_MPS)
    for folder in _MPS.values():
        Path(folder).mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    return "" if done.returncode == 0 else f"{done.returncode}: {done.stdout} {done.stderr}"[:300]


# --------------------------------------------------------------------------------------- what slices take


def _probe(where: str, device: int, size: Size, pipe: Any, start: Any, seconds: float) -> None:
    """Seconds of forward and backward of embedding, layer and head, all slices at once."""
    torch.set_num_threads(1)
    place = torch.device(where)
    sync = torch.cuda.synchronize if place.type == "cuda" else lambda: None
    model = Gpt(size, layers=1).to(place)
    tokens, labels = (one.to(place) for one in inputs(size.rows, size))
    x = torch.randn(size.rows, size.length, size.width, device=place, requires_grad=True)
    parts = {
        "embed": lambda: model.embed(tokens).sum(),
        "layers": lambda: model.layers[0](x).sum(),
        "head": lambda: torch.nn.functional.cross_entropy(
            model.head(model.norm(x)).flatten(0, 1), labels.flatten()
        ),
    }
    times = {}
    for name, part in parts.items():
        for _ in range(3):
            part().backward()
        sync()
        start.wait()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            for _ in range(4):
                part().backward()
            sync()
            count += 4
        times[name] = (time.perf_counter() - begun) / count
    pipe.send((device, times))


def measure_slices(where: str, size: Size, seconds: float) -> list[dict[str, float]]:
    """[slice][part] seconds."""
    context = mp.get_context("spawn")
    start = context.Barrier(len(SHARES))
    pipes, processes = [], []
    for device in range(len(SHARES)):
        ours, theirs = context.Pipe()
        kept = dict(os.environ)
        os.environ.update(environment(device))  # a spawned process reads it before it meets the GPU
        process = context.Process(target=_probe, args=(where, device, size, theirs, start, seconds))
        process.start()
        os.environ.clear()
        os.environ.update(kept)
        pipes.append(ours)
        processes.append(process)
    found = dict(pipe.recv() for pipe in pipes)
    for process in processes:
        process.join()
    return [found[device] for device in range(len(SHARES))]


def _enter_link(spec: tuple[Meeting, str]) -> Any:
    """A worker that sends and receives."""
    meeting, where = spec
    meet(meeting)
    place, waits = torch.device(where), Waits(meeting.rank, meeting.timeout_s)
    transport, other = HostTransport(place, waits), 1 - meeting.rank

    def handle(_: str, num_bytes: int) -> float:
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=place)
        times = []
        for tag in range(12):
            begun = time.perf_counter()
            if meeting.rank == 0:
                leaving = transport.send(data, other, tag, "probe")
                transport.receive(num_bytes, other, tag, "probe").wait()
                leaving.wait()
            else:
                got = transport.receive(num_bytes, other, tag, "probe").wait()
                transport.send(got, other, tag, "probe").wait()
            times.append((time.perf_counter() - begun) / 2)
        return median(times[2:])

    return handle


def measure_link(where: str) -> tuple[float, float]:
    """Seconds of a small message, and bytes a second of a large one, one way."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    specs = [(Meeting(rank, 2, "127.0.0.1", store.port, 60.0, "lo"), where) for rank in range(2)]
    group = WorkerGroup(_enter_link, specs, environments=[environment(0), environment(1)])
    group.start()
    small, large = (group.ask("time", size)[0] for size in _LINK_BYTES)
    group.close()
    return small, (_LINK_BYTES[1] - _LINK_BYTES[0]) / max(large - small, 1e-9)


# ------------------------------------------------------------------------------------------------- plans


def make_problem(measured: list[dict[str, float]], link: tuple[float, float], size: Size, where: str) -> Any:
    """One micro-batch of the model on three kinds of device, costs scaled to what was measured."""
    with torch.device("meta"):
        model = Gpt(size)
    tokens, labels = (one.to("meta") for one in inputs(size.rows, size))
    graph = lm.capture(model, (tokens, labels), optimizer="sgd", target=where)
    chip, head = ("H200", "cuda:0") if where == "cuda" else ("cpu", "cpu")
    base = parse_cluster(", ".join(f"{chip}#{at}-{gib}GB" for at, gib in enumerate(GIB)))
    kinds = len(SHARES)
    first = base.kind[:1].repeat(kinds)
    cluster = replace(
        base,
        device_name=tuple(f"{head}#{at}" for at in range(kinds)),
        kind=np.arange(kinds, dtype=np.int32),
        kind_name=tuple(f"{chip} {share} %" for share in SHARES),
        engine=np.arange(kinds, dtype=np.int32),
        flops_per_s=base.flops_per_s[first],
        memory_bytes_per_s=base.memory_bytes_per_s[first],
        overhead_s=base.overhead_s[first],
        on_host=base.on_host[first],
        link_bytes_per_s=np.full_like(base.link_bytes_per_s, link[1]),
        link_latency_s=np.full_like(base.link_latency_s, link[0]),
    )
    asked = lm.problem(graph, cluster, "step", pipeline=f"auto:{BATCHES}")
    costs = asked.costs.compute_s.copy()
    trained = graph.phase <= 1
    for name in ("embed", "layers", "head"):
        rows = np.array([trained[n] and _part(graph.module[n]) == name for n in range(graph.num_ops)])
        for kind in range(kinds):
            each = measured[kind][name] * (size.layers if name == "layers" else 1)
            costs[rows, kind] *= each / max(costs[rows, kind].sum(), 1e-12)
    return replace(
        asked, costs=replace(asked.costs, compute_s=costs, issue_s=np.zeros_like(asked.costs.issue_s))
    )


def _part(module: str) -> str:
    head = module.split(".")[0]
    return head if head in ("embed", "layers") else "head"


def cut_by_layers(problem: Any, order: list[int], cuts: list[int]) -> Placement:
    """A 1F1B pipeline over devices in an order, cut before some layers."""
    graph, count = problem.graph, len(order)
    stage = np.zeros(graph.num_ops, dtype=np.int32)
    for op, module in enumerate(graph.module):
        part = _part(module)
        layer = int(module.split(".")[1]) if part == "layers" and "." in module else -1
        at = 0 if part == "embed" else count - 1
        stage[op] = int(np.searchsorted(cuts, layer, side="right")) if layer >= 0 else at
    for op in np.flatnonzero([not module for module in graph.module]):
        uses = graph.use_op[np.isin(graph.use_tensor, np.flatnonzero(graph.tensor_op == op))]
        if (graph.phase[op] == 3 or graph.op_kind[op] == "input") and len(uses):
            stage[op] = stage[uses].min()
    for op in np.flatnonzero(graph.mirror >= 0):
        stage[op] = stage[graph.mirror[op]]
    pipeline = Pipeline(
        stage=stage,
        replicas=np.ones(count),
        num_microbatches=BATCHES,
        schedule=ONE_F_ONE_B,
        in_flight=np.arange(count, 0, -1),
        stage_s=np.zeros(count),
        rank=tuple(range(count)),
        replica_device=(tuple(order),),
        replica_microbatches=(BATCHES,),
    )
    devices, priority = np.array(order, dtype=np.int32)[stage], np.arange(graph.num_ops, dtype=np.int32)
    mine = Plan(devices, priority, np.zeros(graph.num_ops, dtype=bool), pipeline)
    placement = lm.plan(problem, algorithm=mine)
    if placement.plan is None:
        raise ValueError(f"layers cut at {cuts} on {order}: {placement.status}")
    return placement


def random_cut(problem: Any, size: Size, rng: Any) -> Placement:
    """Two or three devices in some order, layers cut anywhere."""
    order = rng.permutation(3)[: int(rng.integers(2, 4))].tolist()
    cuts = np.sort(rng.choice(np.arange(1, size.layers), len(order) - 1, replace=False))
    return cut_by_layers(problem, order, cuts.tolist())


def describe(placement: Placement) -> str:
    """Devices, layers and schedule."""
    layout, plan, graph = layout_of(placement), placement.plan, placement.problem.graph
    assert plan is not None
    assert plan.pipeline is not None
    words = []
    for stage in range(layout.num_stages):
        own = (plan.pipeline.stage == stage) & (graph.phase == 0)
        modules = {graph.module[n] for n in np.flatnonzero(own)}
        layers = {m.split(".")[1] for m in modules if m.startswith("layers.")}
        words.append(f"{len(layers)} on {SHARES[layout.device[0][stage]]} %")
    return f"{layout.schedule}:{sum(layout.micro_batches)} x{layout.num_replicas}: " + ", ".join(words)


# -------------------------------------------------------------------------------------------------- runs


def begin(placement: Placement, size: Size) -> PipelineRun:
    """Processes that have the model and its graph."""
    layout = layout_of(placement)
    options = LaunchOptions(
        TrainOptions(optimizer=sgd),
        threads=2,
        environments=[environment(layout.device_of(rank)) for rank in range(layout.world)],
        source=f"{pipeline_gpt.__file__}:{size.builder}",
    )
    running = launch(placement, None, options)
    running.prepare(inputs(size.rows * sum(layout.micro_batches), size))
    return running


def time_steps(running: PipelineRun, size: Size, warm: int, steps: int) -> tuple[list[float], list[str]]:
    """Seconds of each step, and the stages of one that waits for the GPU after every action."""
    batch = inputs(size.rows * sum(running.layout.micro_batches), size)
    with running:
        seconds = []
        for _ in range(warm + steps):
            begun = time.perf_counter()
            running.step(batch)
            seconds.append(time.perf_counter() - begun)
        running.clocked(True)
        running.step(batch)
        stages = [str(one) for one in running.stage_times()]
    return seconds[warm:], stages


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures."""
    from scipy.stats import spearmanr

    good = {row["plan"]: row for row in rows if "measured_s" in row}
    found: dict[str, Any] = {}
    if "auto" in good:
        auto = good["auto"]["measured_s"]
        found["auto: predicted / measured - 1"] = good["auto"]["predicted_s"] / auto - 1
        for name in ("pipeline_equal", "pipeline_by_speed", "best slice alone"):
            if name in good:
                found[f"{name} / auto"] = good[name]["measured_s"] / auto
    drawn = [row for name, row in good.items() if name.startswith("random")]
    if len(drawn) > 2:
        predicted, measured = ([row[key] for row in drawn] for key in ("predicted_s", "measured_s"))
        found["rank correlation"] = float(spearmanr(predicted, measured)[0])
        found["random pipelines"] = len(drawn)
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in good.values()]
    found["largest error of all plans"] = max(errors, default=None)
    return found


def main() -> None:
    """Measure, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU processes")
    parser.add_argument(
        "--random", type=int, default=RANDOM, help="random pipelines for the rank correlation"
    )
    parser.add_argument("--out", default="pipeline-mps.json")
    asked, begun = parser.parse_args(), time.monotonic()
    where, size = ("cpu", TINY) if asked.tiny else ("cuda", FULL)
    result: dict[str, Any] = {"date": str(date.today()), "torch": str(torch.__version__), "rows": []}

    def keep(**more: Any) -> None:
        result.update(more, seconds=round(time.monotonic() - begun, 1))
        print(json.dumps({**more, "at_s": result["seconds"]}), flush=True)
        Path(asked.out).write_text(json.dumps(result, indent=1) + "\n")

    if where == "cuda":
        wrong = start_mps()
        keep(gpu=_gpu_name(), mps=wrong or "started")
        if wrong:
            sys.exit(3)
    warming = subprocess.Popen([sys.executable, "-m", "loadmaster.cli.warm"])
    measured = measure_slices(where, size, 2.0)
    keep(slices=measured)
    link = measure_link(where)
    keep(link={"latency_s": link[0], "bytes_per_s": link[1]})
    problem = make_problem(measured, link, size, where)
    warming.wait()
    keep(warm=True)
    chosen = lm.plan(problem, algorithm="auto", budget=15.0)
    if chosen.plan is None or chosen.plan.pipeline is None:
        keep(auto_is=f"one device, {chosen.score_s} s; the best pipeline stands in for it")
        chosen = lm.plan(problem, algorithm="pipeline", budget=15.0)
    plans = {"auto": chosen}
    plans |= {name: lm.plan(problem, algorithm=name) for name in ("pipeline_equal", "pipeline_by_speed")}
    plans["best slice alone"] = cut_by_layers(problem, [0], [])
    rng = np.random.default_rng(0)
    plans |= {f"random {at}": random_cut(problem, size, rng) for at in range(asked.random)}
    keep(plans={name: [describe(each), each.score_s] for name, each in plans.items()})
    with ThreadPoolExecutor(1) as pool:
        names = list(plans)
        coming: Future[PipelineRun] | None = pool.submit(begin, plans[names[0]], size)
        for at, name in enumerate(names):
            assert coming is not None
            row = {"plan": name, "words": describe(plans[name]), "predicted_s": plans[name].score_s}
            following: Future[PipelineRun] | None = None
            try:
                running = coming.result()
                late = time.monotonic() - begun > asked.seconds
                if at + 1 < len(names) and not late:
                    following = pool.submit(begin, plans[names[at + 1]], size)
                drawn = name.startswith("random")
                times, stages = time_steps(running, size, 1 if drawn else 2, 3 if drawn else 6)
                row |= {"measured_s": median(times), "times": times, "stages": stages}
            except Exception as failure:
                row["error"] = str(failure)[:1500]
                if following is None and at + 1 < len(names):
                    following = pool.submit(begin, plans[names[at + 1]], size)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            keep(figures=summarise(result["rows"]))
            coming = following
            if coming is None:
                break


def _gpu_name() -> str:
    """Asked in a process of its own: this one must not hold the GPU without a share."""
    words = "import torch; print(torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr[-300:]


if __name__ == "__main__":
    main()

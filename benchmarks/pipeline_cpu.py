"""Two processes of one thread against one: GPT-2-small blocks, 8 micro-batches. For an idle machine.

OMP_NUM_THREADS=1 python -m benchmarks.pipeline_cpu --out benchmarks/results/pipeline-cpu.json

aim      a step at least 0.85 x (16/9 x scaling / 2) times as fast as by one process; 16/9 is what a pipeline
         of two stages and 8 micro-batches gains, scaling what two independent processes gain together: both
         are measured before the pipeline and after it, and the better of two counts
predicted   within 15 % of measured, from costs measured here
"""

import argparse
import json
import multiprocessing as mp
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import loadmaster as lm
from benchmarks.gpt import Layer
from benchmarks.measure import machine

BLOCKS, WIDTH, HEADS, ROWS, LENGTH, BATCHES, AIM = 12, 768, 12, 1, 128, 8, 0.85
STEPS = 3  # that are timed, after one that is not
DEVICES = "cpu#0-8GB, cpu#1-8GB"


def blocks() -> nn.Module:
    """The blocks of GPT-2 small."""
    return nn.Sequential(*(Layer(WIDTH, HEADS) for _ in range(BLOCKS)))


def square(out: torch.Tensor) -> torch.Tensor:
    """A loss that costs nothing."""
    return out.square().mean()


def sgd(weights: list[Any]) -> torch.optim.Optimizer:
    """Small steps."""
    return torch.optim.SGD(weights, lr=1e-4)


def _train_alone(barrier: Any, pipe: Any) -> None:
    """One process of one thread: the median seconds of a step of 8 micro-batches."""
    torch.set_num_threads(1)
    model, x = blocks(), torch.randn(ROWS, LENGTH, WIDTH)
    optimizer, seconds = sgd(list(model.parameters())), []
    for step in range(STEPS + 1):
        if step == 1:
            barrier.wait()
        begun = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(BATCHES):
            (square(model(x)) / BATCHES).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    pipe.send(median(seconds[1:]))


def alone(count: int) -> float:
    """The slowest of so many independent processes."""
    context = mp.get_context("spawn")
    barrier, pipes, processes = context.Barrier(count), [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_train_alone, args=(barrier, theirs)))
        pipes.append(ours)
        processes[-1].start()
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return max(found)


def main() -> None:
    """Measure alone, together and as a pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--measure", type=float, default=20.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ones, twos = [alone(1)], [alone(2)]
    model = blocks()
    graph = lm.capture(model, (torch.randn(ROWS, LENGTH, WIDTH),), loss=square, optimizer="sgd")
    problem = lm.problem(
        graph, DEVICES, "step", pipeline=f"auto:{BATCHES}", costs="measured", measure_budget=asked.measure
    )
    placement = lm.plan(problem, algorithm="pipeline", budget=10.0)
    x = torch.randn(ROWS * BATCHES, LENGTH, WIDTH)
    with lm.launch(placement, model, loss=square, optimizer=sgd, threads=1) as run:
        seconds = []
        for _ in range(STEPS + 1):
            begun = time.perf_counter()
            run.step(x)
            seconds.append(time.perf_counter() - begun)
        stages = [str(stage) for stage in run.stage_times()]
        links = [str(link) for link in run.link_times()]
    ones.append(alone(1))
    twos.append(alone(2))
    one, two = min(ones), min(twos)
    scaling = 2 * one / two
    measured, predicted = median(seconds[1:]), placement.score_s or 0.0
    wanted = 16 / 9 * scaling / 2
    plan = placement.plan
    result = {
        "date": str(date.today()),
        "machine": {**machine(), "command": "python -m benchmarks.pipeline_cpu"},
        "torch": str(torch.__version__),
        "script": "benchmarks/pipeline_cpu.py",
        "blocks": f"{BLOCKS} of width {WIDTH}, {BATCHES} micro-batches of {ROWS * LENGTH} tokens",
        "schedule": None if plan is None or plan.pipeline is None else plan.pipeline.schedule,
        "alone_s": ones,
        "two_alone_s": twos,
        "scaling": scaling,
        "pipeline_s": measured,
        "pipeline_steps_s": seconds,
        "speed_up": one / measured,
        "share_of_possible": one / measured / wanted,
        "share_at_full_scaling": one / measured / (16 / 9),
        "aim": AIM,
        "predicted_s": predicted,
        "error": predicted / measured - 1,
        "stages": stages,
        "links": links,
    }
    print(json.dumps(result, indent=1))
    if asked.out:
        Path(asked.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

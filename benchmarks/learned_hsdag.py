"""HSDAG's own comparison: one CPU and one GPU, inference of Inception-V3, ResNet-50 and BERT, batch 1.

Models are exported by torch and read by the reader of `.pt2` files; times are the presets' for a T4 and a
host. Both devices have room for everything, so that each alone is a legal answer. Searches get the 500 plans
that HSDAG's code evaluates. The optimum is the one that `auto` proves, else its bound is given.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loadmaster as lm
from benchmarks.learned_held_out import ask
from benchmarks.measure import Report
from benchmarks.question import question_of
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget
from loadmaster.placers.registry import placer

SUITE = "learned"
DEVICES = "T4, cpu-64GB"
EVALUATIONS = 500
EXACT_S = 30.0


def _image(name: str) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    def build() -> tuple[Any, tuple[Any, ...]]:
        from loadmaster.zoo.named import zoo_example

        example = zoo_example(name, batch=1, seq=1, device="cpu")
        return example.model, example.args

    return build


def _bert() -> tuple[Any, tuple[Any, ...]]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), (torch.zeros(1, 128, dtype=torch.int64),)


MODELS = {"Inception-V3": _image("inception_v3"), "ResNet-50": _image("resnet50"), "BERT-base": _bert}


def read_model(name: str, folder: Path) -> Problem:
    """The inference of a model, through a file."""
    model, inputs = MODELS[name]()
    path = folder / f"{name}.pt2"
    torch.export.save(torch.export.export(model.eval(), inputs, strict=False), path)
    return lm.problem(str(path), DEVICES, objective="step")


def measure_hsdag(report: Report, seeds: int) -> None:
    """Every method on every model."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for name in MODELS:
            _measure_model(report, name, read_model(name, Path(folder)), seeds)


def _measure_model(report: Report, name: str, problem: Problem, seeds: int) -> None:
    question, num = question_of(problem), problem.graph.num_ops
    label = f"{name} ({num} ops) on {DEVICES}"
    for device, kind in enumerate(("GPU only", "CPU only")):
        plan = plan_of(np.full(num, device, dtype=np.int32))
        score = question.simulator.order_and_score(plan)[1]
        report.add(SUITE, f"{label}: {kind}", score.time_s, "s")
    methods = {
        "HSDAG, as published": placer("hsdag", finish=0.0),
        "HSDAG, as coded": placer("hsdag", finish=0.0, as_coded=True),
        "HSDAG, single moves at the end": placer("hsdag"),
        "learned_order": placer("learned_order"),
    }
    for method, algorithm in methods.items():
        for evaluations in (0, EVALUATIONS) if method == "learned_order" else (EVALUATIONS,):
            budget, found = Budget(count=max(evaluations, 1)), []
            began = time.process_time()
            for seed in range(seeds):
                found.append(ask(problem, algorithm, budget, seed)[0])
            told = f"{label}: {method}, {evaluations} evaluations"
            report.add(SUITE, told, float(np.median(found)), "s")
            report.figures[-1] |= {
                "least": min(found),
                "worst": max(found),
                "seeds": seeds,
                "processor_s": (time.process_time() - began) / seeds,
            }
    exact = question.ask(placer("auto"), Budget(seconds=EXACT_S))
    proven = exact.status.value == "optimal"
    report.add(
        SUITE, f"{label}: auto, {EXACT_S:g} s{', proven optimal' if proven else ''}", exact.score_s or 0, "s"
    )
    report.add(SUITE, f"{label}: lower bound ({exact.bound_name})", exact.bound_s, "s")

"""Measured costs: how far the predicted CPU step is from a real one, and what a warm database costs.

The real step is the plain training loop: zero_grad, forward, backward, AdamW. It runs on one thread and is
timed in processor time, which on a machine shared with others is what wall time would be without them.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Report

SUITE = "costs"
BUDGET_S = 60.0
AIM = 0.25
_SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000, "n_positions": 256}


def run(report: Report) -> None:
    """All figures of the suite."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, made in _examples().items():
            _compare(report, name, made, Path(folder) / "costs.sqlite")


def _examples() -> dict[str, Any]:
    import torch
    from tests.torch_models import example

    from loadmaster.zoo.example import Example
    from loadmaster.zoo.hf import Size, build_example, hf_example
    from loadmaster.zoo.named import zoo_example
    from loadmaster.zoo.vision import ResNet

    def real(family: Any, name: str, batch: int, seq: int) -> Example:
        made: Example = family(name, batch=batch, seq=seq, device="cpu")
        return made

    gpt = build_example(Size("GPT2Config", "GPT2LMHeadModel", "text", _SMALL), batch=4, seq=128, device="cpu")
    resnet = Example(ResNet((1, 1), width=32, num_classes=100), (torch.randn(8, 3, 96, 96),))
    return {
        "tiny GPT-2": example("gpt2"),
        "tiny LSTM": example("lstm"),
        "small GPT-2": gpt,
        "small ResNet": resnet,
        "GPT-2 124M, 1 x 64": real(hf_example, "gpt2", 1, 64),
        "BERT-base, 2 x 64": real(hf_example, "bert-base", 2, 64),
        "ResNet-50, batch 2": real(zoo_example, "resnet50", 2, 1),
    }


def _compare(report: Report, name: str, made: Any, path: Path) -> None:
    import loadmaster as lm

    made.model.train()
    graph = lm.capture(made.model, made.args, made.kwargs, loss=made.loss)
    asked: dict[str, Any] = {"costs": "measured", "measure_budget": BUDGET_S, "database": path}
    before_s = _step_s(made)
    problem = lm.problem(graph, "cpu-16GB", **asked)
    real_s = min(before_s, _step_s(made))
    began = time.perf_counter()
    lm.problem(graph, "cpu-16GB", **asked)
    warm_s = time.perf_counter() - began
    predicted_s = float(problem.costs.compute_s.sum())
    error = predicted_s / real_s - 1
    share = float(problem.costs.compute_s[problem.costs.origin == 1].sum()) / predicted_s
    report.add(SUITE, f"{name}: real CPU step", real_s, "s")
    report.add(SUITE, f"{name}: predicted CPU step", predicted_s, "s")
    report.add(SUITE, f"{name}: error", error, "ratio", aim=f"within {AIM}", reached=abs(error) < AIM)
    report.add(SUITE, f"{name}: share measured", share, "ratio", aim="> 0.9", reached=share > 0.9)
    report.add(SUITE, f"{name}: problem from a warm database", warm_s, "s", aim="< 1", reached=warm_s < 1)


def _step_s(made: Any) -> float:
    """The median of a few real training steps."""
    import torch

    from loadmaster.modules.loss import compute_loss

    optimizer = torch.optim.AdamW(made.model.parameters())
    taken = []
    for step in range(12):
        began = time.process_time()
        optimizer.zero_grad()
        compute_loss(made.model(*made.args, **made.kwargs), made.loss).backward()
        optimizer.step()
        if step >= 3:
            taken.append(time.process_time() - began)
    return statistics.median(taken)

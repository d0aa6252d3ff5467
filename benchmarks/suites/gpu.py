"""A GPU's training step: peak memory and time as predicted, and as they are. Needs CUDA; skipped elsewhere.

The real step is the plain eager loop (zero_grad, forward, backward, fused by nobody, AdamW). Its peak is
`max_memory_allocated`, its time the median of single steps by the wall, the device synchronised after each.
The prediction is the simulator's, of all ops on the one device, with costs measured op by op; capture never
sees the GPU. What a real step runs below autograd is compared op by op with what was captured for it, views
left out.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.measure import Report

SUITE = "gpu"
BUDGET_S = 90.0
MEMORY_AIM, TIME_AIM, SHARE_AIM = 0.10, 0.15, 0.9
_STEPS, _WARM_UPS = 20, 4


@dataclass(frozen=True, slots=True)
class Case:
    """A model at a sensible batch."""

    family: str
    name: str
    batch: int
    seq: int
    precision: str = "fp32"

    def __str__(self) -> str:
        """As figures name it."""
        size = f"batch {self.batch}" + (f" x {self.seq}" if self.family == "hf" else "")
        return f"{self.name}, {size}, {self.precision}"

    def example(self, device: str) -> Any:
        """The model and its inputs."""
        from loadmaster.zoo.hf import hf_example
        from loadmaster.zoo.named import zoo_example

        make = hf_example if self.family == "hf" else zoo_example
        return make(self.name, batch=self.batch, seq=self.seq, device=device)


CASES = (
    Case("hf", "gpt2", 8, 512),
    Case("hf", "gpt2", 8, 512, "bf16-mixed"),
    Case("hf", "bert-base", 16, 256),
    Case("hf", "bert-base", 16, 256, "bf16-mixed"),
    Case("zoo", "resnet50", 64, 1),
    Case("zoo", "resnet50", 64, 1, "bf16-mixed"),
    Case("hf", "gpt2-xl", 4, 512),
    Case("hf", "gpt2-xl", 4, 512, "bf16-mixed"),
    Case("hf", "gpt2", 1, 64),  # bound by launches
)


def run(report: Report) -> None:
    """All figures of the suite."""
    import torch

    if not torch.cuda.is_available():
        print("gpu: no CUDA device here; skipped")
        return
    print(f"gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            _compare(report, case, Path(folder) / "costs.sqlite")
    for case in CASES[:6]:
        _same_ops(report, case)
    _without_cuda(report, CASES[1])


def _compare(report: Report, case: Case, path: Path) -> None:
    import loadmaster as lm
    from loadmaster.cost.measure import measured_share

    began = time.perf_counter()
    graph = captured(case)
    capture_s = time.perf_counter() - began
    kind = _kind()
    asked: dict[str, Any] = {"costs": "measured", "measure_budget": BUDGET_S, "database": path}
    before = real_step(case)
    began = time.perf_counter()
    problem = lm.problem(graph, kind, **asked, tell=print)
    measure_s = time.perf_counter() - began
    plan = _alone(problem)
    timeline = lm.simulate(problem, plan)
    after = real_step(case)
    real = {key: statistics.mean((before[key], after[key])) for key in before}  # the host has its moods
    share = measured_share(problem, plan)
    busy_s = float(problem.costs.compute_s[:, 0].sum())
    issue_s = float(problem.costs.issue_s.sum())
    predicted_s, peak = timeline.step_s, float(timeline.peak_bytes[0])
    memory_error, time_error = peak / real["peak_bytes"] - 1, predicted_s / real["step_s"] - 1
    report.add(SUITE, f"{case}: peak predicted", peak / 2**30, "GiB")
    report.add(SUITE, f"{case}: peak measured", real["peak_bytes"] / 2**30, "GiB")
    reached = abs(memory_error) <= MEMORY_AIM
    report.add(SUITE, f"{case}: peak error", memory_error, "ratio", aim="within 0.10", reached=reached)
    report.add(SUITE, f"{case}: step predicted", 1e3 * predicted_s, "ms")
    report.add(SUITE, f"{case}: step measured", 1e3 * real["step_s"], "ms")
    reached = abs(time_error) <= TIME_AIM
    report.add(SUITE, f"{case}: step error", time_error, "ratio", aim="within 0.15", reached=reached)
    report.add(SUITE, f"{case}: share measured", share, "ratio", aim=">= 0.9", reached=share >= SHARE_AIM)
    report.add(SUITE, f"{case}: device busy", 1e3 * busy_s, "ms")
    report.add(SUITE, f"{case}: host issues", 1e3 * issue_s, "ms")
    report.add(SUITE, f"{case}: capture", capture_s, "s")
    report.add(SUITE, f"{case}: problem, measuring", measure_s, "s")


def _same_ops(report: Report, case: Case) -> None:
    """Ops of a real step against those captured, by kind."""
    import torch

    real, graph = _ops(case), captured(case, path="traced")
    texts = [graph.signature_table[row] for row in graph.signature.tolist() if row >= 0]
    ours = Counter(text.split()[0].split(".")[1] for text in texts if text.startswith("aten."))
    for seen in (real, ours):
        for name in [name for name in seen if name in _NO_WORK or name.startswith(("_foreach", "_record"))]:
            del seen[name]
        for name in [name for name in seen if "cudnn_attention" in name]:  # Hopper's own, else as flash
            seen[name.replace("cudnn", "flash")] += seen.pop(name)
        for name in [name for name in seen if name.startswith("cudnn_batch_norm")]:
            seen[name.replace("cudnn", "native")] += seen.pop(name)
    share = (ours & real).total() / (ours | real).total()
    missing = {name: (ours[name], real[name]) for name in ours | real if ours[name] != real[name]}
    print(f"gpu: {case}: captured and real counts that differ: {missing}")
    report.add(
        SUITE, f"{case}: ops of a real step captured", share, "ratio", aim=">= 0.99", reached=share >= 0.99
    )
    torch.cuda.empty_cache()


_NO_WORK = {
    "detach",
    "t",
    "view",
    "transpose",
    "expand",
    "permute",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "alias",
    "as_strided",
    "lift_fresh",
    "empty",  # memory for cudnn to come
}


def _without_cuda(report: Report, case: Case) -> None:
    """The same graph from a process that sees no GPU, and from a model that lies on it."""
    code = f"from benchmarks.suites import gpu; print(gpu.captured(gpu.CASES[{CASES.index(case)}]).digest)"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=hidden, capture_output=True, text=True)
    blind, seeing = done.stdout.strip(), captured(case, "cuda").digest
    same = blind == seeing
    report.add(SUITE, f"{case}: same graph without CUDA", float(same), "bool", aim="1", reached=same)


def captured(case: Case, device: str = "meta", path: str | None = None) -> Any:
    """The step of a case for a CUDA device."""
    import torch

    import loadmaster as lm

    made = case.example(device)
    autocast = torch.bfloat16 if case.precision == "bf16-mixed" else None
    how: dict[str, Any] = {"target": "cuda", "autocast": autocast, "path": path}
    return lm.capture(made.model, made.args, made.kwargs, loss=made.loss, **how)


def _kind() -> str:
    import torch

    name = torch.cuda.get_device_name()
    return next(kind for kind in ("H200", "H100", "A100-80GB", "A100-40GB") if kind.split("-")[0] in name)


def _alone(problem: Any) -> Any:
    """Everything on the one device, in the order of the program."""
    from loadmaster.core.plan import plan_of

    order = np.arange(problem.graph.num_ops, dtype=np.int32)
    return plan_of(np.zeros_like(order), order)


def real_step(case: Case) -> dict[str, Any]:
    """Peak bytes, seconds and ops of the plain loop."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    made = case.example("cuda")
    made.model.train()
    optimizer = torch.optim.AdamW(made.model.parameters())
    taken = []
    for step in range(_WARM_UPS + _STEPS):
        if step == _WARM_UPS:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        _step(made, optimizer, case)
        torch.cuda.synchronize()
        if step >= _WARM_UPS:
            taken.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "step_s": statistics.median(taken)}


def _step(made: Any, optimizer: Any, case: Case) -> None:
    import torch

    from loadmaster.modules.loss import compute_loss

    optimizer.zero_grad()
    mixed = case.precision == "bf16-mixed"
    with torch.autocast("cuda", dtype=torch.bfloat16) if mixed else nullcontext():
        out = made.model(*made.args, **made.kwargs)  # held to the end, as most loops do
        loss = compute_loss(out, made.loss)
    loss.backward()
    optimizer.step()


def _ops(case: Case) -> Counter[str]:
    """What runs below autograd in a real step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        seen: ClassVar[Counter[str]]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    made = case.example("cuda")
    made.model.train()
    Log.seen = Counter()
    with Log():
        _step(made, torch.optim.SGD(made.model.parameters(), lr=0.0), case)
    return Log.seen

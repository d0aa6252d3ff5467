"""python -m benchmarks.spill_caps [GB ...] [--out FILE]: one model under ever smaller caps of a GPU.

GPT-NeoX of 1.4 billion weights, batch 4 x 512, fp32, fused AdamW, planned with `spill="host"` from costs
measured here and run under a hard cap of the allocator. The aim is 1.5 times max(compute, bus) + host update:
compute is the step without a cap, the host's update is timed alone over as many weights, and the bus is what
the plan sends each way at the rate that the probe found. Needs CUDA.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loadmaster as lm
from benchmarks.measure import Report, machine
from benchmarks.placed_runs import (
    Shorter,
    Stepper,
    capped,
    captured,
    forget,
    fused_adamw,
    limited,
    on_gpu_first,
    probed,
    timed,
)
from loadmaster.core.timeline import SpanKind
from loadmaster.zoo.example import Example
from loadmaster.zoo.hf import Size

GIB = 2**30
GAPS_BYTES = GIB  # of the allocator: rounded blocks, gaps between them, a workspace of cuBLAS
_SUITE, _AIM = "spill", 1.5
_NUMBERS = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 50304,
}
CASE = Shorter(Size("GPTNeoXConfig", "GPTNeoXForCausalLM", "text", _NUMBERS), 4, 512)


def main() -> None:
    """All caps, then the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("caps", nargs="*", type=float, default=[12.0, 8.0, 5.0])
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    report = Report()
    cluster = probed()
    compute_s, update_s = _uncapped_s(report), _host_update_s(report)
    graph = captured(CASE, fused_adamw)
    with tempfile.TemporaryDirectory() as folder:
        for cap in given.caps:
            _under_cap(report, cluster, graph, cap, compute_s, update_s, Path(folder) / "costs.sqlite")
            forget()
            if given.out:
                text = json.dumps({"machine": machine(), "figures": report.figures}, indent=1)
                Path(given.out).write_text(text + "\n", encoding="utf-8")


def _uncapped_s(report: Report) -> float:
    made = CASE.example("cuda")
    step = Stepper(made.model, made, torch.optim.AdamW(made.model.parameters(), fused=True))
    plain = timed(step, steps=4, warm=2)
    report.add(_SUITE, "step without a cap", plain.step_s, "s")
    report.add(_SUITE, "peak without a cap", plain.peak_bytes / GIB, "GiB")
    del made, step
    forget()
    return plain.step_s


def _host_update_s(report: Report) -> float:
    sizes = [weight.shape for weight in CASE.example("meta").model.parameters()]
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    report.add(_SUITE, "update of all weights on the host", min(taken), "s")
    return min(taken)


def _under_cap(
    report: Report, cluster: Any, graph: Any, cap: float, compute_s: float, update_s: float, path: Path
) -> None:
    gpu, _ = on_gpu_first(cluster)
    room = limited(cluster, gpu, int(cap * 1e9) - GAPS_BYTES)
    began = time.perf_counter()
    problem = lm.problem(graph, room, costs="measured", measure_budget=30.0, database=path)
    placement = lm.plan(problem, budget=5.0, spill="host", order="captured")
    report.add(_SUITE, f"{cap:g} GB: measuring and planning", time.perf_counter() - began, "s")
    print(placement.members[0].reason)
    if placement.score_s is None:
        report.add(_SUITE, f"{cap:g} GB: fits", 0.0, "bool", aim="1", reached=False)
        return
    bus_s = _bus_s(placement)
    limit_s = max(compute_s, bus_s) + update_s
    report.add(_SUITE, f"{cap:g} GB: bus, the busier way", bus_s, "s")
    report.add(_SUITE, f"{cap:g} GB: step predicted", placement.score_s, "s")
    found = _run(placement, cap)
    report.add(
        _SUITE, f"{cap:g} GB: fits", float(found is not None), "bool", aim="1", reached=found is not None
    )
    if found is None:
        return
    ratio, error = found.step_s / limit_s, placement.score_s / found.step_s - 1
    report.add(_SUITE, f"{cap:g} GB: step measured", found.step_s, "s")
    report.add(_SUITE, f"{cap:g} GB: peak", found.peak_bytes / GIB, "GiB")
    name = f"{cap:g} GB: step / (max(compute, bus) + update)"
    report.add(_SUITE, name, ratio, "ratio", aim=f"<= {_AIM}", reached=ratio <= _AIM)
    name = f"{cap:g} GB: error of the prediction"
    report.add(_SUITE, name, error, "ratio", aim="within 0.15", reached=abs(error) <= 0.15)


def _bus_s(placement: Any) -> float:
    """Seconds that copies keep the busier direction busy, as predicted."""
    timeline = lm.simulate(placement.problem, placement.plan)
    cluster = placement.problem.cluster
    gpu, _ = on_gpu_first(cluster)
    copies = timeline.kind == SpanKind.TRANSFER
    seconds = (timeline.end_s - timeline.start_s)[copies]
    down = timeline.resource[copies] // cluster.num_devices == gpu
    return float(max(np.sum(seconds[down]), np.sum(seconds[~down])))


def _run(placement: Any, cap: float) -> Any:
    made = CASE.example("meta")
    torch.manual_seed(0)
    placed = lm.place(made.model, placement)
    shapes = {name: tuple(value.shape) for name, value in made.kwargs.items()}
    inputs = {name: torch.randint(0, 50257, shape, device="cuda") for name, shape in shapes.items()}
    step = Stepper(
        placed,
        Example(made.model, (), inputs, made.loss),
        torch.optim.AdamW(placed.parameters(), fused=True),
    )
    forget()
    try:
        with capped(int(cap * 1e9)):
            return timed(step, steps=4, warm=2)
    except torch.OutOfMemoryError as problem:
        print(f"out of memory under {cap:g} GB: {str(problem)[:300]}")
        return None


if __name__ == "__main__":
    main()

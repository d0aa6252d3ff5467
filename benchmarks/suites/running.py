"""Running plans for real: overhead, prediction, memory, gradients, and 1.5 billion weights in 20 GiB.

On a GPU all of it, in one process; elsewhere the overhead on the CPU. RUNNING_PARTS=spill,parity runs some
parts, RUNNING_MODELS=gpt2 predicts of one model alone, RUNNING_LIMIT_S=330 begins no part later; with
`benchmarks.run --add` what is left goes into the same file. A part that fails says so and the others go on.
Every loop is zero_grad, forward, backward, AdamW.step.
"""

import copy
import json
import os
import statistics
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Report

SUITE = "running"
PAIRS = 50
_BUDGET_S = float(os.environ.get("RUNNING_BUDGET_S", 30.0))


def run(report: Report) -> None:
    """All figures of the suite."""
    import torch

    parts: dict[str, Any] = {"overhead": _overhead}
    if torch.cuda.is_available():
        print(f"running: {torch.cuda.get_device_name()}, torch {torch.__version__}")
        parts = {"spill": _spill, "caps": _caps, "predicted": _predicted, "parity": _parity} | parts
    wanted = os.environ.get("RUNNING_PARTS", ",".join(parts)).split(",")
    began, limit_s = time.perf_counter(), float(os.environ.get("RUNNING_LIMIT_S", "inf"))
    for name, part in parts.items():
        if name not in wanted:
            continue
        spent = time.perf_counter() - began
        print(json.dumps({"part": name, "after_s": round(spent, 1), "left out": spent > limit_s}), flush=True)
        if spent > limit_s:
            continue
        try:
            part(report)
        except Exception as problem:  # the other parts shall run
            traceback.print_exc()
            print(json.dumps({"part": name, "failed": f"{type(problem).__name__}: {problem}"[:500]}))
            report.add(SUITE, f"{name}: ran to its end", 0.0, "bool", aim="1", reached=False)


@cache
def _here() -> Any:
    from benchmarks.placed_runs import probed

    cluster = probed()
    shown = {"devices": cluster.device_name, "links": cluster.link_bytes_per_s.tolist()}
    print(json.dumps({"probed": shown}))
    return cluster


def _case(*words: Any) -> Any:
    from benchmarks.suites.gpu import Case

    return Case(*words)


def _problem(graph: Any, cluster: Any) -> Any:
    """Costs are measured here, and kept for the other parts."""
    import loadmaster as lm

    path = Path(os.environ.get("RUNNING_COSTS", "/tmp/running-costs.sqlite"))
    return lm.problem(graph, cluster, costs="measured", measure_budget=_BUDGET_S, database=path, tell=print)


def _overhead(report: Report) -> None:
    """A one-device plan against the model itself, pair by pair."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import Stepper, captured, forget, pairs_s, placement_of
    from loadmaster.core.plan import plan_of

    gpu = torch.cuda.is_available()
    case = _case("hf", "gpt2", 8, 512) if gpu else _case("hf", "gpt2", 2, 64)
    aim, where = (0.03, "cuda:0") if gpu else (0.05, "cpu")
    num = int(os.environ.get("RUNNING_PAIRS", PAIRS))
    graph = captured(case)
    problem = lm.problem(graph, where)
    order = np.arange(graph.num_ops, dtype=np.int32)
    made = case.example("cuda" if gpu else "cpu")
    eager = made.model
    placed = lm.place(
        copy.deepcopy(eager), placement_of(problem, plan_of(np.zeros_like(order), order)), engine="graph"
    )
    steps = [Stepper(model, made, torch.optim.AdamW(model.parameters())) for model in (eager, placed)]
    ratios = sorted(b / a - 1 for a, b in pairs_s(steps[0], steps[1], num=num))
    middle = statistics.median(ratios)
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    device = "GPU" if gpu else "CPU"
    name = f"{case} on one {device}: overhead of the graph engine"
    report.add(SUITE, name, middle, "ratio", aim=f"< {aim}", reached=middle < aim)
    report.add(SUITE, f"{name}, lower quartile", low, "ratio")
    report.add(SUITE, f"{name}, upper quartile", high, "ratio")
    del eager, placed, steps, made
    forget()


def _plans(case: Any, problem: Any, gpu: int, host: int) -> dict[str, Any]:
    """Plans a user would take, and one that is mostly the host's."""
    import loadmaster as lm
    from benchmarks.placed_runs import by_module, limited, placement_of

    def on_host(*heads: str) -> Any:
        dotted = tuple(f"{head}." for head in heads)
        where = lambda module: host if module in heads or module.startswith(dotted) else gpu  # noqa: E731
        return placement_of(problem, by_module(problem.graph, where))

    text = case.family == "hf"
    first = ("transformer.wte", "transformer.wpe") if text else ("stem",)
    alone = on_host()
    found = {
        "all on the GPU": alone,
        "the first layers on the host": on_host(*first),
        "the last layers on the host": on_host("transformer.ln_f" if text else "classifier"),
        "one block on the host": on_host("transformer.h.5" if text else "stages.1.1"),
    }
    less = limited(problem.cluster, gpu, int(0.8 * alone.peak_bytes[gpu]))
    spilled = lm.plan(_problem(problem.graph, less), budget=4.0, spill="host")
    return found | {f"80 % of the memory: {spilled.algorithm}": spilled}


def _predicted(report: Report) -> None:
    """Plans of two models: time and peak memory, predicted and measured."""
    from benchmarks.placed_runs import captured, on_gpu_first

    cluster = _here()
    gpu, host = on_gpu_first(cluster)
    wanted = os.environ.get("RUNNING_MODELS", "gpt2,resnet50").split(",")
    for case in (_case("hf", "gpt2", 8, 512), _case("zoo", "resnet50", 64, 1)):
        if case.name not in wanted:
            continue
        problem = _problem(captured(case), cluster)
        for name, placement in _plans(case, problem, gpu, host).items():
            try:
                _one_plan(report, f"{case}, {name}", case, placement, (gpu, host))
            except Exception as failure:  # the other plans shall run
                traceback.print_exc()
                print(json.dumps({"plan": f"{case}, {name}", "failed": str(failure)[:300]}))
                report.add(SUITE, f"{case}, {name}: ran", 0.0, "bool", aim="1", reached=False)


def _one_plan(report: Report, title: str, case: Any, placement: Any, at: tuple[int, int]) -> None:
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import Stepper, by_phase, forget, loaded, timed, what_is_off

    gpu, host = at
    forget()
    made = case.example("cpu")
    before = torch.cuda.memory_allocated()
    placed = lm.place(made.model.train(), placement)
    step = Stepper(placed, loaded(made, placement, placed), torch.optim.AdamW(placed.parameters()))
    slow = placement.score_s > 0.4  # mostly the host's, whose own times differ by a third from run to run
    found = timed(step, steps=3 if slow else 10, warm=1 if slow else 3)
    error = placement.score_s / found.step_s - 1
    peak = (found.peak_bytes - before) / max(1, int(placement.peak_bytes[gpu]))
    shown = {"hosted ops": int((placement.plan.device == host).sum()), "predicted_s": placement.score_s}
    print(json.dumps({"plan": title, **shown, "measured_s": found.step_s, "peaks GiB": by_phase(step)}))
    print(json.dumps({"steps_s": [round(one, 4) for one in found.all_s]}), flush=True)
    if abs(error) > 0.1 and not slow:
        for row in what_is_off(placed, placement, made):
            print(json.dumps(row), flush=True)
    report.add(SUITE, f"{title}: step measured", 1e3 * found.step_s, "ms")
    aim, reached = ("", None) if slow else ("within 0.15", abs(error) <= 0.15)
    report.add(SUITE, f"{title}: step error", error, "ratio", aim=aim, reached=reached)
    report.add(SUITE, f"{title}: peak / predicted", peak, "ratio", aim="<= 1.05", reached=peak <= 1.05)


def _caps(report: Report) -> None:
    """Ten random plans over parts of the device and the host, each limited to 1.05 of its predicted peak."""
    from benchmarks.placed_runs import captured, forget, shorter
    from loadmaster.core.graph import units

    case, shares = shorter("gpt2", 4, batch=2, seq=128), []
    graph, made = captured(case), case.example("cpu")
    unit, num_units = units(graph)
    for seed in range(10):
        forget()
        where = np.random.default_rng(seed).integers(0, 3, num_units)[unit].astype(np.int32)
        began = time.perf_counter()
        try:
            shares.append(_under_caps(graph, where, made))
            shown = {"caps": seed, "peak / predicted": shares[-1]}
        except Exception as failure:  # the others shall run
            shown = {"caps": seed, "failed": f"{type(failure).__name__}: {failure}"[:400]}
        print(json.dumps({**shown, "took_s": round(time.perf_counter() - began, 1)}), flush=True)
    name, worst = (
        "ten random plans under a cap of 1.05 predicted peaks: run",
        max(map(max, shares), default=9.9),
    )
    report.add(SUITE, name, len(shares), "plans", aim="10", reached=len(shares) == 10)
    name = "ten random plans: largest peak / predicted"
    report.add(SUITE, name, worst, "ratio", aim="<= 1.05", reached=worst <= 1.05)


def _under_caps(graph: Any, where: Any, made: Any) -> list[float]:
    """Two steps under the caps; each device's peak of what was predicted."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import Stepper, placement_of
    from loadmaster.core.plan import plan_of

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    names = (f"{device}#0", f"{device}#1", "cpu#2")
    plan = plan_of(where, np.arange(graph.num_ops, dtype=np.int32))
    wide = lm.problem(graph, ", ".join(f"{name}-60GB" for name in names))
    peaks = lm.simulate(wide, plan).peak_bytes.tolist()
    caps = ", ".join(f"{name}-{int(1.05 * peak)}B" for name, peak in zip(names, peaks, strict=True))
    model = copy.deepcopy(made.model)
    placed = lm.place(model, placement_of(lm.problem(graph, caps), plan))
    step = Stepper(placed, made, torch.optim.AdamW(placed.parameters()))
    for _ in range(2):
        step()
    return [got / max(1, peak) for got, peak in zip(placed.peak_bytes.values(), peaks, strict=True)]


def _parity(report: Report) -> None:
    """Gradients of the first step, CUDA + CPU, in float32 without TF32, against the model itself."""
    from benchmarks.placed_runs import forget, full_float32, shares_of_limit

    for case in (_case("hf", "gpt2", 2, 128), _case("zoo", "resnet50", 4, 1)):
        with full_float32():
            wanted, found = _gradients(case)
        for device, reference in wanted.items():
            shares = shares_of_limit(reference, found)
            worst = max(shares, key=lambda name: shares[name])
            good = sum(share <= 1 for share in shares.values())
            shown = {"parity": device, "worst": worst, "good": good, "of": len(shares)}
            print(json.dumps({**shown, "share of the limit": shares[worst]}))
            name = f"{case}: gradients over GPU and host against the {device} alone, largest of the limit"
            aim, reached = ("<= 1", shares[worst] <= 1) if device == "CPU" else ("", None)
            report.add(SUITE, name, shares[worst], "ratio", aim=aim, reached=reached)
        forget()


def _gradients(case: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """By the CPU alone, the GPU alone, and a plan over both, of one step of the same weights."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import by_module, captured, loss_on, on_gpu_first, placement_of

    made = case.example("cpu")
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def grads(model: Any, device: str) -> dict[str, Any]:
        args = tuple(value.to(device) for value in made.args)
        kwargs = {name: value.to(device) for name, value in made.kwargs.items()}
        loss_on(model, type(made)(model, args, kwargs, made.loss)).backward()
        return {name: weight.grad.double().cpu() for name, weight in model.named_parameters()}

    wanted = {"CPU": grads(copy.deepcopy(made.model), "cpu")}
    wanted["GPU"] = grads(copy.deepcopy(made.model).cuda(), "cuda")
    cluster = _here()
    gpu, host = on_gpu_first(cluster)
    problem, inner = lm.problem(captured(case), cluster), ("transformer.h.4.", "stages.1.1.")
    plan = by_module(problem.graph, lambda module: host if f"{module}.".startswith(inner) else gpu)
    return wanted, grads(lm.place(copy.deepcopy(made.model), placement_of(problem, plan)), "cpu")


def _spill(report: Report) -> None:
    """A GPT of 1.5 billion weights, AdamW, the GPU capped at 20 GiB."""
    from benchmarks.spill_runs import spill

    spill(report, _here(), _problem)

"""Running plans for real: overhead, prediction, memory, gradients, and 1.5 billion weights in 20 GiB.

On a GPU all of it, in one process; elsewhere the overhead on the CPU. RUNNING_PARTS=spill,parity runs some
parts. A part that fails says so and the others go on. Every loop is zero_grad, forward, backward, AdamW.step.
"""

import copy
import json
import os
import statistics
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Report

SUITE = "running"
GIB = 2**30
CAP_BYTES = 20 * GIB
PAIRS = 50
_BUDGET_S = 60.0


def run(report: Report) -> None:
    """All figures of the suite."""
    import torch

    parts = {"overhead": _overhead}
    if torch.cuda.is_available():
        print(f"running: {torch.cuda.get_device_name()}, torch {torch.__version__}")
        parts |= {"parity": _parity, "predicted": _predicted, "caps": _caps, "spill": _spill}
    wanted = os.environ.get("RUNNING_PARTS", ",".join(parts)).split(",")
    for name, part in parts.items():
        if name not in wanted:
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
    from benchmarks.placed_runs import captured, forget, pairs_s, placement_of, stepper
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
    steps = [stepper(model, made, torch.optim.AdamW(model.parameters())) for model in (eager, placed)]
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


def _plans(case: Any, graph: Any, gpu: int, host: int) -> dict[str, Any]:
    from benchmarks.placed_runs import by_module

    def on_host(*heads: str) -> Any:
        dotted = tuple(f"{head}." for head in heads)
        return lambda module: host if module in heads or module.startswith(dotted) else gpu

    inner = ("transformer.h.5",) if case.family == "hf" else ("blocks.3", "layer2.1", "stages.1.1")
    first = ("transformer.wte", "transformer.wpe") if case.family == "hf" else ("stem", "conv1", "first")
    return {
        "all on the GPU": by_module(graph, lambda _: gpu),
        "one block on the host": by_module(graph, on_host(*inner)),
        "the first layers on the host": by_module(graph, on_host(*first)),
    }


def _predicted(report: Report) -> None:
    """Three plans of two models: time and peak memory, predicted and measured."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import captured, forget, on_gpu_first, placement_of, stepper, timed

    cluster = _here()
    gpu, host = on_gpu_first(cluster)
    for case in (_case("hf", "gpt2", 8, 512), _case("zoo", "resnet50", 64, 1)):
        graph = captured(case)
        problem = _problem(graph, cluster)
        for name, plan in _plans(case, graph, gpu, host).items():
            forget()
            placement = placement_of(problem, plan)
            made = case.example("cpu")
            before = torch.cuda.memory_allocated()
            placed = lm.place(made.model.train(), placement)
            found = timed(stepper(placed, made, torch.optim.AdamW(placed.parameters())), steps=10, warm=3)
            error = placement.score_s / found.step_s - 1
            peak = (found.peak_bytes - before) / max(1, int(placement.peak_bytes[gpu]))
            shown = {"hosted ops": int((plan.device == host).sum()), "predicted_s": placement.score_s}
            print(json.dumps({"case": str(case), "plan": name, **shown, "measured_s": found.step_s}))
            title = f"{case}, {name}"
            report.add(SUITE, f"{title}: step measured", 1e3 * found.step_s, "ms")
            report.add(
                SUITE, f"{title}: step error", error, "ratio", aim="within 0.15", reached=abs(error) <= 0.15
            )
            report.add(
                SUITE, f"{title}: peak / predicted", peak, "ratio", aim="<= 1.05", reached=peak <= 1.05
            )
            del placed, made


def _caps(report: Report) -> None:
    """Ten random plans over two parts of the GPU and the host, each limited to 1.05 of its predicted peak."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import captured, forget, placement_of, stepper
    from loadmaster.cluster.parse import parse_cluster
    from loadmaster.core.graph import units
    from loadmaster.core.plan import plan_of

    case, done, worst = _case("hf", "gpt2", 2, 128), 0, 0.0
    graph = captured(case)
    unit, num_units = units(graph)
    for seed in range(10):
        forget()
        where = np.random.default_rng(seed).integers(0, 3, num_units)[unit].astype(np.int32)
        plan = plan_of(where, np.arange(graph.num_ops, dtype=np.int32))
        wide = lm.problem(graph, "cuda:0#0-60GB, cuda:0#1-60GB, cpu#0-60GB")
        peaks = lm.simulate(wide, plan).peak_bytes
        names = ("cuda:0#0", "cuda:0#1", "cpu#0")
        caps = ", ".join(f"{name}-{int(1.05 * peak)}B" for name, peak in zip(names, peaks, strict=True))
        made = case.example("cpu")
        try:
            placed = lm.place(made.model, placement_of(lm.problem(graph, parse_cluster(caps)), plan))
            step = stepper(placed, made, torch.optim.AdamW(placed.parameters()))
            for _ in range(2):
                step()
            done += 1
            shares = [
                got / max(1, int(peak)) for got, peak in zip(placed.peak_bytes.values(), peaks, strict=True)
            ]
            worst = max(worst, *shares)
        except lm.LoadmasterError as problem:
            print(json.dumps({"caps": seed, "failed": str(problem)[:300]}))
    name = "ten random plans under a cap of 1.05 predicted peaks: run"
    report.add(SUITE, name, done, "plans", aim="10", reached=done == 10)
    report.add(
        SUITE,
        "ten random plans: largest peak / predicted",
        worst,
        "ratio",
        aim="<= 1.05",
        reached=worst <= 1.05,
    )


def _parity(report: Report) -> None:
    """Gradients of the first step, CUDA + CPU, in float32 without TF32, against the model itself."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import by_module, captured, forget, on_gpu_first, placement_of
    from loadmaster.graph.torch_capture.step import loss_of

    case = _case("hf", "gpt2", 2, 128)
    made = case.example("cpu")
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def grads(model: Any, device: str) -> dict[str, Any]:
        kwargs = {name: value.to(device) for name, value in made.kwargs.items()}
        model.zero_grad()
        loss_of(model(**kwargs), made.loss).backward()
        return {name: weight.grad.double().cpu() for name, weight in model.named_parameters()}

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        wanted = {"CPU": grads(copy.deepcopy(made.model), "cpu")}
        wanted["GPU"] = grads(copy.deepcopy(made.model).cuda(), "cuda")
        cluster = _here()
        gpu, host = on_gpu_first(cluster)
        graph = captured(case)
        problem = lm.problem(graph, cluster)
        plan = by_module(graph, lambda module: host if module.startswith("transformer.h.4") else gpu)
        placed = lm.place(copy.deepcopy(made.model), placement_of(problem, plan))
        found = grads(placed, "cpu")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for device, reference in wanted.items():
        ratios = {}
        for name, grad in reference.items():
            most = 1e-5 * grad.abs() + 1e-7 * grad.abs().max()
            ratios[name] = float(((found[name] - grad).abs() / most).max())
        worst = max(ratios, key=lambda name: ratios[name])
        good = sum(ratio <= 1 for ratio in ratios.values())
        print(json.dumps({"parity": device, "worst": worst, "of the limit": ratios[worst], "good": good}))
        name = f"{case}: gradients over GPU and host against the {device} alone, largest of the limit"
        reached = ratios[worst] <= 1 if device == "CPU" else None
        report.add(
            SUITE, name, ratios[worst], "ratio", aim="<= 1" if device == "CPU" else "", reached=reached
        )
    forget()


def _spill(report: Report) -> None:
    """A GPT of 1.5 billion weights, AdamW, the GPU capped at 20 GiB."""
    import torch

    import loadmaster as lm
    from benchmarks.placed_runs import (
        capped,
        captured,
        forget,
        limited,
        on_gpu_first,
        placement_of,
        stepper,
        timed,
    )
    from loadmaster.graph.spill import window_of

    seq = int(os.environ.get("RUNNING_SEQ", 1024))
    case = _case("hf", "gpt2-xl", 1, seq)
    title = f"{case} (1.5 B weights)"
    forget()
    made = case.example("cuda")
    for fused in (False, True):
        optimizer = torch.optim.AdamW(made.model.parameters(), fused=fused or None)
        plain = timed(stepper(made.model, made, optimizer), steps=5, warm=2)
        word = "fused AdamW" if fused else "AdamW"
        report.add(SUITE, f"{title}: uncapped step, {word}", plain.step_s, "s")
        report.add(SUITE, f"{title}: uncapped peak, {word}", plain.peak_bytes / GIB, "GiB")
        if not fused:
            uncapped_s = plain.step_s
        else:
            uncapped_fused_s = plain.step_s
        del optimizer
        made.model.zero_grad()
        forget()
    del made
    forget()
    cluster = _here()
    gpu, host = on_gpu_first(cluster)
    graph = captured(case)
    problem = _problem(graph, limited(cluster, gpu, int(0.98 * CAP_BYTES)))
    spilled = lm.plan(problem, budget=20.0, spill="host")
    print(json.dumps({"members": [(m.name, m.score_s, m.reason) for m in spilled.members]}))
    print(
        json.dumps(
            {"window GiB": window_of(spilled.problem.graph) / GIB, "peaks": spilled.peak_bytes.tolist()}
        )
    )
    measured = {}
    model = case.example("meta").model
    torch.manual_seed(0)
    placed = lm.place(model, spilled)
    made = case.example("meta")
    inputs = {
        name: torch.randint(0, 50257, tuple(value.shape), device="cuda")
        for name, value in made.kwargs.items()
    }
    fed = type(made)(model, (), inputs, made.loss)
    for fused in (False, True):
        forget()
        optimizer = torch.optim.AdamW(placed.parameters(), fused=fused or None)
        held = True
        try:
            with capped(CAP_BYTES):
                found = timed(stepper(placed, fed, optimizer), steps=5, warm=2)
        except torch.OutOfMemoryError as problem:  # gaps between blocks: say so, and time it without
            print(json.dumps({"out of memory under the cap": str(problem)[:400]}))
            held = False
            forget()
            found = timed(stepper(placed, fed, optimizer), steps=5, warm=2)
        word = "fused AdamW" if fused else "AdamW"
        measured[fused] = found
        print(json.dumps({"spilled losses": found.losses}))
        name = f"{title}: within 20 GiB of the allocator, gaps and all, {word}"
        report.add(SUITE, name, float(held), "bool", aim="1", reached=held)
        report.add(SUITE, f"{title}: spilled step in 20 GiB, {word}", found.step_s, "s")
        base = uncapped_fused_s if fused else uncapped_s
        ratio = found.step_s / base
        report.add(
            SUITE, f"{title}: spilled / uncapped, {word}", ratio, "ratio", aim="<= 2.5", reached=ratio <= 2.5
        )
        peak = found.peak_bytes / int(spilled.peak_bytes[gpu])
        report.add(
            SUITE, f"{title}: peak / predicted, {word}", peak, "ratio", aim="<= 1.05", reached=peak <= 1.05
        )
        del optimizer
        placed.zero_grad()
    error = spilled.score_s / measured[False].step_s - 1
    report.add(
        SUITE,
        f"{title}: spilled step, error of the prediction",
        error,
        "ratio",
        aim="within 0.20",
        reached=abs(error) <= 0.2,
    )
    del placed, model, fed, made
    forget()
    filled = _greedy(problem, gpu, host)
    greedy = placement_of(problem, filled)
    print(json.dumps({"greedy predicted_s": greedy.score_s, "hosted": int((filled.device == host).sum())}))
    model = case.example("meta").model
    torch.manual_seed(0)
    placed = lm.place(model, greedy)
    fed = type(case.example("meta"))(model, (), inputs, None)
    found = timed(stepper(placed, fed, torch.optim.AdamW(placed.parameters())), steps=2, warm=1)
    report.add(SUITE, f"{title}: greedy module fill, step", found.step_s, "s")
    times = found.step_s / measured[False].step_s
    report.add(SUITE, f"{title}: greedy fill / spilled", times, "ratio", aim=">= 5", reached=times >= 5)
    forget()


def _greedy(problem: Any, gpu: int, host: int) -> Any:
    """Blocks in order on the GPU as long as they fit, the rest on the host: what device maps do."""
    import loadmaster as lm
    from benchmarks.placed_runs import by_module

    room = int(problem.cluster.usable_bytes[gpu])

    def plan(num: int) -> Any:
        def where(module: str) -> int:
            block = module.split(".")[2] if module.startswith("transformer.h.") else ""
            return host if block.isdecimal() and int(block) >= num else gpu

        return by_module(problem.graph, where)

    low, high = 0, 48
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(lm.simulate(problem, plan(middle)).peak_bytes[gpu]) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return plan(low)

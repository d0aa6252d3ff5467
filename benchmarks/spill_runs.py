"""1.5 billion weights in 20 GiB of a GPU: uncapped, spilled to the host, and filled greedily.

The plan is made for the cap less a reserve (docs/fit.md): what the allocator gives out is rounded up, and it
cannot use its gaps; cuBLAS has a workspace of its own. None of these is predicted.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import loadmaster as lm
from benchmarks.measure import Report
from benchmarks.placed_runs import (
    Run,
    Stepper,
    by_module,
    by_phase,
    capped,
    captured,
    forget,
    fused_adamw,
    gpu_memory,
    limited,
    on_gpu_first,
    placement_of,
    timed,
)
from benchmarks.suites.gpu import Case
from loadmaster.graph.spill import max_window_bytes
from loadmaster.zoo.example import Example

GIB = 2**30
CAP_BYTES = 20 * GIB
RESERVE_BYTES = int(float(os.environ.get("RUNNING_RESERVE_GIB", 1.25)) * GIB)
_SUITE = "running"
_WORDS = {True: "fused AdamW", False: "AdamW"}
_PLAN_S = 12.0
_STEPS, _WARM = 4, 2


def spill(report: Report, cluster: Any, problem_of: Callable[[Any, Any], Any]) -> None:
    """All figures of the cap, each optimizer with a plan of its own; `problem_of` gives measured costs.

    RUNNING_SPILL=fused: the fused optimizer alone, without the greedy fill.
    """
    case = Case("hf", "gpt2-xl", 1, int(os.environ.get("RUNNING_SEQ", 1024)))
    title = f"{case} (1.5 B weights)"
    short = os.environ.get("RUNNING_SPILL") == "fused"
    began = time.perf_counter()
    kinds = (True,) if short else (True, False)  # the first is the one a user would take
    uncapped_s = _uncapped(report, case, title, kinds)
    say("uncapped", began)
    found = {}
    for fused in kinds:
        graph = captured(case, fused_adamw if fused else "adamw")
        found[fused] = _spilled(report, case, title, problem_of, graph, cluster, uncapped_s[fused], fused)
        say(f"spilled, {_WORDS[fused]}", began)
    if not short:
        gpu, host = on_gpu_first(cluster)
        problem = problem_of(captured(case, fused_adamw), limited(cluster, gpu, CAP_BYTES - RESERVE_BYTES))
        _filled(report, case, title, problem, (gpu, host), found)
        say("greedy fill", began)


def _spilled(
    report: Report,
    case: Case,
    title: str,
    problem_of: Callable[[Any, Any], Any],
    graph: Any,
    cluster: Any,
    uncapped_s: float,
    fused: bool,
) -> Run:
    """Planned for the cap and run under it."""
    gpu, _ = on_gpu_first(cluster)
    problem = problem_of(graph, limited(cluster, gpu, CAP_BYTES - RESERVE_BYTES))
    placement = lm.plan(problem, budget=_PLAN_S, spill="host")
    print(json.dumps({"members": [(m.name, m.score_s, m.reason) for m in placement.members]}))
    peaks = [round(peak / GIB, 3) for peak in placement.peak_bytes.tolist()]
    window = max_window_bytes(placement.problem.graph) / GIB
    print(json.dumps({"window GiB": window, "predicted peaks GiB": peaks, "predicted_s": placement.score_s}))
    placed, fed = _built(case, placement)
    found = _under_the_cap(report, title, placed, fed, fused)
    _compare(report, title, found, uncapped_s, int(placement.peak_bytes[gpu]), fused)
    error = placement.score_s / found.step_s - 1
    name = f"{title}: spilled step, {_WORDS[fused]}: error of the prediction"
    report.add(_SUITE, name, error, "ratio", aim="within 0.20", reached=abs(error) <= 0.2)
    del placed, fed
    forget()
    return found


def say(what: str, began: float) -> None:
    """How far it is."""
    print(json.dumps({"done": what, "after_s": round(time.perf_counter() - began, 1)}), flush=True)


def _uncapped(report: Report, case: Case, title: str, kinds: tuple[bool, ...]) -> dict[bool, float]:
    forget()
    made, found = case.example("cuda"), {}
    for fused in kinds:
        word = _WORDS[fused]
        step = Stepper(made.model, made, torch.optim.AdamW(made.model.parameters(), fused=fused or None))
        plain = timed(step, steps=_STEPS, warm=_WARM)
        print(json.dumps({"uncapped": word, "peaks GiB": by_phase(step)}))
        report.add(_SUITE, f"{title}: uncapped step, {word}", plain.step_s, "s")
        report.add(_SUITE, f"{title}: uncapped peak, {word}", plain.peak_bytes / GIB, "GiB")
        found[fused] = plain.step_s
        del step
        made.model.zero_grad()
        forget()
    return found


def _built(case: Case, placement: Any) -> tuple[Any, Any]:
    """A model made where it is planned, and a batch on the GPU."""
    made = case.example("meta")
    torch.manual_seed(0)
    placed = lm.place(made.model, placement)
    shapes = {name: tuple(value.shape) for name, value in made.kwargs.items()}
    inputs = {name: torch.randint(0, 50257, shape, device="cuda") for name, shape in shapes.items()}
    return placed, Example(made.model, (), inputs, made.loss)


def _under_the_cap(report: Report, title: str, placed: Any, fed: Any, fused: bool) -> Run:
    """Steps with the allocator limited; where they fail, what they would be without a limit."""
    forget()
    word = _WORDS[fused]
    step = Stepper(placed, fed, torch.optim.AdamW(placed.parameters(), fused=fused or None))
    found = _tried(step, word)
    name = f"{title}: within 20 GiB of the allocator, gaps and all, {word}"
    report.add(_SUITE, name, float(found is not None), "bool", aim="1", reached=found is not None)
    if found is None:  # here the failed step is gone: its traceback held all that it had saved
        placed.zero_grad()
        forget()
        found = timed(step, steps=_STEPS, warm=_WARM)
    print(json.dumps({"spilled": word, "peaks GiB": by_phase(step), "losses": found.losses}))
    del step
    placed.zero_grad()
    return found


def _tried(step: Stepper, word: str) -> Run | None:
    try:
        with capped(CAP_BYTES):
            return timed(step, steps=_STEPS, warm=_WARM)
    except torch.OutOfMemoryError as problem:
        where = {"phase": step.phase, "GiB": gpu_memory(), "torch says": str(problem)[:300]}
        print(json.dumps({"out of memory under the cap": word, **where}))
        return None


def _compare(report: Report, title: str, found: Run, base_s: float, predicted: int, fused: bool) -> None:
    word, ratio = _WORDS[fused], found.step_s / base_s
    report.add(_SUITE, f"{title}: spilled step in 20 GiB, {word}", found.step_s, "s")
    name = f"{title}: spilled / uncapped, {word}"
    report.add(_SUITE, name, ratio, "ratio", aim="<= 2.5", reached=ratio <= 2.5)
    peak = found.peak_bytes / max(1, predicted)
    name = f"{title}: peak / predicted, {word}"
    report.add(_SUITE, name, peak, "ratio", aim="<= 1.05", reached=peak <= 1.05)


def _filled(
    report: Report, case: Case, title: str, problem: Any, at: tuple[int, int], spilled: dict[bool, Run]
) -> None:
    """Both by the default AdamW, and both by the fused one."""
    gpu, host = at
    plan = _greedy(problem, gpu, host)
    greedy = placement_of(problem, plan)
    print(json.dumps({"greedy predicted_s": greedy.score_s, "hosted": int((plan.device == host).sum())}))
    placed, fed = _built(case, greedy)
    for fused, word in ((True, _WORDS[True]), (False, _WORDS[False])):
        step = Stepper(placed, fed, torch.optim.AdamW(placed.parameters(), fused=fused or None))
        found = timed(step, steps=2, warm=1)
        report.add(_SUITE, f"{title}: greedy module fill, step, {word}", found.step_s, "s")
        times = found.step_s / spilled[fused].step_s
        name = f"{title}: greedy fill / spilled, {word}"
        report.add(_SUITE, name, times, "ratio", aim=">= 5", reached=times >= 5)
        del step
        placed.zero_grad()
        forget()


def _greedy(problem: Any, gpu: int, host: int) -> Any:
    """Blocks in order on the GPU as long as they fit, the rest on the host: what device maps do."""
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

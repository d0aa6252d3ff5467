"""The proven gap of training steps that no single GPU holds: 24 cases, what `auto` finds and proves.

`BENCH_BUDGET_S` is auto's budget (10 s), `BENCH_MODELS` some of the models. With `BENCH_CLOCK=process`
seconds are those of processor time, for machines that others use at the same time.
"""

import os
import statistics
import time

from benchmarks.measure import Report
from benchmarks.training_steps import MODELS, Case, every_case, step_problem
from loadmaster import api
from loadmaster.core.problem import Problem

SUITE = "gap"
MEDIAN_AIM, WORST_AIM = {10.0: 0.10, 60.0: 0.07}, 0.40


def run(report: Report) -> None:
    """Each case, then the median and the worst where all were asked."""
    if os.environ.get("BENCH_CLOCK") == "process":
        time.perf_counter = time.process_time
    budget_s = float(os.environ.get("BENCH_BUDGET_S", "10"))
    named = os.environ.get("BENCH_MODELS", "")
    models = named.split(",") if named else list(MODELS)
    report.add(SUITE, "budget of auto", budget_s, "s")
    warm: set[str] = set()
    gaps = []
    for case in every_case():
        if case.model in models:
            problem, batch = step_problem(case)
            if not warm:
                api.plan(problem, budget="30x")
                warm.add(case.model)
            gaps.append(measure_case(report, case, problem, batch, budget_s))
    if len(models) == len(MODELS):
        summarize(report, gaps, budget_s)


def measure_case(report: Report, case: Case, problem: Problem, batch: int, budget_s: float) -> float:
    """The gap of a case."""
    began = time.perf_counter()
    answer = api.plan(problem, budget=budget_s)
    took_s = time.perf_counter() - began
    name = f"{case} (batch {batch})"
    if answer.score_s is None:
        report.add(SUITE, f"{name}: gap", float("inf"), "%")
        return float("inf")
    gap = answer.score_s / answer.bound_s - 1.0
    report.add(SUITE, f"{name}: step", 1e3 * answer.score_s, "ms")
    report.add(SUITE, f"{name}: bound, {answer.bound_name}", 1e3 * answer.bound_s, "ms")
    report.add(SUITE, f"{name}: gap", 100.0 * gap, "%")
    report.add(SUITE, f"{name}: time taken", took_s, "s")
    return gap


def summarize(report: Report, gaps: list[float], budget_s: float) -> None:
    """Median and worst of all cases."""
    aim = MEDIAN_AIM.get(budget_s)
    median = statistics.median(gaps)
    if aim is not None:
        text = f"<= {100 * aim:g} %"
        report.add(SUITE, "median gap", 100.0 * median, "%", aim=text, reached=median <= aim)
    text = f"<= {100 * WORST_AIM:g} %"
    report.add(SUITE, "worst gap", 100.0 * max(gaps), "%", aim=text, reached=max(gaps) <= WORST_AIM)

"""Placement time: how long algorithms take on 10,000 ops, how fast refine moves, and a million ops.

The published generators with their own four devices, warm, port links (`shared` on a star) and free ones
(`parallel`). Timed is the call of the algorithm: every pass, every simulation of its plans and the linear
programme. Reading the graph, the lower bound and the preparation of the simulator come before and are given
beside it.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from benchmarks.cases import EQUAL, GENERATORS, Case, budget_s, problem_of
from benchmarks.measure import Report, median_s
from benchmarks.question import Question, question_of, warm
from loadmaster.core.run import Budget
from loadmaster.placers.registry import Placer, placer

SUITE = "placement"
SIZE = 10_000
LINKS = ("port", "free")
ALGORITHMS = ("m_topo", "m_etf", "m_sct", "heft", "cpop", "chain_balance")
AIMS_S = {
    ("fork_join", "m_etf"): 0.015,
    ("fork_join", "m_sct"): 0.4,
    ("many_source", "m_etf"): 0.06,
    ("layered", "m_etf"): 0.1,
    ("layered", "m_sct"): 5.0,
}
GROWTH = ("m_etf", "m_sct")
MOST_GROWTH = 2.5
REFINED = ("fork_join", "layered", "rnn_grid")
LEAST_MOVES_PER_S = 2_000
LARGE = ("gen:transformer:1000000", "8xA100-1400GB, 8xV100-700GB")
_SLOW_S = 1.0  # from here on three calls are enough
_TURNS = 5


def run(report: Report) -> None:
    """All figures of the suite."""
    warm()
    for generator in GENERATORS:
        for links in LINKS:
            question = question_of(problem_of(Case(generator, SIZE, EQUAL, links)))
            for name in ALGORITHMS:
                _time(report, question, generator, links, name)
            if generator == "many_source":
                _growth(report, links, question)
        _prepare(report, generator)
    for generator in REFINED:
        for links in LINKS:
            _moves(report, generator, links)
    _large(report)


@dataclass(frozen=True, slots=True)
class Taken:
    """Median wall and processor seconds of a call."""

    wall_s: float
    cpu_s: float


def taken(question: Question, name: str) -> Taken:
    """What an algorithm's call takes, warm. On a busy machine processor time tells more than wall time."""
    algorithm = placer(name)
    slow = _call(question, algorithm).wall_s > _SLOW_S
    for _ in range(0 if slow else 2):
        question.ask(algorithm)
    calls = [_call(question, algorithm) for _ in range(3 if slow else 15)]
    return Taken(
        statistics.median(call.wall_s for call in calls), statistics.median(call.cpu_s for call in calls)
    )


def _call(question: Question, algorithm: Placer) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    question.ask(algorithm)
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def _time(report: Report, question: Question, generator: str, links: str, name: str) -> None:
    found = taken(question, name)
    most = AIMS_S.get((generator, name))
    aim, reached = ("", None) if most is None else (f"<= {1e3 * most:g}", found.wall_s <= most)
    label = f"{generator} {SIZE:,}, {links}: {name}"
    report.add(SUITE, label, 1e3 * found.wall_s, "ms", aim=aim, reached=reached)
    report.add(SUITE, f"{label}, processor time", 1e3 * found.cpu_s, "ms")


def _growth(report: Report, links: str, whole: Question) -> None:
    """Twice the ops of the graph on which the published placers take four times as long, in turns."""
    half = question_of(problem_of(Case("many_source", SIZE // 2, EQUAL, links)))
    for name in GROWTH:
        algorithm = placer(name)
        for question in (half, whole):
            question.ask(algorithm)
        ratio = statistics.median(
            _call(whole, algorithm).wall_s / _call(half, algorithm).wall_s for _ in range(_TURNS)
        )
        report.add(
            SUITE,
            f"many_source {SIZE // 2:,} to {SIZE:,}, {links}: {name}",
            ratio,
            "x",
            aim=f"<= {MOST_GROWTH}",
            reached=ratio <= MOST_GROWTH,
        )


def _prepare(report: Report, generator: str) -> None:
    problem = problem_of(Case(generator, SIZE, EQUAL, "port"))
    seconds = median_s(lambda: question_of(problem), repeats=5)
    report.add(SUITE, f"{generator} {SIZE:,}: bound and preparation", 1e3 * seconds, "ms")


def _moves(report: Report, generator: str, links: str) -> None:
    """Moves that refine has tried by its last word, over the seconds until then; its start is given."""
    question = question_of(problem_of(Case(generator, SIZE, EQUAL, links)))
    start = question.ask(placer("m_etf")).plan
    assert start is not None
    refine = placer("refine", start=start)
    question.ask(refine, Budget(count=200))  # compiled
    seen: list[tuple[float, int]] = []

    def note(message: str, _share: float) -> None:
        moves = re.match(r"refine: ([0-9,]+) moves", message)
        if moves:
            seen.append((time.perf_counter(), int(moves[1].replace(",", ""))))

    # A bound of nothing: the climb does not end before its time.
    endless = replace(question, bound=replace(question.bound, seconds=0.0))
    began = time.perf_counter()
    endless.ask(refine, Budget(seconds=max(budget_s() / 2, 1.0)), progress=note)
    last, moves = seen[-1] if seen else (time.perf_counter(), 0)
    rate = moves / (last - began)
    report.add(
        SUITE,
        f"{generator} {SIZE:,}, {links}: refine",
        rate,
        "moves/s",
        aim=f">= {LEAST_MOVES_PER_S:,}",
        reached=rate >= LEAST_MOVES_PER_S,
    )


def _large(report: Report) -> None:
    """A million ops that no device holds, in a process of its own."""
    source, devices = LARGE
    command = [sys.executable, "-m", "benchmarks.first_plan", source, devices, str(budget_s())]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    first_s, peak_gib = found["first_fit_s"], found["peak_bytes"] / 2**30
    fits = first_s is not None
    report.add(
        SUITE,
        "1,000,000 ops: auto's first plan that fits" if fits else "1,000,000 ops: auto, no plan fits after",
        first_s if fits else found["plan_s"],
        "s",
        aim="<= 10",
        reached=fits and first_s <= 10,
    )
    report.add(SUITE, "1,000,000 ops: bound and preparation before it", found["ready_s"], "s")
    report.add(SUITE, "1,000,000 ops: reading the graph", found["read_s"], "s")
    report.add(SUITE, "1,000,000 ops: lm.plan in all", found["plan_s"], "s")
    if found["gap"] is not None:
        report.add(SUITE, "1,000,000 ops: gap of the plan in the end", 100 * found["gap"], "%")
    report.add(
        SUITE, "1,000,000 ops: peak memory", peak_gib, "GiB", aim="< 4", reached=found["peak_bytes"] < 2**32
    )

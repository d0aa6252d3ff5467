"""Verdicts: for which classes of graphs a learned placer may be recommended, by a rule and not by taste.

A class is an objective (for throughput with its split) and the size of a graph. For each held-out graph of a
class the benchmark measures, over seeds, the learned placer and every mandatory baseline at equal evaluations
and at equal processor time. The placer is recommended where its median beats the best baseline's on more than
half of the graphs and the bootstrap interval of the mean log ratio excludes zero, both ways of counting. The
benchmark writes the outcome to `weights/verdict.json`; `auto` reads it. Where it is missing or damaged
nothing is recommended.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadmaster.core.problem import Objective, Problem

FILE = Path(__file__).parent / "weights" / "verdict.json"
VERSION = 1
_MOST_BYTES = 2**20
_SIZES = ((100, "up to 100"), (1000, "up to 1000"))
_RESAMPLES, _CONFIDENCE = 10_000, 95.0


@dataclass(frozen=True, slots=True, eq=False)
class GraphTimes:
    """Times on one held-out graph: of the placer, and of each baseline, a list over seeds each."""

    graph: str
    learned: Sequence[float]
    baselines: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rule says of a class."""

    recommended: bool
    num_graphs: int
    num_better: int
    mean_log_ratio: float  # of learned / best baseline; below zero is better
    low: float
    high: float
    strongest: str  # the baseline that was best most often


def judge(graphs: Sequence[GraphTimes], seed: int = 0) -> Verdict:
    """The rule on the graphs of a class, for one way of counting."""
    ratios, best = [], []
    for each in graphs:
        medians = {name: float(np.median(times)) for name, times in each.baselines.items()}
        strongest = min(medians, key=lambda name: (medians[name], name))
        best.append(strongest)
        ratios.append(np.log(float(np.median(each.learned)) / medians[strongest]))
    value = np.array(ratios)
    if not len(value):
        return Verdict(False, 0, 0, 0.0, 0.0, 0.0, "")
    draws = np.random.default_rng(seed).integers(0, len(value), (_RESAMPLES, len(value)))
    tail = (100.0 - _CONFIDENCE) / 2.0
    low, high = np.percentile(value[draws].mean(axis=1), [tail, 100.0 - tail])
    better = int((value < -1e-9).sum())
    wins = 2 * better > len(value) and bool(high < 0.0)
    strongest = max(sorted(set(best)), key=best.count)
    return Verdict(wins, len(value), better, float(value.mean()), float(low), float(high), strongest)


def recommend(by_evaluations: Verdict, by_seconds: Verdict) -> bool:
    """Both ways of counting must agree."""
    return by_evaluations.recommended and by_seconds.recommended


def class_of(problem: Problem) -> str:
    """The class of a problem, e.g. 'step, up to 1000 ops' or 'throughput (chain), up to 100 ops'."""
    num, asked = problem.graph.num_ops, problem.objective.value
    size = next((label for most, label in _SIZES if num <= most), "more than 1000")
    if problem.objective == Objective.THROUGHPUT:
        asked = f"{asked} ({problem.split.value})"
    return f"{asked}, {size} ops"


def is_recommended(algorithm: str, problem: Problem, path: Path | None = None) -> bool:
    """Whether the file of verdicts recommends an algorithm for a problem like this one."""
    found = read_verdicts(FILE if path is None else path).get(algorithm, {})
    entry = found.get(class_of(problem), {}) if isinstance(found, dict) else {}
    return isinstance(entry, dict) and entry.get("recommended") is True


def read_verdicts(path: Path) -> dict[str, Any]:
    """What the benchmark wrote, {} where that cannot be read."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("version") != VERSION:
        return {}
    verdicts = document.get("verdicts")
    return verdicts if isinstance(verdicts, dict) else {}

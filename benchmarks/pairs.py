"""python -m benchmarks.pairs OLD NEW: two trees of this project against each other, in alternating pairs.

OLD and NEW are checkouts. Each has one process that answers requests to run a case; a pair is the case once
in either, the order swapped from pair to pair, so that whatever the machine does meanwhile meets both. The
figure is the ratio NEW / OLD: the geometric mean over pairs with its 95 % interval (Student's t on the
logarithms). Only public names are used, so that any two trees can be compared. Import and `--help` are timed
in fresh processes.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DEVICES = "2xA100-80GB, 2xV100-16GB, cpu-64GB"
AIM = 1.05  # the upper end of the interval stays below
_FRESH = {
    "import": [sys.executable, "-c", "import loadmaster"],
    "help": [sys.executable, "-m", "loadmaster", "--help"],
}


def main() -> None:
    """Compare two trees and write a result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--cases", default="")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    wanted = given.cases.split(",") if given.cases else [*CASES, *_FRESH]
    trees = [Path(given.old).resolve(), Path(given.new).resolve()]
    workers = [_Worker(tree) for tree in trees]
    figures = []
    for name in wanted:
        if name in _FRESH:
            run = [partial(_fresh, tree, name) for tree in trees]
        else:
            run = [partial(worker.run, name) for worker in workers]
        figures.append(_compared(name, run, given.pairs))
        print(json.dumps(figures[-1]), flush=True)
    for worker in workers:
        worker.close()
    if given.out:
        from benchmarks.measure import machine

        about = {"machine": machine(), "figures": figures}
        Path(given.out).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _compared(name: str, run: Sequence[Callable[[], float]], num_pairs: int) -> dict[str, Any]:
    for each in run:
        each()  # warm
    logs, seconds = [], ([], [])  # type: ignore[var-annotated]
    for pair in range(num_pairs):
        order = (0, 1) if pair % 2 else (1, 0)
        took = {at: run[at]() for at in order}
        logs.append(math.log(took[1] / took[0]))
        for at in (0, 1):
            seconds[at].append(took[at])
    half = _student(num_pairs - 1) * statistics.stdev(logs) / math.sqrt(num_pairs)
    mean = statistics.fmean(logs)
    high = math.exp(mean + half)
    return {
        "name": f"{name}, new / old",
        "suite": "pairs",
        "value": round(math.exp(mean), 4),
        "low": round(math.exp(mean - half), 4),
        "high": round(high, 4),
        "old_s": round(statistics.median(seconds[0]), 5),
        "new_s": round(statistics.median(seconds[1]), 5),
        "pairs": num_pairs,
        "aim": f"upper end below {AIM}",
        "reached": high < AIM,
    }


def _student(degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tree / 'src'}", "OMP_NUM_THREADS": "1"}


def _fresh(tree: Path, name: str) -> float:
    began = time.perf_counter()
    subprocess.run(_FRESH[name], env=_environment(tree), check=True, capture_output=True)
    return time.perf_counter() - began


class _Worker:
    """A process over one tree; it is given a case's name and answers with seconds."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=_environment(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answer requests of the parent; what cases print goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    made: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in made:
            made[name] = CASES[name]()
        began = time.perf_counter()
        made[name]()
        out.write(f"{time.perf_counter() - began}\n")
        out.flush()


def _simulate() -> Callable[[], object]:
    import loadmaster as lm

    problem = lm.problem("gen:transformer:3000", DEVICES)
    plan = lm.plan(problem, algorithm="m_etf").plan
    return lambda: [lm.simulate(problem, plan) for _ in range(200)]


def _plan() -> Callable[[], object]:
    import loadmaster as lm

    problem = lm.problem("gen:transformer:1500", DEVICES)
    return lambda: lm.plan(problem, budget="300x")


def _heuristic() -> Callable[[], object]:
    import loadmaster as lm

    problem = lm.problem("gen:transformer:3000", DEVICES)
    return lambda: [lm.plan(problem, algorithm="m_etf") for _ in range(3)]


def _fit() -> Callable[[], object]:
    import loadmaster as lm

    return lambda: lm.fit("gen:transformer:1500", "2xV100-16GB, cpu-64GB", quick=True)


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(12)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _capture() -> Callable[[], object]:
    import torch

    import loadmaster as lm

    model, batch = _model(), torch.randn(8, 64)
    return lambda: lm.capture(model, (batch,))


def _place() -> Callable[[], object]:
    """Steps of small ops, so that what placing adds is what is seen."""
    import torch

    import loadmaster as lm

    model, batch = _model(), torch.randn(8, 64)
    placed = lm.place(model, batch, devices="cpu#0-1GB, cpu#1-1GB", budget="20x")
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.01)

    def steps() -> None:
        for _ in range(40):
            optimizer.zero_grad()
            placed(batch).square().mean().backward()
            optimizer.step()

    return steps


def _study() -> Callable[[], object]:
    """Two trials under a cap that cuts them into shards."""
    import torch
    from torch import nn

    import loadmaster.train as lt

    made = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 64, generator=made), torch.randint(10, (8,), generator=made))] * 30

    def trial(name: str, rate: float) -> Any:
        return lt.Trial(
            name=name,
            build=_model,
            loss=nn.functional.cross_entropy,
            data=lambda: data,
            optim=lambda params: torch.optim.AdamW(params, lr=rate),
            epochs=1,
        )

    def study() -> None:
        with tempfile.TemporaryDirectory() as folder:
            lt.Study([trial("a", 1e-3), trial("b", 1e-2)], dir=folder, devices="cpu", memory_cap="1MiB").fit()

    return study


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "simulate": _simulate,
    "heuristic": _heuristic,
    "plan": _plan,
    "fit": _fit,
    "capture": _capture,
    "place": _place,
    "study": _study,
}

if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()

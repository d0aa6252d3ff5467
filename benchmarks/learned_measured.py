"""python -m benchmarks.learned_measured OUT [--source S] [--devices D]: a search on real devices.

`auto` plans with simulated costs; `learned_order` has so many evaluations, each of them real steps of a plan
on this machine. Then both plans are run in turn, several times, and compared with error bars. The default is
a GPT on a GPU that is capped so that neither it nor the host's memory alone would do.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import loadmaster as lm
from benchmarks.measure import machine
from loadmaster.core.placement import Placement
from loadmaster.runtime.run.launch import rebuild_for_graph
from loadmaster.runtime.run.plan_timer import PlanTimer

_TURNS = 5
_RESAMPLES = 10_000


def main() -> None:
    """Plan twice, then compare in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", default="hf:gpt2-xl")
    parser.add_argument("--devices", default="cuda:0-10GB, cpu-10GB")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--algorithms", default="learned_order,hsdag")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    problem = lm.problem(
        asked.source, asked.devices, optimizer="sgd", batch=asked.batch, seq=asked.seq, costs="auto"
    )
    began = time.perf_counter()
    plans: dict[str, Placement] = {"auto, simulated": lm.plan(problem, budget=20.0, order="captured")}
    rebuilt = rebuild_for_graph(problem.graph)
    alone = lm.plan(problem, algorithm="single_device", order="captured").fits
    searches: dict[str, Any] = {}
    for name in asked.algorithms.split(","):
        budget, took = f"{asked.evaluations}x", time.perf_counter()
        plans[name] = lm.plan(
            problem, algorithm=name, budget=budget, evaluate="measured", repeats=asked.repeats
        )
        searches[name] = {
            "seconds": time.perf_counter() - took,
            "note": plans[name].members[-1].reason,
            "score_s": plans[name].score_s,
        }
        print(name, searches[name], flush=True)
    times = _in_turns(problem, rebuilt, plans)
    report = {
        "machine": machine(),
        "asked": {name: str(value) for name, value in vars(asked).items()},
        "one device holds the step": alone,
        "searches": searches,
        "predicted_s": {name: one.score_s for name, one in plans.items()},
        "steps_s": times,
        "median_s": {name: float(np.median(steps)) for name, steps in times.items()},
        "against_auto": {
            name: _compare(times[name], times["auto, simulated"])
            for name in times
            if name != "auto, simulated"
        },
        "seconds": time.perf_counter() - began,
    }
    (asked.out / "learned-measured.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: report[name] for name in ("median_s", "against_auto")}, indent=1))


def _in_turns(problem: Any, rebuilt: Any, plans: dict[str, Placement]) -> dict[str, list[float]]:
    """Steps of every plan, one plan after the other, several times over."""
    times: dict[str, list[float]] = {name: [] for name, one in plans.items() if one.plan is not None}
    for turn in range(_TURNS):
        for name in times:
            plan = plans[name].plan
            assert plan is not None
            timer = PlanTimer(problem, rebuilt, 5, seed=turn)
            timer.score(plan)
            times[name] += list(timer.measured[-1].steps)
    return {name: steps for name, steps in times.items() if steps}


def _compare(steps: list[float], against: list[float]) -> dict[str, float]:
    """Ratio of medians with a bootstrap interval; below one is faster."""
    rng = np.random.default_rng(0)
    one, other = np.array(steps), np.array(against)
    draws = [
        np.median(rng.choice(one, len(one))) / np.median(rng.choice(other, len(other)))
        for _ in range(_RESAMPLES)
    ]
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"ratio": float(np.median(one) / np.median(other)), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()

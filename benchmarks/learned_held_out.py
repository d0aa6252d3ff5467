"""Held-out graphs: `learned_order` at 0, 10 and 100 evaluations against every mandatory baseline.

The shipped weights were trained on generated graphs alone, so every family here is left out: the published
throughput and latency inputs, PipeDream's profiles, and training steps captured from models of the zoo, also
with other numbers of accelerators than published. 0 evaluations: the first plan, of which nothing was
evaluated. Everybody is given the same evaluations, then as many as fit into the processor time that
`learned_order` took, its network and features included, in a warm process. The verdict file of the package is
written from the outcome at 100 evaluations, by a run with every graph and five seeds; a smaller run leaves
that file alone and says how many graphs it measured. Graphs are taken in turns from their families, in an
order drawn once, so that a run that ends early is a fair sample.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import loadmaster as lm
from benchmarks.learned_table import OPTIMA
from benchmarks.measure import Report
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Bound, Budget, Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.bounds import quick_bound
from loadmaster.placers.learned import _verdict as verdict
from loadmaster.placers.learned._groups import group_problem
from loadmaster.placers.learned._order_network import make_network
from loadmaster.placers.learned._searcher import Climb, offer_start, run_searcher
from loadmaster.placers.learned._weights import load_weights, save_weights, shipped_weights
from loadmaster.placers.registry import placer
from loadmaster.simulator.events.engine import prepare

SUITE = "learned"
BUDGETS = (0, 10, 100)
SEEDS = 5
OTHER_ACCELERATORS = 4  # of latency inputs, instead of 4 to 12
_NEARLY = 0.8  # of the processor time that a baseline may spend
_MOST_RETRIES = 3
_TIMED = 2  # runs whose processor time is taken for each baseline
CAPTURED = (  # source, devices, batch, tokens: with room on one device, and without
    ("zoo:lstm_unrolled", "RTX4090, RTX3090", 64, 24),
    ("zoo:lstm_unrolled", "4xT4", 2048, 24),
    ("zoo:gnmt", "4xV100-16GB", 64, 8),
    ("zoo:gnmt", "2xT4, GTX1080Ti", 1024, 8),
    ("zoo:inception_v3", "4xV100-16GB", 8, 1),
    ("zoo:inception_v3", "2xT4, GTX1080Ti", 256, 1),
    ("hf:bert-base", "T4, GTX1080Ti", 8, 512),
    ("hf:bert-base", "2xT4, GTX1080Ti", 32, 512),
)


def measure_held_out(report: Report, shared: Path, seeds: int = SEEDS, until: float = np.inf) -> None:
    """Every graph that can begin before `until` (of the monotonic clock), then the verdict of every class."""
    network, about = load_weights(shipped_weights())
    plain = Path(os.environ.get("TMPDIR", "/tmp")) / "learned-untrained.safetensors"
    save_weights(make_network(network.size, 0), plain, training_set="0" * 64, about={})
    asked = {"trained": placer("learned_order"), "untrained": placer("learned_order", weights=str(plain))}
    by_class: dict[int, dict[str, dict[str, list[verdict.GraphTimes]]]] = {}
    logs: dict[int, list[float]] = {}
    listed, measured, interrupted = list_graphs(shared), 0, False
    try:
        for name, read in listed:
            if time.monotonic() > until:
                break
            _measure_budgets(report, name, read(), asked, seeds, by_class, logs)
            measured += 1
    except (KeyboardInterrupt, SystemError):  # compiled code that is interrupted raises the second
        interrupted = True
    report.add(SUITE, f"held-out graphs measured, of {len(listed)}", measured, "graphs")
    report.figures[-1]["seeds"] = seeds
    document = report_verdicts(report, by_class)
    if measured == len(listed) and seeds >= SEEDS:
        write_verdicts(document, str(about.get("training_set")))
    else:
        print(f"{SUITE}: {measured} of {len(listed)} graphs with {seeds} seeds: no verdict is written")
    for count, found in logs.items():
        label = f"{count} evaluations: trained / untrained, geometric mean"
        report.add(SUITE, label, float(np.exp(np.mean(found))), "x")
        better, worse = (np.array(found) < -1e-9).sum(), (np.array(found) > 1e-9).sum()
        report.figures[-1] |= {"better": int(better), "worse": int(worse), "graphs": len(found)}
    if interrupted:
        raise KeyboardInterrupt


def _measure_budgets(
    report: Report,
    name: str,
    problem: Problem,
    asked: dict[str, Any],
    seeds: int,
    by_class: dict[int, dict[str, dict[str, list[verdict.GraphTimes]]]],
    logs: dict[int, list[float]],
) -> None:
    """One graph at every budget."""
    bound_s, klass = quick_bound(problem).seconds, verdict.class_of(problem)
    for count in BUDGETS:
        row = _measure_graph(problem, asked, count, seeds)
        best = min(row["baselines"], key=lambda one: float(np.median(row["baselines"][one])))
        medians = {name: float(np.median(times)) for name, times in row["baselines"].items()}
        mine, plain_s = float(np.median(row["trained"])), float(np.median(row["untrained"]))
        logs.setdefault(count, []).append(float(np.log(mine / plain_s)))
        label = f"{name}, {count} evaluations: learned_order / {best}"
        report.add(SUITE, label, mine / medians[best], "x")
        report.figures[-1] |= {
            "class": klass,
            "seconds": mine,
            "quartiles": [float(q) for q in np.percentile(row["trained"], [25, 75])],
            "worst": max(row["trained"]),
            "untrained": plain_s,
            "seeds": seeds,
            "baselines": medians,
            "at_equal_processor_time": {n: float(np.median(t)) for n, t in row["timed"].items()},
            "processor_s": row["processor_s"],
            "over_bound": mine / bound_s if bound_s > 0 else None,
        }
        for way, known in (("evaluations", row["baselines"]), ("seconds", row["timed"])):
            ways = by_class.setdefault(count, {}).setdefault(klass, {"evaluations": [], "seconds": []})
            ways[way].append(verdict.GraphTimes(name, row["trained"], known))


Listed = list[tuple[str, Callable[[], Problem]]]


def list_graphs(shared: Path) -> Listed:
    """Names of the held-out problems and what reads each, one family after another in turns."""
    families = list(_families(shared).values())
    drawn = np.random.default_rng(0)
    for family in families:
        drawn.shuffle(family)
    return [family[at] for at in range(max(map(len, families))) for family in families if at < len(family)]


def _families(shared: Path) -> dict[str, Listed]:
    found: dict[str, Listed] = {}
    for name in OPTIMA:
        path = str(shared / "msr" / "throughput-inputs" / f"{name}.json")
        for split in (Split.CHAIN, Split.FREE):
            family = found.setdefault(f"throughput, {name.partition('/')[0]}", [])
            family.append((f"{name}, {split.value}", partial(lm.problem, path, split=split)))
    for file in sorted((shared / "msr" / "latency-inputs").glob("*/*.json")):
        name = f"{file.parent.name}/{file.stem}, step"
        family = found.setdefault(f"step, {file.parent.name}", [])
        family.append((name, partial(_latency, file, None)))
        other = f"{name}, {OTHER_ACCELERATORS} accelerators"
        family.append((other, partial(_latency, file, OTHER_ACCELERATORS)))
    for file in sorted((shared / "pipedream").glob("*.txt")):
        for devices in ("2xT4, GTX1080Ti", "A100-40GB, V100, T4, T4"):
            name = f"pipedream {file.stem} on {devices}"
            found.setdefault("pipedream", []).append((name, partial(lm.problem, str(file), devices)))
    if "captured" in os.environ.get("LEARNED_GRAPHS", "captured"):
        for source, devices, batch, seq in CAPTURED:
            name = f"{source}, batch {batch} x {seq}, on {devices}"
            read = partial(lm.problem, source, devices, batch=batch, seq=seq)
            found.setdefault("captured", []).append((name, read))
    return found


def _latency(path: Path, accelerators: int | None) -> Problem:
    problem = lm.problem(str(path), objective="step", split="free")
    return problem if accelerators is None else with_accelerators(problem, accelerators)


def with_accelerators(problem: Problem, count: int) -> Problem:
    """The problem with so many of its accelerators, or as many as there are and copies of the first."""
    cluster = problem.cluster
    on_host = cluster.on_host[cluster.kind]
    accelerators, hosts = np.flatnonzero(~on_host), np.flatnonzero(on_host)
    keep = np.concatenate([np.resize(accelerators, count), hosts])
    names = [f"acc{at}" for at in range(count)] + [cluster.device_name[d] for d in hosts]
    other = replace(
        cluster,
        device_name=tuple(names),
        kind=cluster.kind[keep],
        host=cluster.host[keep],
        engine=np.arange(len(keep)),
        memory_bytes=cluster.memory_bytes[keep],
        reserve_bytes=cluster.reserve_bytes[keep],
        route=cluster.route[keep][:, keep],
    )
    return replace(problem, cluster=other)


def ask(problem: Problem, algorithm: Any, budget: Budget, seed: int) -> tuple[float, float]:
    """Seconds of the answer, and of processor time."""
    simulator = prepare(problem)
    run = Run(
        budget=budget,
        rng=np.random.default_rng(seed),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=Bound(0.0, "none"),
        repair=False,
    )
    began = time.process_time()
    answer = algorithm(problem, run)
    return float(answer.score_s if answer.score_s is not None else np.inf), time.process_time() - began


def _measure_graph(problem: Problem, asked: dict[str, Any], count: int, seeds: int) -> dict[str, Any]:
    """Times over seeds of both networks, and of the baselines at equal evaluations and processor time."""
    budget = Budget(count=max(count, 1))
    ask(problem, asked["trained"], Budget(count=2), 0)
    mine = [ask(problem, asked["trained"], budget, seed) for seed in range(seeds)]
    plain = [ask(problem, asked["untrained"], budget, seed)[0] for seed in range(seeds)]
    processor_s = float(np.median([one[1] for one in mine]))
    equal, timed = {}, {}
    for name, algorithm in baselines(problem).items():
        equal[name] = [ask(problem, algorithm, budget, seed)[0] for seed in range(seeds)]
        most = Budget(count=_evaluations_in(problem, algorithm, processor_s, budget.count or 1))
        timed[name] = [ask(problem, algorithm, most, seed)[0] for seed in range(seeds)]
    return {
        "trained": [one[0] for one in mine],
        "untrained": plain,
        "processor_s": processor_s,
        "baselines": equal,
        "timed": timed,
    }


def _evaluations_in(problem: Problem, algorithm: Any, processor_s: float, count: int) -> int:
    """How many evaluations take about as long."""
    for _ in range(_MOST_RETRIES):
        taken_s = min(ask(problem, algorithm, Budget(count=count), seed)[1] for seed in range(_TIMED))
        if _NEARLY * processor_s <= taken_s <= processor_s / _NEARLY:
            break
        count = max(1, int(count * min(processor_s / max(taken_s, 1e-6), 30.0)))
    return count


class WarmClimb:
    """Single moves from a constructor's plan."""

    def __init__(self, start: str) -> None:
        self.start = start

    def __call__(self, problem: Problem, run: Run) -> Any:
        """Until the budget ends."""
        groups, tally = group_problem(problem), Tally(problem, run)
        offer_start(problem, tally, self.start)
        row, best_s = groups.row(tally.best_plan), groups.penalised_s(tally.best_score)
        if not tally.spent:
            run_searcher(Climb(groups, row, best_s, restarts=False), groups, tally)
        return tally.answer(algorithm="warm_climb")


def baselines(problem: Problem) -> dict[str, Any]:
    """The mandatory ones that serve the problem."""
    if problem.objective == Objective.THROUGHPUT:
        found = {"linear_dp": placer("linear_dp"), "single_device": placer("single_device")}
        if problem.split == Split.FREE:
            found |= {"linear_dp + climbing": WarmClimb("linear_dp"), "warm CE": placer("cross_entropy")}
        return found
    return {
        "heft": placer("heft"),
        "m_etf": placer("m_etf"),
        "single_device": placer("single_device"),
        "heft + climbing": WarmClimb("heft"),
        "m_etf + climbing": WarmClimb("m_etf"),
        "warm CE": placer("cross_entropy"),
    }


def report_verdicts(report: Report, by_class: dict[int, Any]) -> dict[str, Any]:
    """The rule's outcome for every class and budget; what it says at the largest budget is to be shipped."""
    document: dict[str, Any] = {}
    for count, classes in by_class.items():
        every: dict[str, list[verdict.GraphTimes]] = {"evaluations": [], "seconds": []}
        for ways in classes.values():
            for way in every:
                every[way] += ways[way]
        for klass, ways in {**classes, "all": every}.items():
            one, other = verdict.judge(ways["evaluations"]), verdict.judge(ways["seconds"])
            for way, found in (("equal evaluations", one), ("equal processor time", other)):
                label = f"{klass}, {count} evaluations, {way}"
                report.add(SUITE, f"{label}: mean log ratio", found.mean_log_ratio, "")
                report.figures[-1] |= {
                    "interval": [found.low, found.high],
                    "graphs": found.num_graphs,
                    "better": found.num_better,
                    "worse": sum(_median_ratio(each) > 1 + 1e-9 for each in ways[_WAYS[way]]),
                    "strongest_baseline": found.strongest,
                }
                aim, reached = ("more than half", found.recommended) if klass == "all" else ("", None)
                better = f"{label}: better on, of {found.num_graphs}"
                report.add(SUITE, better, found.num_better, "graphs", aim=aim, reached=reached)
            if count == max(BUDGETS) and klass != "all":
                document[klass] = {
                    "recommended": verdict.recommend(one, other),
                    "graphs": one.num_graphs,
                    "better": one.num_better,
                    "interval": [one.low, one.high],
                    "better_at_equal_seconds": other.num_better,
                    "interval_at_equal_seconds": [other.low, other.high],
                    "strongest_baseline": one.strongest,
                }
    return document


def write_verdicts(document: dict[str, Any], training_set: str) -> None:
    """The file that `auto` reads."""
    told = {"version": verdict.VERSION, "training_set": training_set, "verdicts": {"learned_order": document}}
    verdict.FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


_WAYS = {"equal evaluations": "evaluations", "equal processor time": "seconds"}


def _median_ratio(times: verdict.GraphTimes) -> float:
    """Of the placer to the best baseline."""
    best = min(float(np.median(found)) for found in times.baselines.values())
    return float(np.median(times.learned)) / best

"""Learned placement: searches by tables, held-out graphs at 0, 10 and 100 evaluations, HSDAG's comparison.

    LEARNED_PARTS=table,held_out,hsdag,large      which parts; default all      LEARNED_SEEDS=10

The table is max-load without any condition on the split, evaluated in closed form (`learned_evaluator`), ten
seeds, medians. Held-out graphs are the published and captured ones; the shipped weights were trained on
generated graphs alone. The verdict file of the package is written from them.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import loadmaster as lm
from benchmarks.learned_evaluator import ClosedForm
from benchmarks.measure import Report
from benchmarks.question import question_of
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Bound, Budget, Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.learned import _verdict as verdict
from loadmaster.placers.learned._groups import Groups, group_problem
from loadmaster.placers.learned._searcher import Climb, Searcher
from loadmaster.placers.learned._table import TableSearch, TableSettings
from loadmaster.placers.registry import placer
from loadmaster.simulator.events.engine import prepare

SUITE = "learned"
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "graphs"
SEEDS = int(os.environ.get("LEARNED_SEEDS", "10"))
EVALUATIONS = 2400
MOST_LARGE_S = 1.0
INPUTS = {  # name: proven optimum of free splits, or None
    "LayerGraphs/bert24_inference": 17.715,
    "LayerGraphs/bert24_training": 39.790,
    "LayerGraphs/gnmt_inference": 31.687,
    "LayerGraphs/resnet50_inference": None,
    "OperatorGraphs/bert_l-3_inference": 21.908,
    "OperatorGraphs/bert_l-3_training": 54.207,
    "OperatorGraphs/resnet50_inference": 124.349,
}


def run(report: Report) -> None:
    """The parts that are asked for; without the graphs only the large one."""
    parts = os.environ.get("LEARNED_PARTS", "table,held_out,hsdag,large").split(",")
    if "large" in parts:
        _large(report)
    if not SHARED.is_dir():
        print(f"{SUITE}: the published graphs are not beside the repository; nothing more to measure")
        return
    for part, measure in (("table", _table), ("held_out", _held_out), ("hsdag", _hsdag)):
        if part in parts:
            measure(report)


def _throughput(name: str, split: Split) -> Problem:
    return lm.problem(str(SHARED / "msr" / "throughput-inputs" / f"{name}.json"), split=split)


def _search(searcher: Searcher, closed: ClosedForm, most: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    while closed.count < most:
        rows = searcher.propose(rng)[: most - closed.count]
        searcher.observe(rows, closed(rows))
    return closed.best_s


class Random:
    """Rows drawn uniformly."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.uniform = groups.cargo.fits / groups.cargo.fits.sum(axis=1, keepdims=True)

    def propose(self, rng: np.random.Generator) -> Any:
        """A hundred at a time."""
        return self.groups.draw(self.uniform, rng, 100)

    def observe(self, rows: Any, times_s: Any) -> None:
        """Nothing is learned."""


class TableThenClimb:
    """A table for half of the evaluations, then single moves from the best row."""

    def __init__(self, table: TableSearch, closed: ClosedForm, groups: Groups, at: int) -> None:
        self.table, self.closed, self.groups, self.at = table, closed, groups, at
        self.climb: Climb | None = None

    def propose(self, rng: np.random.Generator) -> Any:
        """The table's, then neighbours."""
        if self.climb is None and self.closed.count >= self.at:
            self.climb = Climb(self.groups, self.closed.best, self.closed.best_s, restarts=False)
        return (self.climb or self.table).propose(rng)

    def observe(self, rows: Any, times_s: Any) -> None:
        """By whoever proposed."""
        (self.climb or self.table).observe(rows, times_s)


Make = Callable[[Groups, ClosedForm, Any], Searcher]


def _methods() -> dict[str, Make]:
    def table(warm: bool, **settings: Any) -> Make:
        def make(groups: Groups, closed: ClosedForm, start: Any) -> Searcher:
            first = start if warm else None
            return TableSearch(groups, TableSettings(**settings), budget=EVALUATIONS, start=first)

        return make

    def default_post(groups: Groups, closed: ClosedForm, start: Any) -> Searcher:
        warm = TableSearch(groups, TableSettings(ppo="clipped"), budget=EVALUATIONS, start=start)
        return TableThenClimb(warm, closed, groups, EVALUATIONS // 2)

    def warm_climb(groups: Groups, closed: ClosedForm, start: Any) -> Searcher:
        return Climb(groups, start, float(closed(start[None])[0]))

    return {
        "random": lambda groups, closed, start: Random(groups),
        "hill climbing": lambda groups, closed, start: Climb(groups, None),
        "cross-entropy": table(False),
        "post, clipped": table(False, ppo="clipped"),
        "post, KL": table(False, ppo="kl"),
        "warm hill climbing": warm_climb,
        "warm cross-entropy": table(True),
        "warm post, table alone": table(True, ppo="clipped"),
        "warm post": default_post,
    }


def _table(report: Report) -> None:
    """Medians over seeds after 2,400 evaluations, every method on every input."""
    for name, optimum in INPUTS.items():
        problem = _throughput(name, Split.FREE)
        groups = group_problem(problem)
        question = question_of(problem)
        dp = question.ask(placer("linear_dp"))
        assert dp.plan is not None
        start = groups.row(dp.plan)
        medians = {}
        for method, make in _methods().items():
            found = []
            for seed in range(SEEDS):
                closed = ClosedForm(problem, groups)
                if method.startswith("warm"):
                    closed(start[None])
                found.append(_search(make(groups, closed, start), closed, EVALUATIONS, seed))
                assert closed.best is not None
                told = question.simulator.score(groups.plan(closed.best)).time_s
                assert abs(told / closed.best_s - 1) < 1e-9, (name, method, told, closed.best_s)
            medians[method] = float(np.median(found))
            report.add(SUITE, f"{name} ({groups.num}): {method}, median of {SEEDS}", medians[method], "")
        report.add(SUITE, f"{name} ({groups.num}): linear_dp", float(dp.score_s or 0.0), "")
        ratio = medians["warm post"] / medians["warm hill climbing"]
        report.add(
            SUITE,
            f"{name} ({groups.num}): warm post / warm hill climbing",
            ratio,
            "x",
            aim="<= 1",
            reached=ratio <= 1 + 1e-9,
        )
        if optimum is not None:
            over = medians["warm post"] / optimum
            report.add(SUITE, f"{name} ({groups.num}): warm post / optimum", over, "x")


def _graphs() -> list[tuple[str, Problem]]:
    """Held-out problems: published ones, and training steps captured from models of the zoo."""
    found = []
    for name in INPUTS:
        for split in (Split.CHAIN, Split.FREE):
            found.append((f"{name}, {split.value}", _throughput(name, split)))
    for path in sorted((SHARED / "msr" / "latency-inputs").glob("*/*.json")):
        problem = lm.problem(str(path), objective="step", split="free")
        found.append((f"{path.parent.name}/{path.stem}, step", problem))
    for path in sorted((SHARED / "pipedream").glob("*.txt")):
        for devices in ("2xT4, GTX1080Ti", "A100-40GB, V100, T4, T4"):
            found.append((f"pipedream {path.stem} on {devices}", lm.problem(str(path), devices)))
    for source, devices in (
        ("zoo:lstm_unrolled", "RTX4090, RTX3090"),
        ("zoo:gnmt", "2xT4, GTX1080Ti"),
        ("zoo:inception_v3", "2xT4, GTX1080Ti"),
        ("hf:bert-base", "T4, GTX1080Ti"),
    ):
        if "zoo" in os.environ.get("LEARNED_GRAPHS", "zoo"):
            found.append((f"{source} on {devices}", lm.problem(source, devices, batch=8)))
    return found


def _one(problem: Problem, algorithm: Any, budget: Budget, seed: int) -> tuple[float, float]:
    """Seconds of the answer's step, and of processor time."""
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


class WarmClimb:
    """Single moves from a constructor's plan."""

    def __init__(self, start: str) -> None:
        self.start = start

    def __call__(self, problem: Problem, run: Run) -> Any:
        """Until the budget ends."""
        from loadmaster.placers.learned._searcher import offer_start, run_searcher

        groups, tally = group_problem(problem), Tally(problem, run)
        offer_start(problem, tally, self.start)
        row, best_s = groups.row(tally.best_plan), groups.penalised_s(tally.best_score)
        if not tally.spent:
            run_searcher(Climb(groups, row, best_s, restarts=False), groups, tally)
        return tally.answer(algorithm="warm_climb")


def _baselines(problem: Problem) -> dict[str, Any]:
    """The mandatory ones that serve the problem."""
    chain = problem.split == Split.CHAIN
    if problem.objective == Objective.THROUGHPUT:
        found = {"linear_dp": placer("linear_dp"), "single_device": placer("single_device")}
        if not chain:
            found |= {"linear_dp + climbing": WarmClimb("linear_dp"), "warm CE": placer("cross_entropy")}
        return found
    return {
        "heft": placer("heft"),
        "m_etf": placer("m_etf"),
        "single_device": placer("single_device"),
        "heft + climbing": WarmClimb("heft"),
        "warm CE": placer("cross_entropy"),
    }


def _held_out(report: Report) -> None:
    """The shipped weights at 0 (one plan, of which nothing was evaluated before), 10 and 100 evaluations."""
    from loadmaster.placers.learned._order_network import make_network
    from loadmaster.placers.learned._weights import load_weights, save_weights, shipped_weights

    network, about = load_weights(shipped_weights())
    plain = Path(os.environ.get("TMPDIR", "/tmp")) / "learned-untrained.safetensors"
    save_weights(make_network(network.size, 0), plain, training_set="0" * 64, about={})
    learned, untrained = placer("learned_order"), placer("learned_order", weights=str(plain))
    seeds = range(min(SEEDS, 5))
    by_class: dict[int, dict[str, dict[str, list[verdict.GraphTimes]]]] = {}
    ablation: dict[int, list[float]] = {}
    for name, problem in _graphs():
        klass = verdict.class_of(problem)
        for count in (0, 10, 100):
            budget = Budget(count=max(count, 1))
            mine = [_one(problem, learned, budget, seed) for seed in seeds]
            other = [_one(problem, untrained, budget, seed)[0] for seed in seeds]
            others = _baselines(problem).items()
            equal = {n: [_one(problem, b, budget, s)[0] for s in seeds] for n, b in others}
            spent = Budget(seconds=max(float(np.median([one[1] for one in mine])), 1e-3))
            timed = {n: [_one(problem, b, spent, s)[0] for s in seeds] for n, b in others}
            times = [one[0] for one in mine]
            best = min((float(np.median(t)), n) for n, t in equal.items())
            ratio = float(np.median(times)) / best[0]
            ablation.setdefault(count, []).append(float(np.log(np.median(times) / np.median(other))))
            report.add(SUITE, f"{name}, {count} evaluations: learned_order / {best[1]}", ratio, "x")
            for way, known in (("evaluations", equal), ("seconds", timed)):
                found = by_class.setdefault(count, {}).setdefault(klass, {"evaluations": [], "seconds": []})
                found[way].append(verdict.GraphTimes(name, times, known))
    _write_verdicts(report, by_class, str(about.get("training_set")))
    for count, logs in ablation.items():
        label = f"{count} evaluations: trained / untrained, geometric mean"
        report.add(SUITE, label, float(np.exp(np.mean(logs))), "x")


def _write_verdicts(report: Report, by_class: dict[int, Any], training_set: str) -> None:
    document: dict[str, Any] = {}
    for count, classes in by_class.items():
        every = {"evaluations": [], "seconds": []}
        for klass, ways in {**classes, "all": every}.items():
            for way in every:
                if klass != "all":
                    every[way] += ways[way]
            one, other = verdict.judge(ways["evaluations"]), verdict.judge(ways["seconds"])
            for way, found in (("equal evaluations", one), ("equal processor time", other)):
                interval = f"[{found.low:+.4f}, {found.high:+.4f}]"
                label = f"{klass}, {count} evaluations, {way}: mean log ratio {interval}"
                report.add(SUITE, label, found.mean_log_ratio, "")
                better = f"{klass}, {count} evaluations, {way}: better on, of {found.num_graphs}"
                aim, reached = ("more than half", found.recommended) if klass == "all" else ("", None)
                report.add(SUITE, better, found.num_better, "graphs", aim=aim, reached=reached)
            if count == 100 and klass != "all":
                document[klass] = {
                    "recommended": verdict.recommend(one, other),
                    "graphs": one.num_graphs,
                    "better": one.num_better,
                    "interval": [one.low, one.high],
                    "interval_at_equal_seconds": [other.low, other.high],
                    "strongest_baseline": one.strongest,
                }
    told = {"version": verdict.VERSION, "training_set": training_set, "verdicts": {"learned_order": document}}
    verdict.FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _hsdag(report: Report) -> None:
    """One CPU and one accelerator, both with room for all, inference graphs: the comparison of the paper."""
    for name in (
        "LayerGraphs/inceptionv3_inference",
        "OperatorGraphs/resnet50_inference",
        "OperatorGraphs/bert_l-12_inference",
    ):
        folder = "latency-inputs" if "l-12" in name else "throughput-inputs"
        whole = lm.problem(str(SHARED / "msr" / folder / f"{name}.json"), objective="step", split="free")
        problem = _one_of_each(whole)
        question = question_of(problem)
        alone = problem.device_compute_s.sum(axis=0)
        figures = {"GPU alone": float(alone[0]), "CPU alone": float(alone[1])}
        for label, algorithm in (
            ("hsdag", placer("hsdag", finish=0.0)),
            ("hsdag as coded", placer("hsdag", finish=0.0, as_coded=True)),
            ("learned_order", placer("learned_order")),
        ):
            times = [_one(problem, algorithm, Budget(count=500), seed)[0] for seed in range(min(SEEDS, 5))]
            figures[f"{label}, 500 evaluations, median of {len(times)}"] = float(np.median(times))
        best = question.ask(placer("auto"), Budget(seconds=20.0))
        figures["auto, 20 s"] = float(best.score_s or np.inf)
        figures[f"lower bound ({best.bound_name})"] = best.bound_s
        for label, seconds in figures.items():
            report.add(SUITE, f"CPU + GPU, {name}: {label}", seconds, "")


def _one_of_each(problem: Problem) -> Problem:
    """The problem on its first accelerator and its first CPU, each with room for everything."""
    cluster = problem.cluster
    keep = np.array([int((cluster.kind == kind).argmax()) for kind in (0, 1)])
    small = replace(
        cluster,
        device_name=tuple(cluster.device_name[d] for d in keep),
        kind=cluster.kind[keep],
        host=cluster.host[keep],
        engine=np.arange(2),
        memory_bytes=np.full(2, 2**50),
        reserve_bytes=cluster.reserve_bytes[keep],
        route=cluster.route[keep][:, keep],
    )
    return replace(problem, cluster=small)


def _large(report: Report) -> None:
    """Zero-shot placement of a graph of 10,000 ops in a warm process, features included."""
    problem = lm.problem("gen:layered:10000")
    _one(lm.problem("gen:layered:500"), placer("learned_order"), Budget(count=1), 0)
    taken = []
    for _ in range(3):
        taken.append(_one(problem, placer("learned_order"), Budget(count=1), 0)[1])
    report.add(
        SUITE,
        f"zero-shot, {problem.graph.num_ops} ops, processor time",
        min(taken),
        "s",
        aim=f"< {MOST_LARGE_S:g}",
        reached=min(taken) < MOST_LARGE_S,
    )

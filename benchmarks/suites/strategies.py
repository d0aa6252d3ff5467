"""Strategies: how far searches get on the published testbed, and groups against ops.

Every step is simulated on published device figures (4 V100 in one machine, 8 GTX 1080 Ti in 4, 4 P100 in 2,
joined by 25 Gbit/s). Gains are ratios of op-level steps; intervals over clusters are of 95 %.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.stats import spearmanr

from benchmarks.measure import Report
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Problem
from loadmaster.core.question import Question
from loadmaster.core.run import Budget
from loadmaster.core.strategy import Sync
from loadmaster.questions.problem import build_problem
from loadmaster.strategies.ask import StrategyRequest, find_strategy, make_evaluator
from loadmaster.strategies.guide_choice import load_guide
from loadmaster.strategies.guide_training import random_cluster
from loadmaster.strategies.learned.guide import SHIPPED
from loadmaster.strategies.predict import op_level
from loadmaster.strategies.registry import Search, make_search
from loadmaster.strategies.scoring.evaluator import Evaluator
from loadmaster.strategies.scoring.factors import CutProblem, choose
from loadmaster.strategies.scoring.uniform_states import uniform_state
from loadmaster.strategies.search.guided import Guided, Tree
from loadmaster.strategies.search.tag_compat import TreeSearch as TagSearch
from loadmaster.strategies.search.uniform import Uniform
from loadmaster.strategies.search_run import SearchRun
from loadmaster.zoo.hf import Size, build_example
from loadmaster.zoo.vision import Vgg

SUITE = "strategies"
TESTBED = (
    "4xV100-16GB | 2xGTX1080Ti | 2xGTX1080Ti | 2xGTX1080Ti | 2xGTX1080Ti | 2xP100 | 2xP100 ; inter=25gbit"
)
SEEDS = tuple(range(int(os.environ.get("LOADMASTER_STRATEGY_SEEDS", "3"))))
COUNT = int(os.environ.get("LOADMASTER_STRATEGY_COUNT", "4000"))  # replays of a search
EACH = int(os.environ.get("LOADMASTER_STRATEGY_EACH", "600"))  # of one on a random cluster
RANDOM = int(os.environ.get("LOADMASTER_STRATEGY_CLUSTERS", "100"))
UNSEEN = int(os.environ.get("LOADMASTER_STRATEGY_UNSEEN", "20"))
BASELINES = (
    "data_parallel",
    "proportional",
    "uniform",
    "greedy",
    "blocks",
    "tag_compat",
    "tag_compat, network",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its batch."""

    name: str
    batch: int


CASES = (
    Case("VGG-19, 96 images", 96),
    Case("BERT 24 layers, 48 x 128", 48),
    Case("BERT 24 layers, vocabulary 305,220, 48 x 128", 48),
)


def build_graph(case: Case) -> Graph:
    """The captured step of a case."""
    if case.name.startswith("VGG"):
        import torch

        from loadmaster.graph.capture import capture

        with torch.device("meta"):
            model = Vgg((2, 2, 4, 4, 4))
            images = torch.zeros(case.batch, 3, 224, 224)
            labels = torch.zeros(case.batch, dtype=torch.long)
        loss = torch.nn.functional.cross_entropy
        return capture(
            model, (images,), optimizer="adam", loss=lambda scores: loss(scores, labels), target="cuda"
        )
    return build_bert(24, case.batch, 305_220 if "305,220" in case.name else 30_522)


def build_bert(layers: int, batch: int, vocabulary: int = 30_522) -> Graph:
    """BERT-large with its layers, sequences of 128."""
    numbers = {
        "num_hidden_layers": layers,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }
    example = build_example(
        Size("BertConfig", "BertForMaskedLM", "text", numbers, longest=512), batch=batch, seq=128
    )
    from loadmaster.graph.capture import capture

    return capture(
        example.model, example.args, example.kwargs, optimizer="adam", loss=example.loss, target="cuda"
    )


def search_of(name: str) -> Search:
    """A baseline by its name; with a network tag_compat asks the prior of the weights that are shipped."""
    name, _, network = name.partition(", ")
    return make_search(name, network="shipped") if network else make_search(name)


def problem_on(graph: Graph, devices: str) -> Problem:
    """The step on a cluster."""
    return build_problem(Question(source=graph, devices=devices))


def run(report: Report) -> None:
    """All parts, or those that LOADMASTER_STRATEGY_PARTS names."""
    parts = os.environ.get("LOADMASTER_STRATEGY_PARTS", "testbed,levels,clusters,playouts").split(",")
    graphs = {case.name: (build_graph(case), case.batch) for case in CASES}
    report.add(SUITE, "weights of the guide are there", float(SHIPPED.is_file()), "")
    for name, (graph, batch) in graphs.items():
        if "testbed" in parts:
            _testbed(report, name, problem_on(graph, TESTBED), batch)
    plain = [graphs[case.name] for case in CASES[:2]]
    for part, measure in (("levels", _levels), ("clusters", _topologies), ("playouts", _until_better)):
        if part in parts:
            measure(report, plain)


def _testbed(report: Report, name: str, problem: Problem, batch: int) -> None:
    name = f"{name}, {COUNT} replays"
    steps: dict[str, float] = {}
    for search in BASELINES:
        try:
            answer = find_strategy(problem, StrategyRequest(batch, search_of(search), Budget(count=COUNT)))
        except Exception as trouble:  # what does not fit is said, not hidden
            report.add(SUITE, f"{name}: {search} ({str(trouble)[:60]})", float("nan"), "s")
            continue
        steps[search] = answer.score_s
        report.add(SUITE, f"{name}: {search} step, simulated", answer.score_s, "s")
    found = []
    for seed in SEEDS:
        started = time.process_time()  # of one core: other work on the machine does not count
        answer = find_strategy(problem, StrategyRequest(batch, "guided", Budget(count=COUNT), seed))
        found.append(answer.score_s)
        report.add(SUITE, f"{name}: guided step, seed {seed}, simulated", answer.score_s, "s")
        took = time.process_time() - started
        label = f"{name}: guided plan time of a core, seed {seed}"
        report.add(SUITE, label, took, "s", aim="<= 60 s", reached=took <= 60)
    report.add(SUITE, f"{name}: gap of the guided answer to its bound", 100 * float(answer.gap or 0.0), "%")
    for search, step in steps.items():
        gains = [step / one for one in found]
        report.add(SUITE, f"{name}: guided gain over {search}, least of {len(SEEDS)} seeds", min(gains), "x")
        report.add(SUITE, f"{name}: guided gain over {search}, most of {len(SEEDS)} seeds", max(gains), "x")


def _levels(report: Report, graphs: list[tuple[Graph, int]]) -> None:
    """Group level against op level: rank correlation, the price of choosing by groups, speed."""
    _cut(report)
    _cut_of_a_model(report)
    for graph, batch in graphs:
        problem = problem_on(graph, TESTBED)
        evaluator = make_evaluator(problem, batch)
        rng = np.random.default_rng(0)
        pairs = []
        for _ in range(60):
            base = int(rng.choice(np.flatnonzero(evaluator.allowed.all(axis=0))))
            choice = [base] * evaluator.facts.num_groups
            for _ in range(int(rng.integers(0, 12))):
                g = int(rng.integers(len(choice)))
                choice[g] = int(rng.choice(np.flatnonzero(evaluator.allowed[g])))
            state = evaluator.evaluate(choice)
            strategy = evaluator.strategy(state, "random")
            pairs.append(
                (state.time_s, op_level(problem, strategy, evaluator.splits, evaluator.costs).time_s)
            )
        coarse, fine = np.array(pairs).T
        report.add(
            SUITE,
            f"{graph.name}: Spearman of groups and ops, 60 random",
            spearmanr(coarse, fine).statistic,
            "",
        )
        top = np.argsort(coarse)[:20]
        report.add(
            SUITE, f"{graph.name}: choice by groups over best of top 20", fine[top[0]] / fine[top].min(), "x"
        )
        state = evaluator.evaluate(choice)
        replays = _rate(partial(evaluator.replay, state.choice, state.rows, state.factors), 400)
        strategy = evaluator.strategy(state, "one")
        ops = _rate(partial(op_level, problem, strategy, evaluator.splits, evaluator.costs), 5)
        label = f"{graph.name}: one evaluation by groups, processor time"
        report.add(SUITE, label, 1000 / replays, "ms", aim="< 1 ms", reached=replays > 1000)
        label = f"{graph.name}: evaluations by groups per one by ops"
        report.add(SUITE, label, replays / ops, "x", aim=">= 100", reached=replays / ops >= 100)


def _cut(report: Report) -> None:
    """The choice of factors on a graph of the size of a large training step."""
    rng = np.random.default_rng(0)
    ops, tensors = 21_500, 13_778
    producer = rng.integers(0, ops - 1, tensors)
    readers = np.minimum(producer[:, None] + rng.integers(1, 40, (tensors, 3)), ops - 1)
    problem = CutProblem(
        extra_s=rng.normal(0.0, 1e-3, ops),
        forced=rng.random(ops) < 0.1,
        gather_s=rng.random(tensors) * 1e-3,
        producer=producer.astype(np.int32),
        read_tensor=np.repeat(np.arange(tensors), 3).astype(np.int32),
        read_op=readers.ravel().astype(np.int32),
    )
    took = 1 / _rate(partial(choose, problem), 5)
    label = "factors by minimum cut, 21,500 ops, 13,778 tensors, processor time"
    report.add(SUITE, label, 1000 * took, "ms", aim="< 50 ms", reached=took < 0.05)


def _cut_of_a_model(report: Report, layers: int = 240) -> None:
    """The choice of factors end to end on a step of 20,000 ops: candidates found, cut built and made."""
    graph = build_bert(layers, batch=16)
    evaluator = make_evaluator(problem_on(graph, TESTBED), 16)
    action = next(i for i, a in enumerate(evaluator.actions) if a.sync == Sync.ALLREDUCE)
    state = uniform_state(evaluator, action)
    rows = evaluator.rows_of(state, "even")

    def decide() -> int:
        return len(fresh(evaluator).factors_of(state, rows, 1.0))

    chosen, took = decide(), 1 / _rate(decide, 5)
    label = f"factors end to end, BERT of {layers} layers, {graph.num_ops} ops, processor time"
    report.add(SUITE, label, 1000 * took, "ms", aim="< 50 ms", reached=took < 0.05)
    report.add(SUITE, f"BERT of {layers} layers: weights whose gradients are made of factors", chosen, "")


def fresh(evaluator: Evaluator) -> Evaluator:
    """The same problem with nothing replayed."""
    e = evaluator
    return Evaluator(e.problem, e.splits, e.costs, e.facts, e.actions)


def _rate(call: Callable[[], object], times: int) -> float:
    """Calls in a second of processor time: other work on the machine does not count."""
    call()
    started = time.process_time()
    for _ in range(times):
        call()
    return times / (time.process_time() - started)


def _topologies(report: Report, graphs: list[tuple[Graph, int]]) -> None:
    """Random clusters, equal numbers of replays: how often the guided search is no slower than tag_compat."""
    rng = np.random.default_rng(2026)
    logs: dict[str, list[float]] = {name: [] for name in BASELINES}
    for number in range(RANDOM):
        graph, batch = graphs[number % len(graphs)]
        problem = problem_on(graph, random_cluster(rng))
        seconds, made = {}, make_evaluator(problem, batch)
        for name in ("guided", *logs):
            evaluator = fresh(made)
            run = SearchRun(Budget(count=EACH), np.random.default_rng(number))
            state = search_of(name)(evaluator, run)[0]
            seconds[name] = state.time_s if state.overflow == 0 else np.inf
        for name in logs:
            if np.isfinite(seconds["guided"]) and np.isfinite(seconds[name]):
                logs[name].append(float(np.log(seconds[name] / seconds["guided"])))
    for name, values in logs.items():
        gains = np.array(values)
        mean, error = gains.mean(), 1.96 * gains.std(ddof=1) / np.sqrt(len(gains))
        label = f"{RANDOM} random clusters, {EACH} replays each: guided against {name}"
        report.add(SUITE, f"{label}, clusters where both fit", len(gains), "")
        kept, aimed = 100 * float((gains >= -1e-6).mean()), name.startswith("tag_compat")
        reached = kept >= 95 if aimed else None
        report.add(
            SUITE, f"{label}, no slower in", kept, "%", aim=">= 95 %" if aimed else "", reached=reached
        )
        report.add(SUITE, f"{label}, geometric mean gain", float(np.exp(mean)), "x")
        report.add(SUITE, f"{label}, gain, low end of 95 %", float(np.exp(mean - error)), "x")
        report.add(SUITE, f"{label}, gain, high end of 95 %", float(np.exp(mean + error)), "x")


def _until_better(report: Report, graphs: list[tuple[Graph, int]], cap: int = 200) -> None:
    """Replays until a tree beats what it starts from, on unseen clusters of 8 devices; each head ablated.

    Against data parallelism rows and factors decide at once; against the best uniform state the tree has to.
    """
    ways = {
        "prior and value": Guided(descent_share=0.0),
        "prior alone": Guided(descent_share=0.0, value=False),
        "value alone": Guided(descent_share=0.0, prior=False),
        "neither": Guided(descent_share=0.0, network="none"),
    }
    uniform: dict[str, list[int]] = {way: [] for way in ways}
    plain: dict[str, list[int]] = {way: [] for way in (*ways, "tag_compat", "tag_compat, network")}
    rng = np.random.default_rng(7)
    for number in range(UNSEEN):
        graph, batch = graphs[number % len(graphs)]
        problem = problem_on(graph, random_cluster(rng, most=8))
        made = make_evaluator(problem, batch)
        for way, options in ways.items():
            evaluator = fresh(made)
            run = SearchRun(Budget(count=10**6), np.random.default_rng(number))
            Uniform()(evaluator, run)
            tree = Tree(options, evaluator, run, load_guide(options.network))
            uniform[way].append(_replays_until(tree, tree.base_s, cap))
        evaluator = fresh(made)
        run = SearchRun(Budget(count=10**6), np.random.default_rng(number))
        target = make_search("data_parallel")(evaluator, run)[0].time_s
        for way, options in ways.items():
            evaluator = fresh(made)
            run = SearchRun(Budget(count=10**6), np.random.default_rng(number))
            tree = Tree(options, evaluator, run, load_guide(options.network))
            plain[way].append(_replays_until(tree, target, cap, first=0))
        for way, network in (("tag_compat", "none"), ("tag_compat, network", "shipped")):
            evaluator = fresh(made)
            run = SearchRun(Budget(count=cap), np.random.default_rng(number))
            search = TagSearch(evaluator, run, cap, load_guide(network))
            search.run_all()
            times = [one.time_s if one.overflow == 0 else np.inf for one in search.known.values()]
            plain[way].append(next((i + 1 for i, t in enumerate(times) if t < target * (1 - 1e-6)), cap))
    bar = min(float(np.median(plain[way])) for way in ("tag_compat", "tag_compat, network"))
    for way, values in plain.items():
        label = f"{UNSEEN} small clusters: median replays to beat data parallelism, {way} (cap {cap})"
        count, aimed = float(np.median(values)), way == "prior and value"
        aim, reached = ("below tag_compat", count < bar) if aimed else ("", None)
        report.add(SUITE, label, count, "", aim=aim, reached=reached)
        report.add(SUITE, label.replace("median", "mean"), float(np.mean(values)), "")
    for way, values in uniform.items():
        label = f"{UNSEEN} small clusters: median replays to beat the best uniform state, {way} (cap {cap})"
        report.add(SUITE, label, float(np.median(values)), "")
        report.add(
            SUITE,
            f"{UNSEEN} small clusters: found one within {cap}, {way}",
            100 * sum(v < cap for v in values) / UNSEEN,
            "%",
        )


def _replays_until(tree: Tree, target: float, cap: int, first: int | None = None) -> int:
    first = tree.evaluator.replays if first is None else first
    while tree.evaluator.replays - first < cap:
        if tree.best.overflow == 0 and tree.best.time_s < target * (1 - 1e-6):
            break
        if tree.grow(most=1) == 0:
            return cap
    return min(tree.evaluator.replays - first, cap)

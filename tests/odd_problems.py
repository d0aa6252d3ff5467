"""Small problems in which bounds go wrong most easily: joins without time, views, pins, ties, little room.

Drawn by a seed, not by hypothesis, so that a recorded run can name each one and take ten thousand of them.
Half of them are heavy: sources on one device, joins without time that may be anywhere, and consumers on
another device, with large tensors and little work. There it decides what a bound charges to the links.
"""

from typing import Any

import numpy as np

from loadmaster import api
from loadmaster.capacity.fit_search import FitSearch
from loadmaster.capacity.verdict import judge_cluster
from loadmaster.core.cluster import UNLIMITED_BYTES
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import FREE, Links, Load, Objective, Problem, Split
from loadmaster.core.question import Question
from loadmaster.core.run import parse_budget
from loadmaster.placers.bounds import quick_bound
from loadmaster.placers.registry import own_algorithms, why_not
from loadmaster.simulator.bounds.favourite_children import find_favourites
from loadmaster.simulator.bounds.layer_search import bound_by_layers
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.bounds.skeleton import build_skeleton
from loadmaster.simulator.bounds.step_programme import solve_relaxed_step
from loadmaster.simulator.bounds.travel import compute_travel
from loadmaster.simulator.events.engine import prepare
from tests.builders import cluster_of, graph_of, problem_of

SLACK = 1 + 1e-9
_ABOVE_S = 1e-12  # and for an optimum of nothing
_LINKS = (Links.SHARED, Links.SHARED, Links.PARALLEL, Links.HALF_DUPLEX, Links.HOST)


def odd_problem(seed: int, objective: Objective = Objective.STEP) -> Problem:
    """Three to six ops on two or three devices, every feature with every other."""
    rng = np.random.default_rng(seed)
    heavy = bool(rng.random() < 0.5)
    num, devices = int(rng.integers(3, 7)), int(rng.integers(2, 4))
    devices = 2 if num == 6 else devices
    first, then = (num + 1) // 2, (num + 1) // 2 + 1 + int(num > 4 and rng.random() < 0.5)  # the joins
    graph = _heavy_graph(rng, num, first, then) if heavy else _graph(rng, num)
    kinds = int(rng.integers(1, devices + 1))
    links = _LINKS[int(rng.integers(0, len(_LINKS)))]
    seconds = rng.integers(0, 3 if heavy else 9, (num, kinds)) / 2.0
    seconds[rng.random(num) < (0.2 if heavy else 0.45)] = 0.0
    pinned = np.where(rng.random(num) < 0.25, rng.integers(0, devices, num), FREE).astype(np.int32)
    if heavy:
        apart = np.repeat(rng.permutation(devices)[:2], [first, num - first])
        pinned = np.where(rng.random(num) < 0.8, apart, pinned).astype(np.int32)
        seconds[first:then], pinned[first:then] = 0.0, FREE
    for label in np.unique(graph.group[graph.group >= 0]):  # ops that are tied are pinned alike
        mates = graph.group == label
        pinned[mates] = pinned[mates].max()
    fields: dict[str, Any] = {"links": links, "pinned": pinned}
    if rng.random() < 0.15:
        fields["transfer_s"] = rng.integers(0, 9, graph.num_tensors) / 2.0
    if objective == Objective.THROUGHPUT:
        fields |= {"objective": objective, "split": list(Split)[int(rng.integers(0, 3))]}
        fields["load"] = list(Load)[int(rng.integers(0, 3))] if links == Links.HOST else Load.SUM
    elif rng.random() < 0.1:
        fields["issue_s"] = rng.integers(0, 3, num) / 2.0
    on_host = [links == Links.HOST and kind == kinds - 1 for kind in range(kinds)]
    kind_of = [int(rng.integers(0, kinds)) for _ in range(devices)]
    kind_of[-1] = kinds - 1 if links == Links.HOST else kind_of[-1]  # a host-side device is there
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    num_links = 1 if heavy and rng.random() < 0.5 else int(rng.integers(1, 4))
    cluster = cluster_of(
        {pair: rng.permutation(num_links)[: int(rng.integers(1, num_links + 1))].tolist() for pair in pairs},
        kind=kind_of,
        on_host=on_host,
        engine=list(range(devices)) if heavy or rng.random() < 0.8 else [0] * devices,
        memory=_memory(rng, graph, devices, heavy=heavy),
        rate=[1.0, 2.0, 4.0][:num_links],
        latency=[0.0, 0.5, 1.0][:num_links],
    )
    return problem_of(graph, cluster, seconds, **fields)


def _memory(rng: np.random.Generator, graph: Graph, devices: int, *, heavy: bool) -> Any:
    """None to speak of, or little; of the heavy often enough, but of different sizes: unlike devices."""
    total = int(graph.resident_bytes.sum() + graph.workspace_bytes.sum() + graph.tensor_bytes.sum())
    if heavy and rng.random() < 0.6:
        return [10 * total + 10 * d + 10 for d in range(devices)]
    tight = [int(rng.integers(total // 3, total + 3)) + 1 for _ in range(devices)]
    return tight if rng.random() < 0.6 else UNLIMITED_BYTES


def _graph(rng: np.random.Generator, num: int) -> Graph:
    """Joins of several inputs; some outputs are views of an input's storage."""
    ops: list[dict[str, Any]] = []
    storage: list[int] = []
    for op in range(num):
        uses = [t for t in range(op) if rng.random() < 0.55]
        ops.append(_op(rng, uses, storage, int(rng.integers(0, 9)), tied=0.25))
    return graph_of(*ops)


def _heavy_graph(rng: np.random.Generator, num: int, first: int, then: int) -> Graph:
    """Sources, then joins `first` to `then` of most of them, then consumers of most of the joins."""
    ops: list[dict[str, Any]] = []
    storage: list[int] = []
    for op in range(num):
        of_sources = 0.05 if op < first else 0.85 if op < then else 0.15
        of_joins = 0.3 if op < then else 0.9
        uses = [t for t in range(op) if rng.random() < (of_sources if t < first else of_joins)]
        tied = 0.0 if first <= op < then else 0.1
        ops.append(_op(rng, uses, storage, int(rng.integers(3, 9)), tied=tied))
    return graph_of(*ops)


def _op(
    rng: np.random.Generator, uses: list[int], storage: list[int], num_bytes: int, *, tied: float
) -> dict[str, Any]:
    """An op with one output, whose base is noted in `storage`."""
    bases = [storage[t] for t in uses]
    made: dict[str, Any] = {"num_bytes": num_bytes, "keep": bool(rng.random() < 0.15)}
    alone = [base for base in bases if bases.count(base) == 1]
    if alone and rng.random() < 0.3:
        made["storage"] = alone[0]
    storage.append(made.get("storage", len(storage)))
    return {
        "uses": uses,
        "makes": [made],
        "resident_bytes": int(rng.integers(0, 6)) if rng.random() < 0.5 else 0,
        "workspace_bytes": int(rng.integers(0, 3)) if rng.random() < 0.3 else 0,
        "group": int(rng.integers(0, 2)) if rng.random() < tied else -1,
    }


def find_false_bound(problem: Problem, *, solvers: bool = False) -> str:
    """What is contradicted by trying every plan, '' where nothing is.

    Every bound and proof of `simulator/bounds`; `solvers`: also whatever each algorithm proves within a small
    budget, and what `fit` says.
    """
    answer = api.plan(problem, algorithm="brute_force", budget="1000000x")
    if answer.status not in (Status.OPTIMAL, Status.INFEASIBLE):
        return "brute force did not try every plan"
    best = answer.score_s
    said = _find_false_proofs(problem, best)
    if solvers:
        said += _find_false_answers(problem, best) + _find_false_verdict(problem, best)
    return ", ".join(said)


def _find_false_proofs(problem: Problem, best: float | None) -> list[str]:
    """Of the bounds themselves; nothing is known of a problem where nothing fits but that nothing does."""
    if best is None:
        return []
    quick, asked = quick_bound(problem), api.lower_bound(problem)
    said = [f"proves that nothing fits: {bound.infeasible}" for bound in (quick, asked) if bound.infeasible]
    bounds = {"quick": quick.seconds, "asked": asked.seconds}
    if problem.objective == Objective.STEP:
        favourites = find_favourites(problem)
        bounds |= {
            "lower": lower_bound(problem).seconds,
            "travel": compute_travel(problem).bound_s,
            "skeleton": build_skeleton(problem).bound_s,
            "step programme": solve_relaxed_step(problem).bound_s,
            "step programme, branched": solve_relaxed_step(problem, most_solved=40).bound_s,
            "small communication": favourites.bound_s,
            "layers": bound_by_layers(problem, 1.5 * best + _ABOVE_S, most_branches=12, width=8),
            "small communication as published": find_favourites(problem, clipped=False).bound_s,
        }
    return said + [f"{name} {s} above {best}" for name, s in bounds.items() if _is_above(s, best)]


def _is_above(seconds: float, best: float) -> bool:
    return seconds > best * SLACK + _ABOVE_S


def _find_false_answers(problem: Problem, best: float | None) -> list[str]:
    said = []
    for name, entry in own_algorithms().items():
        if not why_not(entry.traits, problem):
            claim = _find_false_claim(api.plan(problem, algorithm=name, budget="60x"), best)
            said += [f"{name}: {claim}"] if claim else []
    return said


def _find_false_claim(answer: Placement, best: float | None) -> str:
    """What an answer says that no plan or another plan disproves."""
    if best is None:
        return "" if answer.score_s is None else f"fits in {answer.score_s}, and nothing does"
    if answer.status == Status.INFEASIBLE:
        return f"proves that nothing fits: {answer.proof}"
    if _is_above(answer.bound_s, best):
        return f"bound {answer.bound_name} {answer.bound_s} above {best}"
    if answer.score_s is not None and _is_above(best, answer.score_s):
        return f"takes {answer.score_s}, less than the best, {best}"
    if answer.status == Status.OPTIMAL and answer.score_s is not None and _is_above(answer.score_s, best):
        return f"says that {answer.score_s} is optimal ({answer.proof}), and {best} is"
    return ""


def _find_false_verdict(problem: Problem, best: float | None) -> list[str]:
    """What `fit` says of a step; throughput is none of its questions."""
    if problem.objective != Objective.STEP:
        return []
    search = FitSearch(Question(""), parse_budget("60x"), is_model=False)
    found = judge_cluster(search, problem)
    if found.fits and best is None:
        return [f"fit: {found.algorithm} fits, and nothing does"]
    if found.proven and not found.fits and best is not None:
        return [f"fit: proves that nothing fits: {found.reason}"]
    return []


def tight_problem(seed: int, objective: Objective = Objective.STEP) -> Problem:
    """Five to eight ops whose memory is, to the byte, what one plan drawn at random needs: so one fits."""
    rng = np.random.default_rng(seed)
    num, devices = int(rng.integers(5, 9)), int(rng.integers(2, 4))
    kinds = int(rng.integers(1, devices + 1))
    graph = _graph(rng, num)
    seconds = rng.integers(1, 40, (num, kinds)) / 4.0
    pinned = np.where(rng.random(num) < 0.1, rng.integers(0, devices, num), FREE).astype(np.int32)
    for label in np.unique(graph.group[graph.group >= 0]):
        mates = graph.group == label
        pinned[mates] = pinned[mates].max()
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    num_links = int(rng.integers(1, 4))
    routes = {pair: [int(rng.integers(0, num_links))] for pair in pairs}
    parts: dict[str, Any] = {
        "kind": [*range(kinds), *rng.integers(0, kinds, devices - kinds).tolist()],
        "on_host": [False] * kinds,
        "rate": [1.0, 2.0, 4.0][:num_links],
        "latency": [0.0, 0.5, 1.0][:num_links],
    }
    fields: dict[str, Any] = {"pinned": pinned, "objective": objective}
    roomy = problem_of(graph, cluster_of(routes, **parts), seconds, **fields)
    label = np.where(graph.group >= 0, graph.group + num, np.arange(num))
    drawn = rng.integers(0, devices, 3 * num)[label]
    device = np.where(pinned != FREE, pinned, drawn).astype(np.int32)
    peak = prepare(roomy).score(plan_of(device)).peak_bytes
    memory = [max(need, 1) for need in peak]
    return problem_of(graph, cluster_of(routes, memory=memory, **parts), seconds, **fields)

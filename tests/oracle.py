"""The oracle: every plan of a tiny problem, scored by the reference simulator and nothing else.

Assignments of groups to devices, times the orders in which every op comes after those it depends on.
Written apart from the package's own brute force, so that each is the witness of the other.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from loadmaster.core.graph import NO_GROUP, Phase
from loadmaster.core.plan import Plan
from loadmaster.core.problem import FREE, Objective, Problem, Split
from tests import reference
from tests.builders import plan_on


@dataclass
class Best:
    """The least objective over all plans that fit, and the least of the rest."""

    fitting_s: float | None  # None: no plan fits
    any_s: float | None  # memory apart; None: no plan obeys the rules
    plan: Plan | None  # one that reaches `fitting_s`


def best_of_all(problem: Problem) -> Best:
    """Try everything."""
    best = Best(None, None, None)
    usable = (problem.cluster.memory_bytes - problem.cluster.reserve_bytes).tolist()
    for device in assignments(problem):
        for plan in orders(problem, device):
            result = reference.simulate(problem, plan, dispatch="in_order", links=problem.links.value)
            assert not result.stuck
            seconds = result.step_s
            if problem.objective == Objective.THROUGHPUT:
                seconds = reference.throughput(problem, plan)
            if best.any_s is None or seconds < best.any_s:
                best.any_s = seconds
            fits = all(peak <= room for peak, room in zip(result.peak_bytes, usable, strict=True))
            if fits and (best.fitting_s is None or seconds < best.fitting_s):
                best.fitting_s, best.plan = seconds, plan
    return best


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Devices of all ops, by every rule of the problem but memory."""
    compute_s, kind = problem.costs.compute_s.tolist(), problem.cluster.kind.tolist()
    groups, pins = problem.graph.group.tolist(), problem.pinned.tolist()
    choices = []
    for op, pin in enumerate(pins):
        devices = range(problem.cluster.num_devices) if pin == FREE else (pin,)
        choices.append([d for d in devices if compute_s[op][kind[d]] != float("inf")])
    for device in itertools.product(*choices):
        together: dict[int, set[int]] = {}
        for op, group in enumerate(groups):
            if group != NO_GROUP:
                together.setdefault(group, set()).add(device[op])
        if all(len(devices) == 1 for devices in together.values()) and _split_is_kept(problem, device):
            yield device


def _split_is_kept(problem: Problem, device: tuple[int, ...]) -> bool:
    """Chain and convex as they are written down: by stage numbers, and by paths."""
    if problem.objective != Objective.THROUGHPUT or problem.split == Split.FREE:
        return True
    arrows = [(u, v) for u, v in arrows_of(problem) if _is_forward(problem, u) and _is_forward(problem, v)]
    if problem.split == Split.CHAIN:
        stages = itertools.permutations(range(problem.cluster.num_devices))  # s(u) <= s(v) on every edge
        return any(all(s[device[u]] <= s[device[v]] for u, v in arrows) for s in stages)
    return all(
        device[walk[0]] != device[walk[-1]] or len(set(_on(device, walk))) == 1 for walk in _walks(arrows)
    )


def _on(device: tuple[int, ...], walk: tuple[int, ...]) -> list[int]:
    return [device[op] for op in walk]


def _walks(arrows: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Every path of two ops or more."""
    stack: list[tuple[int, ...]] = list(arrows)
    while stack:
        walk = stack.pop()
        yield walk
        stack.extend((*walk, v) for u, v in arrows if u == walk[-1])


def _is_forward(problem: Problem, op: int) -> bool:
    return bool(problem.graph.phase[op] == Phase.FORWARD)


def arrows_of(problem: Problem) -> list[tuple[int, int]]:
    """(producer, consumer) of every use, each pair once."""
    graph = problem.graph
    pairs = {(int(graph.tensor_op[t]), int(op)) for t, op in zip(graph.use_tensor, graph.use_op, strict=True)}
    return sorted(pairs)


def orders(problem: Problem, device: tuple[int, ...]) -> Iterator[Plan]:
    """Every order of the ops on these devices; without issue times, one for each set of engine queues."""
    num, arrows = problem.graph.num_ops, arrows_of(problem)
    engine = problem.cluster.engine.tolist()
    issued = bool(problem.costs.issue_s.any())
    seen: set[object] = set()
    for order in itertools.permutations(range(num)):
        place = {op: at for at, op in enumerate(order)}
        if any(place[u] > place[v] for u, v in arrows):
            continue
        queues = order if issued else tuple(sorted((engine[device[op]], place[op], op) for op in order))
        if not issued:
            queues = tuple((e, op) for e, _, op in queues)
        if queues not in seen:
            seen.add(queues)
            yield plan_on(device, [place[op] for op in range(num)])

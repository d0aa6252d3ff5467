"""Tries every plan: the oracle for tests, and a proof for the smallest problems.

All allowed assignments of units to devices, times all orders that respect the dependencies (linear
extensions), less orders that give every engine the same sequence as one already tried (where ops are
issued, the order of all ops counts). Optimal over all plans in the simulator's own semantics.
Exponential: makes no claim beyond `max_plans`.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadmaster.core.graph import edges, units
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem, allowed_devices
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class BruteForce:
    """`max_plans` bounds assignments times orders; beyond it the answer is the best of that many."""

    max_plans: int = 200_000
    max_ops: ClassVar[int] = 12

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Try everything, or stop at the limit without a claim."""
        tally = Tally(problem, run)
        complete = True
        for plan in enumerate_plans(problem):
            if tally.spent or tally.scored >= self.max_plans:
                complete = False
                break
            if tally.scored % 1000 == 0:
                run.progress(f"brute force: {tally.scored} plans", 0.0)
            tally.offer(plan, in_order=True)
        proof = f"all {tally.scored} plans tried" if complete else ""
        return tally.answer(algorithm="brute_force", proof=proof)


def enumerate_plans(problem: Problem) -> Iterator[Plan]:
    """Assignments times orders, plans with equal engine sequences once."""
    unit, num_units = units(problem.graph)
    allowed = allowed_devices(problem, unit, num_units)
    choices = [np.flatnonzero(row).tolist() for row in allowed]
    engine = problem.cluster.engine.tolist()
    issued = bool(problem.costs.issue_s.any())
    for assignment in itertools.product(*choices):
        device = np.array(assignment, dtype=np.int32)[unit]
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for order in linear_extensions(problem.graph.num_ops, *map(np.ndarray.tolist, edges(problem.graph))):
            sequences: dict[int, list[int]] = {}
            for op in order:
                sequences.setdefault(engine[device[op]], []).append(op)
            key = tuple(tuple(sequences[e]) for e in sorted(sequences))
            if issued or key not in seen:
                seen.add(key)
                priority = np.empty(len(order), dtype=np.int32)
                priority[list(order)] = np.arange(len(order), dtype=np.int32)
                yield plan_of(device, priority)


def linear_extensions(num: int, sources: Iterable[int], targets: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Every order of 0..num-1 in which each source comes before its target."""
    before = [0] * num
    for source, target in zip(sources, targets, strict=True):
        before[target] |= 1 << source
    stack: list[tuple[tuple[int, ...], int]] = [((), 0)]
    while stack:
        prefix, done = stack.pop()
        if len(prefix) == num:
            yield prefix
            continue
        for op in range(num - 1, -1, -1):
            if not done >> op & 1 and before[op] & ~done == 0:
                stack.append(((*prefix, op), done | 1 << op))


PLACER: type[Placer] = BruteForce

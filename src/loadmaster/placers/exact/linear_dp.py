"""Cuts topological orders into stages in the best way, and improves the best orders. Takes milliseconds.

The linearised dynamic programme of Tarnawski et al., NeurIPS 2020: along one topological order stages are
intervals, and the best cut over all counts of all types of devices is found in O(C w S) for C classes,
stages of w classes and S states. How good it is depends on the order alone; so sixteen kinds of orders are
cut and the classes inside the best stages are shuffled `rounds` times (`_maxload/lines.py`). Devices of more
than 512 counts of types are taken in a few fixed sequences instead; orders of more than 600 classes are
cut between rows of neighbours only, and shuffled less often.

Serves every split (a chain is convex and free) and every link model; the answer is a chain.
"""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Run
from loadmaster.placers.answer import best_repaired
from loadmaster.placers.exact._maxload.answering import chain_builder, make_budget_check
from loadmaster.placers.exact._maxload.lines import Stages, best_line
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.exact._maxload.prices import find_prices
from loadmaster.placers.pipeline import Effort, find_pipeline
from loadmaster.placers.registry import Placer

_FEW = 500  # classes: of twice as many the stages are shuffled half as often


@dataclass(frozen=True, slots=True)
class LinearDp:
    """`rounds`: how often the classes inside the best stages are shuffled."""

    rounds: int = 40
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.THROUGHPUT,)
    pipelines: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Cut, shuffle, cut again."""
        if problem.pipeline:
            return find_pipeline(problem, run, Effort(orders=16, rounds=self.rounds), algorithm="linear_dp")
        spent = make_budget_check(run)

        def solve(model: MaxLoad) -> Stages | None:
            bound_s = find_prices(model).bound_s
            rounds = self.rounds * _FEW // max(model.num_classes, _FEW)
            return best_line(model, run.rng, rounds=rounds, bound_s=bound_s, spent=lambda: spent(0))

        build, cargo = chain_builder(problem, solve)
        return best_repaired(problem, run, cargo, [build], algorithm="linear_dp")


PLACER: type[Placer] = LinearDp

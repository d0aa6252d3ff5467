"""A graph network puts the ops in an order; exact algorithms and the simulator find the plan.

Learn the order, slice exactly: for throughput the best cut of the learned order, for a step list scheduling
of groups of ops in that order and in others near to it, on devices of its own choice or where an op ends
first. The usual orders are sliced beside it; the first plan is the one that slicers reckon fastest, and needs
no evaluation. While evaluations last it tries keys and devices near to the best, and where the split is free
gives work of the busiest device away. Features are ratios, messages run along and against the edges, and a
device is scored by its features: any graph, any number of devices. Whatever the network says, plans obey
every rule.

Weights come with the package, or from `weights`. Where they are missing or damaged, `auto` answers and a note
says so. Needs torch. Deterministic under a seed and a count budget.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally, with_note
from loadmaster.placers.learned._groups import group_problem
from loadmaster.placers.learned._levels import say_levels
from loadmaster.placers.learned._nearby import search_nearby
from loadmaster.placers.learned._proposals import look_at
from loadmaster.placers.learned._slicers import slicer_of
from loadmaster.placers.learned._weights import cached_weights, load_weights, shipped_weights
from loadmaster.placers.registry import Placer, placer
from loadmaster.placers.traits import MOST_OPS

_MOST_ORDERS = 10_000


@dataclass(frozen=True, slots=True)
class LearnedOrder:
    """`weights`: a file, '' the shipped one; `noise`: how far keys are moved, in whole orders; `orders`: how
    many orders near to the learned one are sliced for the first plan of a step.
    """

    weights: str = ""
    noise: float = 0.1
    orders: int = 16
    max_ops: ClassVar[int] = MOST_OPS
    needs: ClassVar[tuple[str, str]] = ("torch", "torch")

    def __post_init__(self) -> None:
        """Refuse what is no noise, or no number of orders."""
        if not 0.0 <= self.noise <= 10.0:
            raise InputError(f"learned_order: noise is {self.noise!r}; give a number from 0 to 10")
        if not 0 <= self.orders <= _MOST_ORDERS:
            raise InputError(
                f"learned_order: orders is {self.orders!r}; give a number from 0 to {_MOST_ORDERS}"
            )

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Ask the network once, then search near to what it says."""
        try:
            file = Path(self.weights) if self.weights else shipped_weights()
            changed_ns = file.stat().st_mtime_ns if file.exists() else 0
            network = cached_weights(str(file), changed_ns) if changed_ns else load_weights(file)[0]
        except LoadmasterError as trouble:
            if self.weights:
                raise
            answer = replace(placer("auto")(problem, run), algorithm="learned_order")
            return with_note(answer, "learned_order", f"{trouble}; auto answered without it")
        groups, tally = group_problem(problem), Tally(problem, run)
        slicer = slicer_of(problem, groups)
        search_nearby(problem, groups, tally, slicer, look_at(network, slicer), self.noise, self.orders)
        return say_levels(problem, tally.answer(algorithm="learned_order"))


PLACER: type[Placer] = LearnedOrder

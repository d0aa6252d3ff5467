"""Stages in proportion to the speed of their devices: the rule of thumb for unequal devices.

A measure for the others: it knows neither memory nor links. Devices stand as they were named. O(P).
"""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Run
from loadmaster.placers.pipelined._shares import answer_by_share
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class PipelineBySpeed:
    """No parameters."""

    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    stepped: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """One plan."""
        return answer_by_share(problem, run, by_speed=True, algorithm="pipeline_by_speed")


PLACER: type[Placer] = PipelineBySpeed

"""Stages of equal work on all devices, as if the devices were equal.

A measure for the others. Devices stand as they were named; a stage that has no room is not recomputed. O(P).
"""

from dataclasses import dataclass
from typing import ClassVar

from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Run
from loadmaster.placers.pipelined._shares import answer_by_share
from loadmaster.placers.registry import Placer


@dataclass(frozen=True, slots=True)
class PipelineEqual:
    """No parameters."""

    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)
    stepped: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """One plan."""
        return answer_by_share(problem, run, by_speed=False, algorithm="pipeline_equal")


PLACER: type[Placer] = PipelineEqual

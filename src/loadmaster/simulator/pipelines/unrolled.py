"""Unrolled: plans with a pipeline timed and sized by the event loop, over the whole step.

What a `Simulator` is for other plans: it scores them, and draws them. The order is in the plan's pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.check import check_plan
from loadmaster.core.errors import PlanError
from loadmaster.core.plan import Plan, in_graph_order
from loadmaster.core.problem import Links, Problem
from loadmaster.core.run import Score, ignore_progress
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.simulator.events import engine
from loadmaster.simulator.pipelines.lowering import Lowered, lower

_BROKEN = ("length", "device", "support", "pipeline", "recompute")  # cannot be unrolled


@dataclass(frozen=True, slots=True, eq=False)
class Unrolled:
    """A problem that asks for a step of micro-batches."""

    problem: Problem

    def warm_up(self, progress: Callable[[str, float], None] = ignore_progress) -> None:
        """Load or compile the event loop."""
        engine.prepare(replace(self.problem, pipeline="")).warm_up(progress)

    def score(self, plan: Plan) -> Score:
        """Seconds of the step, and overflow."""
        return score_lowered(lower(self.problem, plan))

    def order_and_score(self, plan: Plan) -> tuple[Plan, Score]:
        """The plan in the graph's order, as a stage runs, and its score."""
        ordered = in_graph_order(plan)
        return ordered, self.score(ordered)


def score_lowered(lowered: Lowered) -> Score:
    """Seconds and overflow of a flat step."""
    return engine.prepare(lowered.problem).score(lowered.plan)


def simulate_step(problem: Problem, plan: Plan, *, links: Links | None = None) -> tuple[Timeline, Lowered]:
    """The timeline of a step of micro-batches, and the flat graph its spans speak of."""
    broken = [v.message for v in check_plan(problem, plan) if v.rule in _BROKEN]
    if broken:
        raise PlanError(broken[0])
    lowered = lower(problem, plan)
    timeline = engine.simulate(lowered.problem, lowered.plan, links=links)
    batch = np.zeros(len(timeline.kind), dtype=np.int32)
    compute = timeline.kind == SpanKind.COMPUTE
    batch[compute] = lowered.microbatch[timeline.item[compute]]
    moved = lowered.problem.graph.tensor_op[timeline.item[~compute]]
    batch[~compute] = lowered.microbatch[moved]
    return replace(timeline, microbatch=np.maximum(batch, 0)), lowered

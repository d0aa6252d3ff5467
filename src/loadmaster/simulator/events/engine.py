"""Simulator: a problem made ready once, then any number of plans timed, sized and scored.

The meaning of every rule is in `docs/simulator.md`; the compiled loop is `event_kernel.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Floats, Ints, Longs, offsets
from loadmaster.core.check import check_plan, describe_order_cycle
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import home_bytes
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Links, Objective, Problem
from loadmaster.core.run import Score, ignore_progress
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.simulator.events.event_kernel import run_events
from loadmaster.simulator.events.kernel import (
    HALF_DUPLEX,
    HOST,
    IN_ORDER,
    PARALLEL,
    READY,
    SHARED,
    ProblemArrays,
)
from loadmaster.simulator.events.pipelines import pipeline_peak_bytes, with_resident_gradients
from loadmaster.simulator.events.throughput import steady_state
from loadmaster.simulator.jit import is_warm, mark_warm

T = TypeVar("T", bound=np.generic)
_SPAN_KINDS = (SpanKind.COMPUTE, SpanKind.TRANSFER, SpanKind.SPILL)
LINK_CODE = {
    Links.SHARED: SHARED,
    Links.PARALLEL: PARALLEL,
    Links.HALF_DUPLEX: HALF_DUPLEX,
    Links.HOST: HOST,
}


class Dispatch(StrEnum):
    """Which op an idle device takes next."""

    IN_ORDER = "in_order"  # strictly by priority, waiting if need be: what a runtime does
    READY = "ready"  # among ready ops by priority, then first come first served


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One plan's run, before it is drawn."""

    op_start: Floats  # [N]
    op_end: Floats  # [N]
    start_rank: Ints  # [N] position in the order in which ops started
    peak_bytes: Longs  # [D]
    transfer_tensor: Ints  # [M]
    transfer_target: Ints  # [M]
    transfer_start: Floats  # [M + W] W writes to host memory follow, by tensor
    transfer_end: Floats  # [M + W] negative = never happened

    @property
    def step_s(self) -> float:
        """End of the last op or transfer."""
        transfers = self.transfer_end.max() if len(self.transfer_end) else 0.0
        return float(max(self.op_end.max(), transfers))


@dataclass(frozen=True, slots=True, eq=False)
class Simulator:
    """What `prepare` makes of a problem."""

    problem: Problem
    fixed: ProblemArrays

    def run(self, plan: Plan, *, dispatch: Dispatch | None = None) -> Outcome:
        """Run a plan; without `dispatch`, in its order, or first come first served if it has none."""
        if dispatch is None:
            dispatch = Dispatch.READY if is_unordered(plan) else Dispatch.IN_ORDER
        issue = bool(self.fixed.issue_s.any())
        if issue and dispatch == Dispatch.READY:  # an order must be known before it can be issued
            return self.run(self.order_by_start(plan), dispatch=Dispatch.IN_ORDER)
        return self._run(plan, dispatch, issue)

    def _run(self, plan: Plan, dispatch: Dispatch, issue: bool) -> Outcome:
        code = IN_ORDER if dispatch == Dispatch.IN_ORDER else READY
        links = LINK_CODE[self.problem.links]
        *columns, done = run_events(self.fixed, plan.device, plan.priority, code, links, issue)
        if done != self.problem.graph.num_ops:
            raise PlanError(describe_order_cycle(self.problem, plan) or "the plan's order deadlocks")
        return Outcome(*columns)

    def warm_up(self, progress: Callable[[str, float], None] = ignore_progress) -> None:
        """Load or compile the event loop before any budget runs, saying so if it takes long."""
        if not is_warm("simulator"):
            progress("compiling the simulator (once on this machine, 15 to 60 s)", 0.0)
        device = np.isfinite(self.problem.device_compute_s).argmax(axis=1).astype(np.int32)
        self._run(plan_of(device), Dispatch.READY, False)
        mark_warm("simulator")

    def order_by_start(self, plan: Plan) -> Plan:
        """The plan in the order in which its ready ops start: replaying it in order is the same run."""
        return replace(plan, priority=self._run(plan, Dispatch.READY, False).start_rank)

    def order_and_score(self, plan: Plan) -> tuple[Plan, Score]:
        """The plan ordered as above and its score: one run, unless issue times make the replay differ."""
        outcome = self._run(plan, Dispatch.READY, False)
        ordered = replace(plan, priority=outcome.start_rank)
        issue = bool(self.fixed.issue_s.any())
        return ordered, self.score(ordered) if issue else self._compute_score(plan, outcome)

    def score(self, plan: Plan) -> Score:
        """Objective and overflow of a plan."""
        return self._compute_score(plan, self.run(plan))

    def _compute_score(self, plan: Plan, outcome: Outcome) -> Score:
        peak = pipeline_peak_bytes(self.problem, plan, outcome.peak_bytes)
        over = np.maximum(peak - self.problem.cluster.usable_bytes, 0)
        throughput = self.problem.objective == Objective.THROUGHPUT
        seconds = steady_state(self.problem, plan).time_s if throughput else outcome.step_s
        return Score(int(over.sum()), seconds, tuple(peak.tolist()))

    def timeline(self, plan: Plan, *, dispatch: Dispatch | None = None) -> Timeline:
        """Run a plan and draw it."""
        outcome = self.run(plan, dispatch=dispatch)
        graph, cluster = self.problem.graph, self.problem.cluster
        source = plan.device[graph.tensor_op]
        moves = len(outcome.transfer_tensor)
        written = np.flatnonzero(outcome.transfer_end[moves:] >= 0).astype(np.int32)
        sent = source[outcome.transfer_tensor] * cluster.num_devices + outcome.transfer_target
        spilt = source[written] * cluster.num_devices + source[written]
        order = np.empty(graph.num_ops, dtype=np.int32)
        order[outcome.start_rank] = np.arange(graph.num_ops, dtype=np.int32)
        counts = (graph.num_ops, moves, len(written))
        return Timeline(
            origin=TimelineOrigin.SIMULATED,
            device_name=cluster.device_name,
            kind=np.repeat(np.array(_SPAN_KINDS, dtype=np.int8), counts),
            resource=_concatenate_readonly(plan.device[order], sent, spilt),
            item=_concatenate_readonly(order, outcome.transfer_tensor, written),
            microbatch=np.zeros(sum(counts), dtype=np.int32),
            start_s=_concatenate_readonly(
                outcome.op_start[order], *_split_transfers(outcome.transfer_start, moves, written)
            ),
            end_s=_concatenate_readonly(
                outcome.op_end[order], *_split_transfers(outcome.transfer_end, moves, written)
            ),
            peak_bytes=pipeline_peak_bytes(self.problem, plan, outcome.peak_bytes),
        )


def _concatenate_readonly(*parts: NDArray[T]) -> NDArray[T]:
    """Columns one after the other, read-only so that the timeline need not copy them."""
    whole = np.concatenate(parts)
    whole.flags.writeable = False
    return whole


def _split_transfers(transfers: Floats, moves: int, written: Ints) -> tuple[Floats, Floats]:
    """Transfers between devices, and the writes to host memory that happened."""
    return transfers[:moves], transfers[moves:][written]


def is_unordered(plan: Plan) -> bool:
    """Whether all priorities are equal."""
    return bool((plan.priority == plan.priority[0]).all())


def prepare(problem: Problem, *, links: Links | None = None) -> Simulator:
    """Everything about a problem that no plan changes, as arrays for the compiled loop."""
    cluster, costs = problem.cluster, problem.costs
    graph = with_resident_gradients(problem.graph) if problem.pipeline else problem.graph
    if links is not None and links != problem.links:
        problem = replace(problem, links=links)
    out_tensor = np.argsort(graph.tensor_op, kind="stable").astype(np.int32)
    by_tensor = np.lexsort((graph.use_op, graph.use_tensor))
    use_op, use_tensor = graph.use_op[by_tensor], graph.use_tensor[by_tensor]
    engines, engine = np.unique(cluster.engine, return_inverse=True)
    fixed = ProblemArrays(
        out_ptr=offsets(graph.tensor_op, graph.num_ops),
        out_tensor=out_tensor,
        use_ptr=offsets(use_tensor, graph.num_tensors),
        use_op=use_op,
        use_tensor=use_tensor,
        in_ptr=offsets(use_op, graph.num_ops),
        in_use=np.argsort(use_op, kind="stable").astype(np.int32),
        tensor_op=graph.tensor_op,
        tensor_bytes=graph.tensor_bytes,
        home_bytes=home_bytes(graph),
        storage=graph.tensor_storage,
        keep=graph.keep,
        transfer_s=costs.transfer_s,
        resident=graph.resident_bytes,
        workspace=graph.workspace_bytes,
        issue_s=costs.issue_s,
        compute_s=costs.compute_s,
        kind=cluster.kind,
        engine=engine.astype(np.int32),
        on_host=cluster.on_host[cluster.kind],
        route=cluster.route,
        latency_s=route_latency_s(cluster),
        bytes_per_s=route_bytes_per_s(cluster),
        num_engines=len(engines),
        num_links=cluster.num_links,
    )
    return Simulator(problem, fixed)


def simulate(
    problem: Problem, plan: Plan, *, dispatch: Dispatch | None = None, links: Links | None = None
) -> Timeline:
    """The timeline of a plan; a plan that breaks a rule is refused with that rule."""
    rules = [
        "length",
        "device",
        "support",
        "pipeline",
        "recompute",
        *(["order"] if dispatch != Dispatch.READY else []),
    ]
    fatal = [v for v in check_plan(problem, plan) if v.rule in rules]
    if fatal:
        raise PlanError(fatal[0].message)
    return prepare(problem, links=links).timeline(plan, dispatch=dispatch)

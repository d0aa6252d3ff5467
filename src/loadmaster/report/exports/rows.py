"""Rows of ops and edges, as the table-like exporters write them: one meaning, three formats."""

from typing import Any

import numpy as np

from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.simulator.events.engine import simulate

COLUMNS: dict[str, type] = {
    "name": str,
    "kind": str,
    "module": str,
    "phase": str,
    "device": str,
    "stage": int,
    "recomputed": bool,
    "start_s": float,
    "end_s": float,
    "flops": float,
    "resident_bytes": int,
    "workspace_bytes": int,
    "output_bytes": int,
}


def op_rows(placement: Placement, timeline: Timeline) -> list[dict[str, Any]]:
    """One dict an op, with the fields of COLUMNS."""
    problem = placement.problem
    graph, plan = problem.graph, placement.plan or placement.least_overflow_plan
    assert plan is not None
    if _has_steps(placement):  # an op runs once for each micro-batch: the first one on its way
        timeline = simulate(problem, plan)
    start, end = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    compute = timeline.kind == SpanKind.COMPUTE
    start[timeline.item[compute]] = timeline.start_s[compute]
    end[timeline.item[compute]] = timeline.end_s[compute]
    made = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(made, graph.tensor_op, graph.tensor_bytes)
    stage = plan.pipeline.stage if plan.pipeline is not None else np.zeros(graph.num_ops, dtype=np.int32)
    return [
        {
            "name": graph.op_name[op],
            "kind": graph.op_kind[op],
            "module": graph.module[op],
            "phase": Phase(int(graph.phase[op])).name.lower(),
            "device": problem.cluster.device_name[plan.device[op]],
            "stage": int(stage[op]),
            "recomputed": bool(plan.recompute[op]),
            "start_s": float(start[op]),
            "end_s": float(end[op]),
            "flops": float(graph.flops[op]),
            "resident_bytes": int(graph.resident_bytes[op]),
            "workspace_bytes": int(graph.workspace_bytes[op]),
            "output_bytes": int(made[op]),
        }
        for op in range(graph.num_ops)
    ]


def _has_steps(placement: Placement) -> bool:
    plan = placement.plan or placement.least_overflow_plan
    return placement.problem.is_stepped and plan is not None and plan.pipeline is not None


def edge_rows(graph: Graph) -> list[tuple[int, int, int]]:
    """(producer, consumer, bytes) of all that flows between two ops, summed up."""
    found: dict[tuple[int, int], int] = {}
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        key = (int(graph.tensor_op[tensor]), op)
        found[key] = found.get(key, 0) + int(graph.tensor_bytes[tensor])
    return [(source, target, size) for (source, target), size in found.items()]


def lost_of(placement: Placement) -> tuple[str, ...]:
    """What a table of ops and edges leaves out."""
    lost = ["transfers between devices and links have no rows of their own: an edge has its bytes only"]
    if not placement.fits:
        lost.append("the plan does not fit; it is the nearest plan found")
    if _has_steps(placement):
        lost.append(
            "start and end are those of one micro-batch alone; the order of the step is in --to chrome"
        )
    return tuple(lost)

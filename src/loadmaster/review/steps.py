"""Steps: what a review needs of a step of micro-batches beyond its flat graph: what is settled in memory,
how long each op of the model takes in a step, and measured spans told as spans of that graph.
"""

from dataclasses import replace

import numpy as np

from loadmaster.capacity.breakdown import weight_bytes
from loadmaster.core.answers.review import MEMORY_KINDS
from loadmaster.core.arrays import Floats, Longs
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.order import NO_MICROBATCH
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.graph.origin import samples_in_a_pass
from loadmaster.simulator.pipelines.lowering import Lowered

_WEIGHTS, _OPTIMIZER = MEMORY_KINDS.index("weights"), MEMORY_KINDS.index("optimizer")
_GRADIENTS = MEMORY_KINDS.index("gradients")


def has_steps(problem: Problem, plan: Plan) -> bool:
    """Whether a plan is of a whole step of micro-batches."""
    return problem.is_stepped and plan.pipeline is not None


def microbatches_of(problem: Problem, plan: Plan | None) -> int:
    """How often a plan runs the graph in a step."""
    if plan is None or plan.pipeline is None or not problem.is_stepped:
        return 1
    return plan.pipeline.num_microbatches


def op_seconds(problem: Problem, plan: Plan) -> Floats:
    """[N, D] seconds of each op in a step: once a micro-batch, updates once, recomputed ops twice."""
    assert plan.pipeline is not None
    graph, pipeline = problem.graph, plan.pipeline
    devices = pipeline.devices_of(plan.device)  # [R, S]
    seconds = np.zeros((graph.num_ops, problem.cluster.num_devices))
    every_op = np.arange(graph.num_ops)
    again = np.where(plan.recompute & (graph.phase == Phase.FORWARD), 2, 1)
    for row, count in zip(devices, pipeline.microbatches, strict=True):
        times = np.where(graph.phase == Phase.UPDATE, 1, count * again)
        at = row[pipeline.stage]
        seconds[every_op, at] += times * problem.device_compute_s[every_op, at]
    return seconds


def settled_bytes(problem: Problem, plan: Plan, flat: Lowered) -> Longs:
    """[D, MEMORY_KINDS] what stands from beginning to end: the model's parts, up to what stages hold."""
    assert plan.pipeline is not None
    graph, num = problem.graph, problem.cluster.num_devices
    devices = plan.pipeline.devices_of(plan.device)
    param = graph.phase == Phase.PARAM
    weight = np.where(param, np.minimum(weight_bytes(graph), graph.resident_bytes), 0)
    settled = np.zeros((num, len(MEMORY_KINDS)), dtype=np.int64)
    for row in devices:
        at = row[plan.pipeline.stage].astype(np.int64)
        np.add.at(settled[:, _WEIGHTS], at, weight)
        np.add.at(settled[:, _OPTIMIZER], at, np.where(param, graph.resident_bytes - weight, 0))
    whole = np.zeros(num, dtype=np.int64)
    np.add.at(whole, flat.plan.device.astype(np.int64), flat.problem.graph.resident_bytes)
    settled[:, _GRADIENTS] = whole - settled.sum(axis=1)
    return settled


def on_flat_graph(problem: Problem, plan: Plan, flat: Lowered, measured: Timeline) -> Timeline:
    """A measured timeline, whose spans name the first op of a stage, in terms of the flat graph.

    Moves between devices are left out: a run does not measure them apart.
    """
    assert plan.pipeline is not None
    first = np.concatenate([[0], np.cumsum(plan.pipeline.microbatches)])  # of each replica
    of: dict[tuple[int, int, int, int], int] = {}
    for op, phase in enumerate(flat.problem.graph.phase.tolist()):
        if flat.problem.graph.op_kind[op] != "sum of gradients":
            batch = int(flat.microbatch[op])
            own = 0 if batch == NO_MICROBATCH else batch - int(first[flat.replica[op]])
            of.setdefault((int(flat.plan.device[op]), int(flat.stage[op]), phase, own), op)
    kept = np.flatnonzero(measured.kind == SpanKind.COMPUTE)
    found = []
    for span in kept.tolist():
        op, device = int(measured.item[span]), int(measured.resource[span])
        phase, stage = int(problem.graph.phase[op]), int(plan.pipeline.stage[op])
        batch = int(measured.microbatch[span]) if phase in (Phase.FORWARD, Phase.BACKWARD) else 0
        found.append(of.get((device, stage, phase, batch), of.get((device, stage, phase, 0), 0)))
    items = np.array(found, dtype=np.int32)
    columns = {name: getattr(measured, name)[kept] for name in ("kind", "resource", "start_s", "end_s")}
    return replace(measured, item=items, microbatch=np.maximum(flat.microbatch[items], 0), **columns)


def samples_of(problem: Problem, plan: Plan | None = None) -> int | None:
    """Samples in a step, where the graph remembers how it was captured."""
    samples = samples_in_a_pass(problem.graph)
    if samples is None:
        return None
    pipeline = plan.pipeline if plan is not None and problem.is_stepped else None
    if pipeline is not None and pipeline.microbatch_rows:
        return sum(pipeline.microbatch_rows)
    return samples * microbatches_of(problem, plan)

"""Stages: a part of a model tried in the other stages of its pipeline.

Stages follow one another, so a module does not go alone: what runs between it and the other stage goes with
it, and with both what must be where they are. The step of the plan so changed is then simulated.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from loadmaster.core.answers.outcomes import Elsewhere
from loadmaster.core.arrays import Bools
from loadmaster.core.check import check_plan
from loadmaster.core.errors import LoadmasterError
from loadmaster.core.graph import NO_MIRROR, Graph, Phase, units
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.timeline import SpanKind
from loadmaster.simulator.pipelines.unrolled import simulate_step


def close_over(graph: Graph, chosen: Bools) -> Bools:
    """[N] the ops and all that must be with them: groups, mirrors, updates of their weights."""
    unit, num = units(graph)
    chosen = np.array(chosen, dtype=np.bool_)
    while True:
        before = int(chosen.sum())
        there = np.zeros(num, dtype=np.bool_)
        there[unit[chosen]] = True
        chosen = there[unit]
        mirrored = graph.mirror != NO_MIRROR
        forward = graph.mirror[mirrored]
        both = np.asarray(chosen[forward] | chosen[mirrored])
        chosen[np.flatnonzero(mirrored)[both]] = True
        chosen[forward[both]] = True
        maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
        weight = (graph.phase[maker] == Phase.PARAM) & (graph.phase[user] == Phase.UPDATE)
        tied = chosen[maker[weight]] | chosen[user[weight]]
        chosen[maker[weight][tied]] = True
        chosen[user[weight][tied]] = True
        if int(chosen.sum()) == before:
            return chosen


def try_stages(placement: Placement, plan: Plan, chosen: Bools) -> Iterator[Elsewhere]:
    """For each device the best of its stages, or why there is none."""
    assert plan.pipeline is not None
    problem = placement.problem
    devices = plan.pipeline.devices_of(plan.device)
    here = set(plan.device[chosen].tolist())
    for device, name in enumerate(problem.cluster.device_name):
        stages = [s for s in range(plan.pipeline.num_stages) if device in devices[:, s]]
        if here == {device}:
            yield replace(_judge_plan(placement, plan, device, 0), is_here=True)
            continue
        if len(devices) > 1:
            yield _make_refusal(name, "the pipeline has replicas, whose stages are alike")
            continue
        if not stages:
            yield _make_refusal(name, "no stage of the pipeline is there")
            continue
        tried = [_try_stage(placement, plan, chosen, device, stage) for stage in stages]
        rows = [row for row in tried if row.time_s is not None]
        yield min(rows, key=lambda row: (row.over_bytes > 0, row.time_s or 0.0)) if rows else tried[0]


def _try_stage(placement: Placement, plan: Plan, chosen: Bools, device: int, stage: int) -> Elsewhere:
    assert plan.pipeline is not None
    problem, name = placement.problem, placement.problem.cluster.device_name[device]
    moved = _with_between(problem.graph, plan.pipeline.stage, chosen, stage)
    at = np.where(moved, stage, plan.pipeline.stage).astype(np.int32)
    emptied = np.setdiff1d(np.arange(plan.pipeline.num_stages), at[problem.graph.phase == Phase.FORWARD])
    if len(emptied):
        return _make_refusal(name, f"stage {int(emptied[0])} would be left with nothing")
    other = replace(
        plan,
        device=np.where(moved, device, plan.device).astype(np.int32),
        pipeline=replace(plan.pipeline, stage=at),
    )
    broken = [each.message for each in check_plan(problem, other) if each.rule != "memory"]
    if broken:
        return _make_refusal(name, broken[0])
    try:
        return _judge_plan(placement, other, device, int((moved & ~chosen).sum()))
    except LoadmasterError as refused:
        return _make_refusal(name, str(refused))


def _judge_plan(placement: Placement, plan: Plan, device: int, along: int) -> Elsewhere:
    cluster = placement.problem.cluster
    timeline, flat = simulate_step(placement.problem, plan)
    over = np.maximum(timeline.peak_bytes - cluster.usable_bytes, 0)
    worst = int(over.argmax())
    sent = timeline.item[timeline.kind != SpanKind.COMPUTE]
    return Elsewhere(
        device=cluster.device_name[device],
        is_here=False,
        time_s=timeline.step_s,
        moved_bytes=int(flat.problem.graph.tensor_bytes[sent].sum()),
        over_bytes=int(over[worst]),
        over_device=cluster.device_name[worst] if over[worst] else "",
        replanned_s=None,
        note=f"with {along} ops that must move with it" if along else "",
    )


def _make_refusal(name: str, note: str) -> Elsewhere:
    return Elsewhere(name, False, None, 0, 0, "", None, note)


def _with_between(
    graph: Graph, stage: "np.ndarray[tuple[int], np.dtype[np.int32]]", chosen: Bools, to: int
) -> Bools:
    """[N] the ops, all that runs between them and a stage, and all that must be with these."""
    moved = close_over(graph, chosen)
    own = stage[moved & (graph.phase == Phase.FORWARD)]
    if not len(own):
        return moved
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    forward = graph.phase == Phase.FORWARD
    later = to > int(own.max())
    between = forward & ((stage < to) if later else (stage > to))
    inside = between[maker] & between[user]
    source, target = (maker[inside], user[inside]) if later else (user[inside], maker[inside])
    while True:
        before = int(moved.sum())
        grown = moved.copy()
        grown[target[moved[source]]] = True
        weights = (graph.phase[maker] == Phase.PARAM) & grown[user] & forward[user]
        grown[maker[weights]] = True
        elsewhere = (graph.phase[maker] == Phase.PARAM) & forward[user] & ~grown[user]
        shared = np.zeros(graph.num_ops, dtype=np.bool_)
        shared[maker[elsewhere]] = True  # a weight that others use as well stays with them
        moved = close_over(graph, grown & ~(shared & ~moved))
        if int(moved.sum()) == before:
            return moved

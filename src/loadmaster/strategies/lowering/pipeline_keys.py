"""Pipeline keys: stages of a strategy whose groups are all pipelined, and the order of their ops."""

from collections.abc import Callable

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.pipelines.order import NO_MICROBATCH, Work, make_order, needs
from loadmaster.core.strategy import Mode, Strategy
from loadmaster.strategies.lowering.layouts import Layout


def stages_of(graph: Graph, strategy: Strategy) -> list[int]:
    """The stage of each group, -1 without a pipeline.

    Groups stand in the order of their first forward op; neighbours on one device are one stage.
    """
    groups = strategy.groups
    piped = [group.mode == Mode.PIPELINE for group in groups]
    if not any(piped):
        return [-1] * len(groups)
    if not all(piped):
        raise PlanError("some groups are pipelined and some are not; pipeline all of them, or none")
    first = []
    for group in groups:
        forward = group.ops[graph.phase[group.ops] == Phase.FORWARD]
        first.append(int(forward.min()) if len(forward) else graph.num_ops)
    stage = [0] * len(groups)
    at, before = -1, -1
    for g in sorted(range(len(groups)), key=first.__getitem__):
        if groups[g].devices[0] != before:
            at, before = at + 1, groups[g].devices[0]
        stage[g] = at
    return stage


def pipeline_keys(
    graph: Graph, strategy: Strategy, layouts: list[Layout], layout_of_op: Ints
) -> Callable[[Ints, Ints], Floats] | None:
    """When each op of each micro-batch is due; None without a pipeline."""
    if not strategy.schedule:
        return None
    stage = np.array([layout.stage for layout in layouts])
    turn = _turns(strategy.schedule, int(stage.max()) + 1, strategy.microbatches)
    last = turn.max() + 1

    def keys(op: Ints, shard: Ints) -> Floats:
        phase = graph.phase[op]
        at = turn[stage[layout_of_op[op]], (phase == Phase.BACKWARD).astype(np.int64), shard]
        at = np.where(phase == Phase.PARAM, 0, np.where(phase == Phase.UPDATE, last, at))
        return at * np.float64(graph.num_ops) + op

    return keys


def _turns(schedule: str, num_stages: int, count: int) -> Ints:
    """[S, 2, M] when each stage passes each micro-batch forward and backward: one order for all ranks."""
    order = make_order(schedule, num_stages, count)
    passes = [[a for a in actions if a.microbatch != NO_MICROBATCH] for actions in order]
    turn = np.zeros((num_stages, 2, count), dtype=np.int32)
    done: set[tuple[Work, int, int]] = set()
    at, now = [0] * len(passes), 1
    while any(at[r] < len(p) for r, p in enumerate(passes)):
        for rank, actions in enumerate(passes):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if not all(need in done for need in needs(action, num_stages)):
                    break
                forward = action.work == Work.FORWARD
                done.add((Work.FORWARD if forward else Work.BACKWARD_INPUT, action.stage, action.microbatch))
                turn[action.stage, 0 if forward else 1, action.microbatch] = now
                now += 1
                at[rank] += 1
    return turn

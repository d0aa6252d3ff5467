"""As pipeline: a strategy whose groups are all stages of a pipeline, as the plan that pipelines run by."""

from itertools import pairwise

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import NO_MIRROR, Phase
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.strategy import Mode, Strategy, microbatch_bounds
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.strategy_check import check_strategy


def is_pipeline(strategy: Strategy) -> bool:
    """Whether every group is a stage."""
    return all(group.mode == Mode.PIPELINE for group in strategy.groups)


def plan_as_pipeline(answer: StrategyAnswer) -> Placement:
    """The plan of a pipeline; groups become stages in the order of their first forward op."""
    problem, strategy = answer.problem, answer.strategy
    broken = check_strategy(problem, strategy)
    if broken:
        raise PlanError(f"the strategy cannot be run: {broken[0].message}")
    graph = problem.graph
    forward = graph.phase == Phase.FORWARD
    first = []
    for group in strategy.groups:
        own = group.ops[forward[group.ops]]
        first.append(int(own[0]) if len(own) else int(group.ops[0]))
    order = np.argsort(first)
    stage_of_group = np.empty(len(order), dtype=np.int32)
    stage_of_group[order] = np.arange(len(order))
    stage = stage_of_group[strategy.group_of].astype(np.int32)
    _require_one_way(answer, stage)
    devices = [strategy.groups[g].devices[0] for g in order]
    if len(set(devices)) < len(devices):
        raise PlanError(
            "two stages are on one device; put their ops into one group, as only one stage of a device is run"
        )
    bounds = microbatch_bounds(strategy.batch, strategy.microbatches)
    pipeline = Pipeline(
        stage=stage,
        replicas=np.ones(len(order), dtype=np.int32),
        num_microbatches=strategy.microbatches,
        schedule=strategy.schedule,
        in_flight=np.full(len(order), strategy.microbatches),
        stage_s=np.zeros(len(order)),
        replica_device=(tuple(devices),),
        rank=tuple(range(len(order))),
        replica_microbatches=(strategy.microbatches,),
        microbatch_rows=tuple(b - a for a, b in pairwise(bounds)),
    )
    plan = Plan(
        device=np.array(devices, dtype=np.int32)[stage],
        priority=np.arange(graph.num_ops, dtype=np.int32),
        recompute=np.zeros(graph.num_ops, dtype=np.bool_),
        pipeline=pipeline,
    )
    return Placement(
        problem=problem,
        plan=plan,
        algorithm=answer.algorithm,
        status=Status.FEASIBLE,
        score_s=answer.score_s,
        bound_s=answer.bound_s,
        bound_name=answer.bound_name,
        proof="",
        shortfall_bytes=np.zeros(problem.cluster.num_devices, dtype=np.int64),
        peak_bytes=answer.peak_bytes,
        least_overflow_plan=None,
        members=(),
        wall_s=answer.wall_s,
    )


def _require_one_way(answer: StrategyAnswer, stage: Ints) -> None:
    """Tensors of the forward pass go to later stages only."""
    graph = answer.problem.graph
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    ahead = (graph.phase[maker] == Phase.FORWARD) & (graph.phase[user] == Phase.FORWARD)
    back = ahead & (stage[maker] > stage[user]) & (graph.mirror[user] == NO_MIRROR)
    if back.any():
        at = int(np.flatnonzero(back)[0])
        raise PlanError(
            f"op {graph.op_name[user[at]]!r} reads what {graph.op_name[maker[at]]!r} of a later stage makes;"
            " the groups of a pipeline must follow one another"
        )

"""One small valid sample of every noun, and for each of its fields another value that is valid, too."""

import dataclasses
from typing import Any

import numpy as np

from loadmaster.core.findings import Assumption, Finding
from loadmaster.core.graph import NO_STORAGE, Phase
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Origin
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from tests.builders import cluster_of, graph_of, problem_of

INF = float("inf")

GRAPH = graph_of(
    {"phase": Phase.PARAM, "makes": [8], "resident_bytes": 8, "group": 3},
    {"uses": [0], "makes": [4, {"num_bytes": 4, "storage": 1}], "flops": 2.5, "workspace_bytes": 1},
    {"uses": [1], "phase": Phase.BACKWARD, "mirror": 1, "makes": [{"num_bytes": 2, "storage": NO_STORAGE}]},
    {
        "uses": [2],
        "phase": Phase.UPDATE,
        "group": 3,
        "signature": "adam",
        "makes": [{"num_bytes": 1, "keep": True}],
    },
)
CLUSTER = cluster_of(
    {(0, 1): [0], (1, 0): [1]},
    kind=[0, 1],
    on_host=(False, True),
    memory=[100, 200],
    reserve=[10, 0],
    rate=[1.0, 2.0],
)
PROBLEM = problem_of(GRAPH, CLUSTER, [[0, 0], [1, 2], [2, INF], [1, 1]], issue_s=0.5, pinned=[-1, -1, 0, -1])
PIPELINE = Pipeline(
    stage=[0, 0, 1, 1], replicas=[1, 1], num_microbatches=4, schedule="1f1b", in_flight=[2, 1], stage_s=[1, 2]
)  # fmt: skip
PLAN = Plan(
    device=[0, 0, 0, 0], priority=[0, 1, 2, 3], recompute=[False, True, False, False], pipeline=PIPELINE
)
TIMELINE = Timeline(
    origin=TimelineOrigin.MEASURED,
    device_name=("d0", "d1"),
    kind=[SpanKind.COMPUTE, SpanKind.TRANSFER],
    resource=[0, 1],
    item=[1, 0],
    microbatch=[0, 0],
    start_s=[0.0, 1.0],
    end_s=[1.0, 3.0],
    peak_bytes=[5, 6],
)
PLACEMENT = Placement(
    problem=PROBLEM,
    plan=PLAN,
    algorithm="by hand",
    status=Status.FEASIBLE,
    score_s=4.0,
    bound_s=2.0,
    bound_name="critical path",
    proof="",
    shortfall_bytes=[0, 0],
    peak_bytes=[50, 0],
    least_overflow_plan=None,
    members=(),
    wall_s=0.1,
)
GROUP = OpGroup(ops=[0, 1, 2], devices=(1, 0), rows=(3, 1), mode=Mode.REPLICATE, sync=Sync.PS, server=1)
STRATEGY = Strategy(
    name="by hand",
    graph_digest=GRAPH.digest,
    cluster_digest=CLUSTER.digest,
    batch=4,
    groups=(GROUP, OpGroup(ops=[3], devices=(0,), rows=(4,), mode=Mode.PIPELINE, microbatches=2)),
    semantics=("statistics of a batch are of each replica's rows",),
    schedule="1f1b",
)
STRATEGY_ANSWER = StrategyAnswer(
    problem=PROBLEM,
    strategy=STRATEGY,
    algorithm="by hand",
    score_s=4.0,
    bound_s=2.0,
    bound_name="critical path",
    peak_bytes=[50, 0],
    wall_s=0.1,
)
NOUNS: dict[str, Any] = {
    type(noun).__name__: noun
    for noun in (
        *(GRAPH, CLUSTER, PROBLEM.costs, PROBLEM, PIPELINE, PLAN, TIMELINE, PLACEMENT),
        *(GROUP, STRATEGY, STRATEGY_ANSWER),
    )
}

OTHER: dict[tuple[str, str], Any] = {
    ("Graph", "assumptions"): (Assumption("model.py:3", "layer", "a condition", "True", 1),),
    ("Graph", "warnings"): (Finding("unread", "no op reads it", ("weight",)),),
    ("Graph", "notes"): ("it depends on a draw",),
    ("Graph", "op_name"): ["a", "b", "c", "d"],
    ("Graph", "op_kind"): ["a", "b", "c", "d"],
    ("Graph", "module"): ["a", "b", "c", "d"],
    ("Graph", "phase"): [0, 0, 1, 2],
    ("Graph", "mirror"): [-1, -1, 0, -1],
    ("Graph", "signature_table"): ["sgd"],
    ("Graph", "capture"): "another way",
    ("Graph", "tensor_op"): [0, 1, 1, 1, 3],
    ("Graph", "tensor_storage"): [0, 1, 2, NO_STORAGE, 4],
    ("Graph", "use_tensor"): [0, 0, 2],
    ("Graph", "use_op"): [3, 2, 3],
    ("Cluster", "device_name"): ["a", "b"],
    ("Cluster", "kind_name"): ["a", "b"],
    ("Cluster", "link_name"): ["a", "b"],
    ("Cluster", "route"): [[[-1], [1]], [[1], [-1]]],
    ("Costs", "origin"): [Origin.ANALYTIC] * 4,
    ("Problem", "graph"): dataclasses.replace(GRAPH, capture="another way"),
    ("Problem", "cluster"): dataclasses.replace(CLUSTER, host=[0, 1]),
    ("Problem", "costs"): dataclasses.replace(PROBLEM.costs, issue_s=[0.0] * 4),
    ("Problem", "objective"): "throughput",
    ("Problem", "links"): "parallel",
    ("Problem", "split"): "chain",
    ("Problem", "load"): "max2",
    ("Problem", "pinned"): [-1, 0, 0, -1],
    ("Pipeline", "num_microbatches"): 5,
    ("Pipeline", "schedule"): "gpipe",
    ("Pipeline", "stage"): [0, 0, 0, 1],
    ("Pipeline", "rank"): (0, 0),
    ("Pipeline", "replica_device"): ((0, 1),),
    ("Pipeline", "replica_microbatches"): (4,),
    ("Pipeline", "microbatch_rows"): (2, 2, 2, 1),
    ("OpGroup", "devices"): (1, 2),
    ("OpGroup", "rows"): (2, 2),
    ("OpGroup", "server"): 0,
    ("OpGroup", "ops"): [0, 1, 3],
    ("Strategy", "graph_digest"): "another",
    ("Strategy", "cluster_digest"): "another",
    ("Strategy", "semantics"): ("dropout of each device is its own",),
    ("Strategy", "schedule"): "gpipe",
    ("StrategyAnswer", "problem"): dataclasses.replace(PROBLEM, links="parallel"),
    ("StrategyAnswer", "strategy"): dataclasses.replace(STRATEGY, schedule="gpipe"),
    ("Plan", "pipeline"): None,
    ("Timeline", "origin"): TimelineOrigin.SIMULATED,
    ("Timeline", "device_name"): ["a", "b"],
    ("Timeline", "start_s"): [0.5, 1.0],
}


def other_value(name: str, field: str) -> Any:
    """A valid value that the field does not have: the first one up by one, unless listed."""
    if (name, field) in OTHER:
        return OTHER[name, field]
    values = np.array(getattr(NOUNS[name], field))
    values.flat[0] = not values.flat[0] if values.dtype.kind == "b" else values.flat[0] + 1
    return values

"""check_strategy: everything about a strategy that can be judged without simulating it."""

import numpy as np

from loadmaster.core.check import Violation
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase
from loadmaster.core.problem import FREE, Objective, Problem
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync


def check_strategy(problem: Problem, strategy: Strategy) -> list[Violation]:
    """The rules a strategy breaks, worst first; an empty list means that it may be lowered and run.

    Memory is not judged here: the simulator does.
    """
    graph, cluster = problem.graph, problem.cluster
    if strategy.num_ops != graph.num_ops:
        text = f"the strategy has {strategy.num_ops} ops, the graph {graph.num_ops}"
        return [Violation("length", text)]
    for what, have, want in (
        ("graph", strategy.graph_digest, graph.digest),
        ("cluster", strategy.cluster_digest, cluster.digest),
    ):
        if have != want:
            text = f"the strategy is for {what} {have[:12]!r}, this is {want[:12]!r}; ask for it again"
            return [Violation("digest", text)]
    if strategy.devices[-1] >= cluster.num_devices:
        text = f"a group is on device {strategy.devices[-1]}, the cluster has {cluster.num_devices} devices"
        return [Violation("device", text)]
    found = []
    if problem.objective != Objective.STEP or problem.pipeline:
        text = "strategies are for the time of a step; ask for --objective step, and for no pipeline"
        found.append(Violation("objective", text))
    found += _check_ties(graph, strategy)
    for group in strategy.groups:
        found += _check_group(problem, group)
    return found


def _check_ties(graph: Graph, strategy: Strategy) -> list[Violation]:
    """A backward op goes with its forward op, an update with its weight, a capture's group is whole."""
    of, names = strategy.group_of, graph.op_name
    back = np.flatnonzero(graph.mirror != NO_MIRROR)
    torn = back[of[back] != of[graph.mirror[back]]]
    if len(torn):
        pair = names[torn[0]], names[graph.mirror[torn[0]]]
        return [Violation("mirror", f"backward op {pair[0]!r} and forward op {pair[1]!r} are in two groups")]
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    owns = (graph.phase[maker] == Phase.PARAM) & (graph.phase[user] == Phase.UPDATE)
    apart = np.flatnonzero(owns & (of[maker] != of[user]))
    if len(apart):
        pair = names[user[apart[0]]], names[maker[apart[0]]]
        return [Violation("update", f"update {pair[0]!r} and its weight {pair[1]!r} are in two groups")]
    tied = np.flatnonzero(graph.group != NO_GROUP)
    _, first, inverse = np.unique(graph.group[tied], return_index=True, return_inverse=True)
    split = np.flatnonzero(of[tied] != of[tied[first]][inverse])
    if len(split):
        pair = names[tied[split[0]]], names[tied[first[inverse[split[0]]]]]
        return [Violation("group", f"ops {pair[0]!r} and {pair[1]!r} belong together but are in two groups")]
    return []


def _check_group(problem: Problem, group: OpGroup) -> list[Violation]:
    graph, cluster = problem.graph, problem.cluster
    found = []
    kinds = cluster.kind[list(group.devices)]
    stuck = ~np.isfinite(problem.costs.compute_s[group.ops][:, kinds])
    if stuck.any():
        op, d = (int(axis[0]) for axis in np.nonzero(stuck))
        text = f"op {graph.op_name[group.ops[op]]!r} cannot run on {cluster.device_name[group.devices[d]]}"
        found.append(Violation("support", text))
    pinned = problem.pinned[group.ops]
    moved = np.flatnonzero((pinned != FREE) & (np.array([group.devices != (p,) for p in pinned.tolist()])))
    if len(moved):
        op = int(group.ops[moved[0]])
        text = f"op {graph.op_name[op]!r} is pinned to {cluster.device_name[problem.pinned[op]]}"
        found.append(Violation("pinned", f"{text}, its group is not on that device alone"))
    strange = [p for p in group.sfb if graph.phase[p] != Phase.PARAM]
    if strange:
        found.append(
            Violation("sfb", f"sfb names op {graph.op_name[strange[0]]!r}, which is not a parameter")
        )
    several = group.mode == Mode.REPLICATE and len(group.devices) > 1
    if several and group.sync == Sync.NONE and (graph.phase[group.ops] == Phase.UPDATE).any():
        text = f"{len(group.devices)} replicas train the same weights and nothing sums their gradients"
        found.append(Violation("sync", f"{text}; use sync allreduce or ps"))
    return found
